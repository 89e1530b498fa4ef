"""One model's tensors computed from another's, layer by layer and by global name: the core of `moe convert`.

    kept      embedding, attention, norms, and unchanged layers: copied
    grown     a dense layer's network to experts                       moe/convert/upcycle.py: copy, granular, noise, drop
    shrunk    experts to fewer experts, or to one dense network        moe/convert/upcycle.py: merge, prune

A tensor of the source without a place in the new model is refused, and so is a tensor of the new model without a source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from moe.convert import upcycle
from moe.convert.checks import Settings, change, even_gate_sum, experts_of, gate_sum, parts
from moe.convert.upcycle import Network
from moe.recipe.hash_table import Table
from moe.recipe.sections import Run
from moe.train.start.state import EXTRA
from parallel.errors import BadInput
from parallel.store.stored import Reader

Values = dict[str, Tensor]  # by global name


@dataclass
class Conversion:
    """New values, by global name, of every tensor of `run`'s model that does not keep its initial value, from a reader's checkpoint."""

    before: Run
    run: Run
    reader: Reader
    settings: Settings
    shapes: dict[str, tuple[int, ...]]  # shapes of the new model's tensors, by global name
    first: Callable[[str], Tensor]  # initial value of a tensor in a new model
    load: dict[int, list[float]] = field(default_factory=dict)  # load of each expert in the source's MoE layers
    table: Table | None = None  # the new routers' table, if the recipe names one
    used: set[str] = field(default_factory=set)  # the source's tensors read so far

    @cached_property
    def source(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the source's parameters, by global name."""
        return self.reader.names()

    def read(self, name: str, kind: str = "weight") -> Tensor:
        if name not in self.source:
            _refuse(name, None, self.shapes.get(name))
        self.used.add(name)
        return self.reader.region(name, kind, tuple(slice(0, n) for n in self.source[name]))

    # --- one network of the source; matrices are transposed to the experts' form

    def dense(self, stem: str, kind: str = "weight") -> Network:
        gated = f"{stem}.w3.weight" in self.source
        w1, w2, *w3 = (self.read(f"{stem}.{m}.weight", kind).T for m in ("w1", "w2", "w3")[: 2 + gated])
        return Network(w1, w2, *w3)

    def expert(self, layer: int, number: int) -> Network:
        stem = f"layers.{layer}.experts.{number}"
        w1, w2, *w3 = (self.read(f"{stem}.{m}") for m in ("w1", "w2", "w3")[: 2 + (f"{stem}.w3" in self.source)])
        return Network(w1, w2, *w3)

    # --- one layer

    def grown(self, layer: int) -> Values:
        """Convert a dense layer's network to experts. A new shared or residual network does not change the output at first."""
        s, x, network = self.settings, self.run.experts, self.dense(f"layers.{layer}.ffn")
        count, g = experts_of(self.run, layer), parts(self.before, self.run)
        key, seed = f"layers.{layer}.experts", self.run.train.seed
        methods: dict[str, Callable[[], list[Network]]] = {
            "copy": lambda: upcycle.copies(network, count),
            "granular": lambda: upcycle.shards(network, count, parts=g),
            "noise": lambda: upcycle.noisy(network, count, share=s.share, scale=s.scale, key=key, seed=seed),
            "drop": lambda: upcycle.redrawn(network, count, share=s.share, key=key, seed=seed),
        }
        factor = 1 / even_gate_sum(self.run.router, count)
        values = _experts(layer, [expert.scaled(factor) for expert in methods[s.method]()])
        if s.method == "granular":
            for name in self._router_rows(layer, count):
                values[name] = upcycle.shared_rows(self.first(name), parts=g)
        if x.residual:
            values |= _dense(f"layers.{layer}.residual", network)  # the router's two coefficients sum to 1: c_0 f + c_1 f = f
        if x.shared:
            name = f"layers.{layer}.shared.w2.weight"
            values[name] = torch.zeros_like(self.first(name))  # contributes nothing until it has learned
        return values

    def grown_moments(self, layer: int, kind: str) -> Values:
        """Return optimizer moments for copied experts: each expert gets an equal part of the dense network's gradient.

        With a residual network, which gets half of the gradient, the experts share the other half. If a token's gates sum to s, w2 is
        stored as w2 / s, so its gradient is s times as large.
        """
        x, power = self.run.experts, {"exp_avg": 1, "exp_avg_sq": 2}[kind]
        count, half = experts_of(self.run, layer), 0.5 if self.run.experts.residual else 1.0
        s = even_gate_sum(self.run.router, count)
        network = self.dense(f"layers.{layer}.ffn", kind)
        expert = network.each(lambda name, w: w * (half / count * (s if name == "w2" else 1.0)) ** power)
        beside = _dense(f"layers.{layer}.residual", network.each(lambda _, w: w * half**power)) if x.residual else {}
        return _experts(layer, upcycle.copies(expert, count)) | beside

    def shrunk(self, layer: int) -> Values:
        """Convert a sparse layer to fewer experts, or to one dense network."""
        sparse = experts_of(self.run, layer)
        groups, weights = self._groups(layer)
        factor = (gate_sum(self.before.router) or 1.0) / ((gate_sum(self.run.router) or 1.0) if sparse else 1.0)
        made = [upcycle.merged([self.expert(layer, e) for e in g], [weights[e] for e in g]).scaled(factor) for g in groups]
        left = ("experts",) if sparse else ("experts", "router")  # pruned experts, and routers of layers that need none
        self.used |= {n for n in self.source if n.startswith(tuple(f"layers.{layer}.{part}." for part in left))}
        if sparse:
            values = _experts(layer, made)
            for name in self._router_rows(layer, sparse):
                values[name] = upcycle.merged_rows(self.read(name), groups, weights)
            rest = [n for n in self.shapes if n.startswith(f"layers.{layer}.") and feed_forward(n) and n not in values]
            return values | {name: self.read(name) for name in rest}
        if self.before.experts.shared:
            made.append(self.dense(f"layers.{layer}.shared"))
        return _dense(f"layers.{layer}.ffn", upcycle.joined(made))

    def _groups(self, layer: int) -> tuple[list[list[int]], list[float]]:
        """Return the groups of experts that become one expert each, and the weight of each expert in its group's mean."""
        count, into = experts_of(self.before, layer), experts_of(self.run, layer) or 1
        weights = self.load[layer] if self.settings.needs_load else [1.0] * count
        prune = self.settings.method == "prune"
        return (upcycle.most_used(weights, into) if prune else upcycle.neighbours(count, into)), weights

    def bias(self, name: str, new_E: Tensor) -> Tensor:
        """Return a router's selection bias: the source's, merged if experts are merged; zero for a new router."""
        layer = int(name.split(".")[1])
        if name not in self.reader.names(EXTRA):
            return torch.zeros_like(new_E)
        old_E = self.reader.region(name, EXTRA, (slice(0, experts_of(self.before, layer)),))
        return old_E if change(self.before, self.run, layer) is None else upcycle.merged_rows(old_E, *self._groups(layer))

    def _router_rows(self, layer: int, count: int) -> list[str]:
        """Names of the router's parameters that have one row per expert."""
        of_router = [n for n in self.shapes if n.startswith(f"layers.{layer}.router.") and not n.endswith("norm.weight")]
        return [n for n in of_router if self.shapes[n][0] == count]

    # --- the whole model

    def values(self) -> Values:
        """Return all new weights. Raises BadInput for a tensor without a place, or with another shape."""
        out = {name: self.read(name) for name in self.kept()}
        for layer in range(self.run.model.num_layers):
            what = change(self.before, self.run, layer)
            if what is not None:
                out |= self.grown(layer) if what == "grow" else self.shrunk(layer)
        for name in self.source.keys() - self.used:
            _refuse(name, self.source[name], None)
        for name, value in out.items():
            if tuple(value.shape) != self.shapes.get(name):
                _refuse(name, tuple(value.shape), self.shapes.get(name))
        return out

    def moments(self, kind: str) -> Values:
        """Return optimizer moments for all copied tensors. The rest is left out and starts at 0."""
        out = {name: self.read(name, kind) for name in self.kept()}
        for layer in range(self.run.model.num_layers):
            if change(self.before, self.run, layer) is not None:
                out |= self.grown_moments(layer, kind)
        return out

    def kept(self) -> list[str]:
        """Names of tensors outside the feed-forward part of changed layers."""
        return [n for n in self.shapes if not feed_forward(n) or change(self.before, self.run, int(n.split(".")[1])) is None]


def feed_forward(name: str) -> bool:
    """Return whether a tensor belongs to the feed-forward half of a block, the part that conversions change."""
    part = name.split(".")
    return part[0] == "layers" and part[2] not in ("attention", "attention_norm", "cross", "cross_norm", "ffn_norm")


def _experts(layer: int, networks: list[Network]) -> Values:
    return {
        f"layers.{layer}.experts.{e}.{name}": w
        for e, network in enumerate(networks)
        for name, w in (("w1", network.w1), ("w2", network.w2), ("w3", network.w3))
        if w is not None
    }


def _dense(stem: str, network: Network) -> Values:
    pairs = (("w1", network.w1), ("w2", network.w2), ("w3", network.w3))
    return {f"{stem}.{name}.weight": w.T for name, w in pairs if w is not None}


def _refuse(name: str, got: tuple[int, ...] | None, needed: tuple[int, ...] | None) -> None:
    raise BadInput(
        f"parameter {name}",
        got="nothing in the source" if got is None else f"shape {list(got)} in the source",
        needed="no such parameter: the recipe's model has none" if needed is None else f"shape {list(needed)}",
        fix="change the recipe so that what it does not convert has the source's sizes",
    )
