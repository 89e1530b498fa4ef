"""`moe convert`: a checkpoint of one model made the checkpoint of another, from which `moe train` goes on.

    dense run -> moe/upcycle.py -> sparse checkpoint at step 0          copy, granular, noise, drop
    sparse run -> moe/upcycle.py -> fewer experts, or dense             merge, prune

The new model is built as a new run would build it, so routers have their first values by name and seed; then every tensor that
the source gives is put over it. Layers may be dense or sparse on either side, each by itself. What the source has and the
recipe has no place for is refused: nothing is lost silently, and nothing is written unless all fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from moe import upcycle
from moe.config import Parallel, Run, Sharding
from moe.convert_checks import Settings, change, check_convertible, even_gate_sum, experts_of, gate_sum, parts
from moe.model.transformer import Transformer, extra_state, global_name
from moe.parallelize import build, start_engine
from moe.recipe import build as build_run
from moe.recipe import load, resolved_yaml
from moe.train import metrics, state
from moe.train.place import make_writable, settle_precision
from moe.train.state import EXTRA, Counters
from moe.upcycle import Network
from parallel import checkpoint
from parallel.checkpoint import Reader, verify
from parallel.data.engine import MOMENTS, Engine
from parallel.errors import BadInput
from parallel.layout import Layout
from parallel.mesh import Degrees, Mesh
from parallel.precision import LossScale
from parallel.process import World

RECENT = 100  # training lines of which a run's load is the mean
Values = dict[str, Tensor]  # by global name


@dataclass
class Conversion:
    """From a reader's model to the run's: new values, by global name, of every tensor that does not keep its first one."""

    before: Run
    run: Run
    reader: Reader
    settings: Settings
    shapes: dict[str, tuple[int, ...]]  # of the new model
    first: Callable[[str], Tensor]  # the value a new model starts with
    load: dict[int, list[float]] = field(default_factory=dict)  # of the source's layers with experts
    used: set[str] = field(default_factory=set)  # of the source's tensors

    @cached_property
    def source(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the source's parameters."""
        return self.reader.names()

    def read(self, name: str, kind: str = "weight") -> Tensor:
        if name not in self.source:
            _refuse(name, None, self.shapes.get(name))
        self.used.add(name)
        return self.reader.region(name, kind, tuple(slice(0, n) for n in self.source[name]))

    # --- networks by place, turned as experts have them

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
        """A dense layer's network as experts; what stands beside them makes no difference at first."""
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
            values |= _dense(f"layers.{layer}.residual", network)  # c_0 f + c_1 f = f
        if x.shared:
            name = f"layers.{layer}.shared.w2.weight"
            values[name] = torch.zeros_like(self.first(name))  # adds nothing until it has learned
        return values

    def grown_moments(self, layer: int, kind: str) -> Values:
        """Of copies: their gradients sum to the dense network's, so each is taken to see an equal part of it."""
        residual = self.run.experts.residual
        count = experts_of(self.run, layer)
        part = (count + residual) ** {"exp_avg": 1, "exp_avg_sq": 2}[kind]
        network = self.dense(f"layers.{layer}.ffn", kind).each(lambda _, w: w / part)
        beside = _dense(f"layers.{layer}.residual", network) if residual else {}
        return _experts(layer, upcycle.copies(network, count)) | beside

    def shrunk(self, layer: int) -> Values:
        """A sparse layer with fewer experts, or with none."""
        sparse = experts_of(self.run, layer)
        groups, weights = self._groups(layer)
        factor = (gate_sum(self.before.router) or 1.0) / ((gate_sum(self.run.router) or 1.0) if sparse else 1.0)
        made = [upcycle.merged([self.expert(layer, e) for e in g], [weights[e] for e in g]).scaled(factor) for g in groups]
        self.used |= {n for n in self.source if n.startswith((f"layers.{layer}.experts.", f"layers.{layer}.router."))}
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
        """Which experts become one, and what each counts."""
        count, into = experts_of(self.before, layer), experts_of(self.run, layer) or 1
        weights = self.load[layer] if self.settings.needs_load else [1.0] * count
        prune = self.settings.method == "prune"
        return (upcycle.most_used(weights, into) if prune else upcycle.neighbours(count, into)), weights

    def bias(self, name: str, new_E: Tensor) -> Tensor:
        """A router's selection bias: the source's, its experts' where there are fewer, and zero for a new router."""
        layer = int(name.split(".")[1])
        if name not in self.reader.names(EXTRA):
            return torch.zeros_like(new_E)
        old_E = self.reader.region(name, EXTRA, (slice(0, experts_of(self.before, layer)),))
        return old_E if change(self.before, self.run, layer) is None else upcycle.merged_rows(old_E, *self._groups(layer))

    def _router_rows(self, layer: int, count: int) -> list[str]:
        """The router's parameters that have one row an expert."""
        return [n for n, shape in self.shapes.items() if n.startswith(f"layers.{layer}.router.") and shape[0] == count]

    # --- the whole model

    def values(self) -> Values:
        """New weights. Raises BadInput for a tensor that has no place, or another shape."""
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
        """The optimizer's, of what is copied; of the rest they are 0."""
        out = {name: self.read(name, kind) for name in self.kept()}
        for layer in range(self.run.model.num_layers):
            if change(self.before, self.run, layer) is not None:
                out |= self.grown_moments(layer, kind)
        return out

    def kept(self) -> list[str]:
        """Tensors that are not in the feed-forward part of a changed layer."""
        return [n for n in self.shapes if not feed_forward(n) or change(self.before, self.run, int(n.split(".")[1])) is None]


def feed_forward(name: str) -> bool:
    """Whether a tensor belongs to the second half of a block, the part that conversions change."""
    part = name.split(".")
    return part[0] == "layers" and part[2] not in ("attention", "attention_norm", "ffn_norm")


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


# --- files ------------------------------------------------------------------------------------------------------------------


def find(source: Path) -> Path:
    """A checkpoint, or the newest good one of a run's folder. Raises BadInput."""
    if (source / "manifest.json").is_file():
        verify(source)
        return source
    path = checkpoint.newest(source / "checkpoints", world=Mesh.of(Degrees()).axis("world"), log=print)
    if path is None:
        raise BadInput("FROM_RUN", got=source, needed="a run with a checkpoint, or a checkpoint", fix="train first: moe train dense_tiny")
    return path


def loads(source: Path, before: Run, *, step: int) -> dict[int, list[float]]:
    """Each layer's share of choices by expert: the mean of a run's last RECENT training lines up to `step`, or a JSON file's own.

    A JSON file is an object of lists by layer number: {"1": [900, 20, 4, 76]}. Raises BadInput where a layer is missing.
    """
    if source.suffix == ".json":
        try:
            found = {int(layer): [float(n) for n in counts] for layer, counts in json.loads(source.read_text()).items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise BadInput("--load", got=f"{source} ({error})", needed='JSON like {"1": [900, 20, 4, 76]}', fix="mend the file") from None
    else:
        lines = [line for line in metrics.read(source) if line.get("kind") == "train" and line["step"] <= step][-RECENT:]
        found = {}
        for line in lines:
            for layer in line.get("moe") or ():
                sums = found.setdefault(layer["layer"], [0.0] * len(layer["load"]))
                found[layer["layer"]] = [a + b / len(lines) for a, b in zip(sums, layer["load"], strict=True)]
    for nth, layer in enumerate(before.model.layers_with_experts()):
        count = before.experts.of_layer(nth)
        if len(found.get(layer, [])) != count:
            got = f"{len(found[layer])} numbers" if layer in found else "nothing"
            raise BadInput("--load", got=f"{got} for layer {layer} in {source}", needed=f"{count}, one an expert", fix="--load FILE")
    return found


def convert(run: Run, source: Path, settings: Settings, *, load_from: Path | None = None) -> tuple[Engine, Conversion, Counters]:
    """The new model with its optimizer, as one process holds them. Raises BadInput for what cannot be converted."""
    reader = Reader(source)
    before = build_run(reader.state["recipe"])
    settings = check_convertible(before, run, settings)
    alone = run.model_copy(update={"degrees": Parallel(dp=1, ep=1), "sharding": Sharding()})
    mesh = Mesh.of(Degrees())
    model, layouts = build(alone, mesh, device=torch.device("cpu"))
    held = _by_global_name(model, layouts)
    conversion = Conversion(before, run, reader, settings, {n: tuple(t.shape) for n, t in held.items()}, held.__getitem__)
    if settings.needs_load:
        step = reader.state["counters"]["step"]
        conversion.load = loads(load_from or source.parent.parent, before, step=step)
    with torch.no_grad():
        for name, value in conversion.values().items():
            held[name].copy_(value)
        for name, bias_E in extra_state(model).items():
            bias_E.copy_(conversion.bias(name, bias_E))
    engine = start_engine(alone, model, layouts, mesh)
    counters = Counters()
    if settings.moments == "copy":
        vars(counters).update(reader.state["counters"])
        _load_moments(engine, conversion, layouts, counters)
    return engine, conversion, counters


def _load_moments(engine: Engine, conversion: Conversion, layouts: dict[str, Layout], counters: Counters) -> None:
    states = {name: engine.state(name) for name in layouts}
    for kind in MOMENTS:
        values = conversion.moments(kind)
        for name, layout in layouts.items():
            for part, into in _parts(name, layout, states[name][kind]):
                if part in values:
                    into.copy_(values[part])
    engine.load_state(states, steps=counters.updates)


def _by_global_name(model: Transformer, layouts: dict[str, Layout]) -> Values:
    parameters = dict(model.named_parameters())
    return {part: view for name, layout in layouts.items() for part, view in _parts(name, layout, parameters[name].detach())}


def _parts(name: str, layout: Layout, whole: Tensor) -> list[tuple[str, Tensor]]:
    """A parameter as checkpoints name it: itself, or each element of a stack."""
    if layout.unstack is None:
        return [(global_name(name), whole)]
    return [(layout.unstack.format(i), part) for i, part in enumerate(whole)]


def main(
    source: str, to: str, *, recipe: str, overrides: dict[str, str], settings: Settings, load: str | None = None, check: bool = False
) -> int:
    """Convert, write `to`, and say what was done."""
    from moe.convert_report import compared, told

    out, path = Path(to), find(Path(source))
    if checkpoint.numbered(out / "checkpoints"):
        raise BadInput("TO_RUN", got=f"{out}, which has checkpoints", needed="a new folder", fix="choose another, or remove it")
    run, origins = load_recipe(recipe, overrides)
    engine, conversion, counters = convert(run, path, settings, load_from=None if load is None else Path(load))
    make_writable(out, World())
    (out / "recipe.yaml").write_text(resolved_yaml(run, origins))
    reader = conversion.reader
    state.save(
        out / "checkpoints",
        engine,
        Mesh.of(Degrees()),
        counters=counters,
        scale=LossScale.of(run.precision.loss_scale),
        recipe=run.resolve(1).model_dump(mode="json"),
        tokenizer=reader.state["tokenizer"],
        data=reader.state["data"],
        keep=1,
    )
    for line in told(conversion, path, out):
        print(line)
    if check:
        print(compared(path, engine.module))
    return 0


def load_recipe(recipe: str, overrides: dict[str, str]) -> tuple[Run, dict[str, str]]:
    """A recipe that is legal by itself, its dtypes settled."""
    from moe.checks import check_together

    run, origins = load(recipe, overrides)
    check_together(run.resolve(1))
    return settle_precision(run, World()), origins
