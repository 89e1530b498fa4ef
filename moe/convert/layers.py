"""Computes a model's tensors from another model's, layer by layer, for `moe convert`.

    unchanged   embedding, attention, norms, layers with as many experts as before: copied
    grown       a dense layer's network to experts                       moe/convert/upcycle.py: copy, granular, noise, drop
    shrunk      experts to fewer experts, or to one dense network        moe/convert/upcycle.py: merge, prune

The conversion is refused if the new model does not use a tensor of the source, or if the source lacks a tensor that would be copied. Names
of tensors are their names in checkpoints (moe/model/initialize.py).
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

Values = dict[str, Tensor]  # name in checkpoints -> tensor


@dataclass
class Conversion:
    """Converts a checkpoint of the recipe `before`, the source, to a model of the recipe `run`.

    `shapes`: name -> shape of the new model's tensors. `first(name)`: returns a tensor's initial value in the new model. `load`: layer of
    the source -> load of each expert; {} if the settings do not need it. `table`: token id -> experts, if the recipe names a hash table.
    `used`: names of the source's tensors that were read. The conversion is refused if a tensor of the source is not among them.
    """

    before: Run
    run: Run
    reader: Reader
    settings: Settings
    shapes: dict[str, tuple[int, ...]]
    first: Callable[[str], Tensor]
    load: dict[int, list[float]] = field(default_factory=dict)
    table: Table | None = None
    used: set[str] = field(default_factory=set)

    @cached_property
    def source(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the source's parameters."""
        return self.reader.names()

    def read(self, name: str, kind: str = "weight") -> Tensor:
        """Return a tensor of the source and add its name to `used`. `kind`: weight, or an optimizer moment."""
        if name not in self.source:
            _refuse(name, None, self.shapes.get(name))
        self.used.add(name)
        return self.reader.region(name, kind, tuple(slice(0, n) for n in self.source[name]))

    def dense(self, stem: str, kind: str = "weight") -> Network:
        """Return the dense network with the name `stem` in the source, with matrices transposed to [in, out] as in experts. `kind`: weight,
        or an optimizer moment."""
        names = ("w1", "w2", "w3") if f"{stem}.w3.weight" in self.source else ("w1", "w2")
        return {name: self.read(f"{stem}.{name}.weight", kind).T for name in names}

    def expert(self, layer: int, number: int) -> Network:
        stem = f"layers.{layer}.experts.{number}"
        return {name: self.read(f"{stem}.{name}") for name in (("w1", "w2", "w3") if f"{stem}.w3" in self.source else ("w1", "w2"))}

    def grown(self, layer: int) -> Values:
        """Return the tensors of a dense layer converted to experts. New shared and residual networks do not change the output initially."""
        s, x, network = self.settings, self.run.experts, self.dense(f"layers.{layer}.ffn")
        count, g = experts_of(self.run, layer), parts(self.before, self.run)
        key, seed = f"layers.{layer}.experts", self.run.train.seed
        methods: dict[str, Callable[[], list[Network]]] = {
            "copy": lambda: [network] * count,
            "granular": lambda: upcycle.shards(network, count, parts=g),
            "noise": lambda: upcycle.noisy(network, count, share=s.share, scale=s.scale, key=key, seed=seed),
            "drop": lambda: upcycle.redrawn(network, count, share=s.share, key=key, seed=seed),
        }
        factor = 1 / even_gate_sum(self.run.router, count)
        values = _experts(layer, [upcycle.scaled(expert, factor) for expert in methods[s.method]()])
        if s.method == "granular":
            for name in self._router_rows(layer, count):
                values[name] = upcycle.shared_rows(self.first(name), parts=g)
        if x.residual:
            # experts and residual network both return the dense network's output, and their coefficients sum to 1
            values |= _dense(f"layers.{layer}.residual", network)
        if x.shared:
            name = f"layers.{layer}.shared.w2.weight"
            values[name] = torch.zeros_like(self.first(name))  # with w2 = 0 the shared network returns 0 initially
        return values

    def grown_moments(self, layer: int, kind: str) -> Values:
        """Return optimizer moments `kind` (exp_avg or exp_avg_sq) for copied experts. Each expert is assumed to get an equal part of the
        dense network's gradient; with a residual network, that network gets half of the gradient, and the experts share the other half. If
        a token's gates sum to s, w2 is stored as w2 / s, so its gradient is s times as large."""
        residual, power = self.run.experts.residual, {"exp_avg": 1, "exp_avg_sq": 2}[kind]
        count, half = experts_of(self.run, layer), 0.5 if residual else 1.0
        s = even_gate_sum(self.run.router, count)
        network = self.dense(f"layers.{layer}.ffn", kind)
        expert = {name: w * (half / count * (s if name == "w2" else 1.0)) ** power for name, w in network.items()}
        rest = _dense(f"layers.{layer}.residual", {name: w * half**power for name, w in network.items()}) if residual else {}
        return _experts(layer, [expert] * count) | rest

    def shrunk(self, layer: int) -> Values:
        """Return the tensors of a MoE layer converted to fewer experts, or to one dense network."""
        sparse = experts_of(self.run, layer)
        groups, weights = self._groups(layer)
        factor = (gate_sum(self.before.router) or 1.0) / ((gate_sum(self.run.router) or 1.0) if sparse else 1.0)
        merged = (upcycle.merged([self.expert(layer, e) for e in group], [weights[e] for e in group]) for group in groups)
        made = [upcycle.scaled(network, factor) for network in merged]
        dropped = ("experts",) if sparse else ("experts", "router")  # counted as used, because unused tensors are refused
        self.used |= {n for n in self.source if n.startswith(tuple(f"layers.{layer}.{part}." for part in dropped))}
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
        """Return (groups of the source's experts, weight of every expert). Each group is replaced by its weighted mean."""
        count, into = experts_of(self.before, layer), experts_of(self.run, layer) or 1
        weights = self.load[layer] if self.settings.needs_load else [1.0] * count
        prune = self.settings.method == "prune"
        return (upcycle.most_used(weights, into) if prune else upcycle.neighbors(count, into)), weights

    def bias(self, name: str, new_E: Tensor) -> Tensor:
        """Return the values of the router's selection bias `name`, one for each expert. If the source has this bias, its values are copied,
        or merged as the experts are. Otherwise return zeros, with the shape of `new_E`."""
        layer = int(name.split(".")[1])
        if name not in self.reader.names(EXTRA):
            return torch.zeros_like(new_E)
        old_E = self.reader.region(name, EXTRA, (slice(0, experts_of(self.before, layer)),))
        return old_E if change(self.before, self.run, layer) is None else upcycle.merged_rows(old_E, *self._groups(layer))

    def _router_rows(self, layer: int, count: int) -> list[str]:
        """Return the names of the router's parameters that have one row for each of its `count` experts."""
        of_router = [n for n in self.shapes if n.startswith(f"layers.{layer}.router.") and not n.endswith("norm.weight")]
        return [n for n in of_router if self.shapes[n][0] == count]

    def values(self) -> Values:
        """Return the new model's weights that come from the source. Raises BadInput for a tensor of the source that is not used, and for a
        tensor of another shape."""
        out = {name: self.read(name) for name in self.kept()}
        for layer in range(self.run.model.num_layers):
            what = change(self.before, self.run, layer)
            if what is not None:
                out |= self.grown(layer) if what == "grow" else self.shrunk(layer)
        for name in sorted(self.source.keys() - self.used):
            _refuse(name, self.source[name], None)
        for name, value in out.items():
            if tuple(value.shape) != self.shapes.get(name):
                _refuse(name, tuple(value.shape), self.shapes.get(name))
        return out

    def moments(self, kind: str) -> Values:
        """Return the optimizer moments `kind` (exp_avg or exp_avg_sq) of all copied tensors. The moments of other tensors start at 0."""
        out = {name: self.read(name, kind) for name in self.kept()}
        for layer in range(self.run.model.num_layers):
            if change(self.before, self.run, layer) is not None:
                out |= self.grown_moments(layer, kind)
        return out

    def kept(self) -> list[str]:
        """Return the names of the tensors that are copied: all except the feed-forward part of changed layers."""
        return [n for n in self.shapes if not feed_forward(n) or change(self.before, self.run, int(n.split(".")[1])) is None]


def feed_forward(name: str) -> bool:
    """Return whether a tensor belongs to the feed-forward part of a block: dense network, or router and experts."""
    part = name.split(".")
    return part[0] == "layers" and part[2] not in ("attention", "attention_norm", "cross", "cross_norm", "ffn_norm")


def _experts(layer: int, networks: list[Network]) -> Values:
    """Return the tensors of a layer's experts under their names in checkpoints."""
    return {f"layers.{layer}.experts.{e}.{name}": w for e, network in enumerate(networks) for name, w in network.items()}


def _dense(stem: str, network: Network) -> Values:
    """Return the matrices of a dense network, [out, in], under their names in checkpoints. `stem`: the network's name."""
    return {f"{stem}.{name}.weight": w.T for name, w in network.items()}


def _refuse(name: str, got: tuple[int, ...] | None, needed: tuple[int, ...] | None) -> None:
    here = "nothing in the source" if got is None else f"shape {list(got)} in the source"
    there = "a source without it: the recipe's model has no such parameter" if needed is None else f"shape {list(needed)}"
    fix = "change the recipe so that unconverted parameters have the source's names and sizes"
    raise BadInput(f"parameter {name}", got=here, needed=there, fix=fix)
