"""Saves and loads a run's state as checkpoints: weights, optimizer states, routers' biases, counters, loss scale, recipe, tokenizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe.checks.begins import no_checkpoint
from moe.experts.experts import Experts
from moe.model.initialize import AHEAD, global_name
from moe.model.transformer import extra_state, moe_layers
from moe.nn.blocks import Blocks
from moe.nn.linear import Linear
from moe.nn.lora import parts as adapters_of
from moe.recipe import hash_table
from moe.recipe.changes import change_lines
from moe.recipe.frozen import is_frozen
from moe.recipe.hash_table import Table
from moe.recipe.load import build_run
from parallel.data.engine import Engine
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.kfac.grafted import KfacEngine
from parallel.kfac.kfac import Kfac
from parallel.mesh.collectives import largest
from parallel.mesh.layout import Box, Layout
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.store import checkpoint
from parallel.store.checkpoint import Piece
from parallel.store.stored import Reader, Unreadable, check_same_parameters, finite
from parallel.watch.outcome import of_all

# A checkpoint names a tensor by its kind and parameter. Kinds: "weight", optimizer states such as "exp_avg", FACTOR.format(...), EXTRA
FACTOR = "kfac.{}"  # K-FAC's factors and inverses, whose layouts differ from the parameters' layouts
EXTRA = "buffer"  # routers' selection biases, which are buffers: they have no layout and no optimizer states
SQUARES = "exp_avg_sq"  # prefix of kinds that are means of squares, which are never negative
PLACED = "rebalancing"  # key in a checkpoint's JSON, for the placement of experts (moe/train/parts/rebalance.py)


@dataclass
class Counters:
    """Counts of the steps of a run so far."""

    step: int = 0  # all steps, with or without an update of the weights
    updates: int = 0
    skipped: int = 0  # steps without an update, because the gradient norm was not finite
    in_a_row: int = 0  # steps skipped since the last update


def save(folder: Path, engine: Engine, mesh: Mesh, *, keep: int, **described: Any) -> Path:
    """Write a checkpoint of this step into `folder`, and remove all checkpoints but the newest `keep`. Return the new checkpoint's folder.
    Collective. described: the keyword arguments of `parts`."""
    return checkpoint.save(folder, world=mesh.axis("world"), keep=keep, **parts(engine, mesh, **described))


def parts(
    engine: Engine, mesh: Mesh, *, counters: Counters, scale: LossScale, table: Table | None = None, placed: Any = None, **described: Any
) -> dict[str, Any]:
    """Return the content of a checkpoint: the arguments `step`, `held` (tensors) and `state` (JSON) of parallel/store/checkpoint.py.
    table: token id -> experts, for hash routers. placed: result of `Rebalancer.state`. described: further entries of `state`: "recipe" (its
    values), "tokenizer" (its description), "data" (key of the tokenized text), "code" (recipe key -> hash of the plugin's file), and for
    adapters "base" (result of `restore.described`). Values that are None are left out. Iterating over `held` is collective."""
    state = {"counters": vars(counters), "loss_scale": scale.state(), hash_table.STATE: table, PLACED: placed, **described}
    found = {key: value for key, value in state.items() if value is not None}
    return {"step": counters.step, "held": held(engine, mesh), "state": found}


def held(engine: Engine, mesh: Mesh) -> Iterator[tuple[str, Piece]]:
    """Yield (kind, Piece) for all tensors that this rank writes to a checkpoint: shards, each with its position in the whole tensor. If the
    model has LoRA adapters, frozen weights are left out: the base's checkpoint has them. Collective: an engine may gather shards."""
    for name, layout in adapters_of(engine.layouts, engine.module)[0].items():
        parts = engine.state(name)  # collective, so every rank calls it
        if layout.is_owner(mesh):
            for kind, tensor in parts.items():
                for piece in checkpoint.pieces(global_name(name), _of_kind(engine, name, kind, layout), mesh, tensor):
                    yield kind, piece
    for kind, name, layout, tensor in engine.kfac.state() if isinstance(engine, KfacEngine) else ():
        if layout.is_owner(mesh):
            for piece in checkpoint.pieces(global_name(name), layout, mesh, tensor):
                yield FACTOR.format(kind), piece
    for name, tensor in extra_owned(engine.module, engine.layouts, mesh):
        yield EXTRA, Piece(name, tuple(tensor.shape), (0,) * tensor.ndim, tensor)


def extra_owned(model: nn.Module, layouts: dict[str, Layout], mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the routers' biases that this rank writes to a checkpoint. The rank that writes a layer's ffn_norm also
    writes the bias of the layer's router."""
    for layer in moe_layers(model):
        if Layout((), holders=layouts[f"layers.{layer.layer}.ffn_norm.weight"].holders).is_owner(mesh):
            yield from extra_state(layer).items()


def _of_kind(engine: Engine, name: str, kind: str, layout: Layout) -> Layout:
    """Return the layout of a parameter's weight or optimizer state. layout: the weight's. An optimizer state that is a mean over one dim
    (Adafactor) lacks this dim."""
    dim = None if kind == "weight" else engine.rule.kept(name, len(layout.shape))[kind]
    return layout if dim is None else layout.without(dim)


def _kept(engine: Engine, layouts: dict[str, Layout]) -> dict[str, dict[str, Layout]]:
    """Return a dict for all optimizer states: kind -> parameter -> layout. layouts: parameter -> the weight's layout."""
    found: dict[str, dict[str, Layout]] = {}
    for name, layout in layouts.items():
        for kind in engine.rule.kept(name, len(layout.shape)):
            found.setdefault(kind, {})[name] = _of_kind(engine, name, kind, layout)
    return found


def find(folder: Path, mesh: Mesh, *, log: Callable[[str], None], step: int | None = None) -> Reader | None:
    """Return the newest valid checkpoint in a run's folder of checkpoints, or the one of `step`; None if the folder has none. Collective.
    Raises BadInput if all checkpoints are damaged, or if the one of `step` is damaged or missing."""
    world = mesh.axis("world")
    path = checkpoint.newest(folder, world=world, log=log, step=step)
    return None if path is None else of_all(lambda: opened(path), world, what=f"checkpoint {path.name}")


def resume(
    found: Reader | None,
    engine: Engine,
    mesh: Mesh,
    *,
    counters: Counters,
    scale: LossScale,
    data: str,
    recipe: dict[str, Any],
    log: Callable[[str], None],
    whole: dict[str, Layout] | None = None,
) -> bool:
    """Load the checkpoint `found` into the engine, `counters` and `scale`. Return False if `found` is None. Collective. data: key of the
    tokenized text, `Dataset.key`. recipe: this run's, as JSON. whole: layouts of the whole model's parameters, if this rank has only some
    pipeline stages. Raises BadInput, which names the parameter, for a checkpoint of another model. Logs changed recipe keys. Changes
    that alter what the model computes have already been refused (resume.py)."""
    if found is None:
        return False
    begun = found.state["counters"]["step"] > 0  # False if moe convert made the checkpoint
    now = build_run(recipe)
    mine, _ = adapters_of(engine.layouts, engine.module)
    everywhere, _ = adapters_of(whole or engine.layouts, engine.module)
    kept = _kept(engine, {name: of for name, of in everywhere.items() if not is_frozen(global_name(name), now.train.freeze)})
    fresh = not begun and not all(found.names(kind) for kind in kept)  # converted without some optimizer states: all start at zero
    check_same_parameters(found, global_layouts(everywhere))
    for kind, layouts in kept.items() if not fresh else ():
        check_same_parameters(found, global_layouts(layouts), (kind,))
    if begun and found.state["data"] != data:
        log("the training text is not the one this run was started with: samples may come twice or not at all")
    for line in change_lines(build_run(found.state["recipe"]), now, begun=begun):
        log(line)
    engine.load_state(mine, _loaded_by(found, engine, mesh, weights_only=fresh), steps=found.state["counters"]["updates"])
    vars(counters).update(found.state["counters"])
    if isinstance(engine, KfacEngine):
        load_factors(found, engine.kfac, mesh, updates=counters.updates, log=log)
    load_extra(found, engine.module, log=log, staged=whole is not None)
    scale.load(found.state["loss_scale"])
    return True


def _loaded_by(found: Reader, engine: Engine, mesh: Mesh, *, weights_only: bool) -> Callable[[str, str, Box], Tensor]:
    """Return a function (name, kind, box) that loads the region `box` of a parameter's weight or optimizer state from the checkpoint
    `found`. With weights_only, it returns zeros for optimizer states."""

    def load(name: str, kind: str, box: Box) -> Tensor:
        if weights_only and kind != "weight":
            return torch.zeros([part.stop - part.start for part in box])
        tensor = found.load(global_name(name), kind, _of_kind(engine, name, kind, engine.layouts[name]), mesh, box)
        where = f"{kind} of {global_name(name)} in {found.path.name} on rank {mesh.axis('world').index}"
        check_values(tensor, where, squares=kind.startswith(SQUARES))
        return tensor

    return load


def source(path: Path, mesh: Mesh, *, log: Callable[[str], None]) -> Path:
    """Return the folder of a verified checkpoint: `path` itself, or the newest checkpoint of the run in `path`. Collective. Raises
    BadInput if there is none, or if it is damaged."""
    world = mesh.axis("world")
    named = largest(float(world.index == 0 and (path / "manifest.json").is_file()), world)  # rank 0 decides for all ranks
    given = path if named else checkpoint.newest(path / "checkpoints", world=world, log=log)
    if given is None:
        raise no_checkpoint(path)
    if given == path:
        of_all(lambda: _verify(given, log) if world.index == 0 else None, world, what="--init_from")
    return given


def _verify(given: Path, log: Callable[[str], None]) -> None:
    try:
        checkpoint.verify(given)
    except Unreadable:
        raise
    except BadInput as refused:
        log(str(refused))
        needed = "an undamaged checkpoint"
        raise BadInput("--init_from", got=f"{given}, which is damaged", needed=needed, fix="take an earlier one") from None


def begin(found: Reader, engine: Engine, mesh: Mesh, *, log: Callable[[str], None], whole: dict[str, Layout] | None = None) -> None:
    """Load weights and routers' biases from `found`, another run's checkpoint, and set optimizer states to zero. If this run has LoRA
    adapters, only the weights of their base are loaded. Blocks of multi-token prediction that only the other run has are left out. whole:
    layouts of all parameters of the model, if the engine lacks some: parameters of other pipeline stages, or quantized matrices.
    Collective. Raises BadInput, which names the parameter, for a checkpoint of another model."""
    fix = "give this recipe the sizes of the other run (in its recipe.yaml), or convert that run: moe convert"
    pairs = (adapters_of(layouts, engine.module) for layouts in (engine.layouts, whole or engine.layouts))
    # the engine's layouts and the whole model's; with LoRA only frozen parameters' layouts, and none of adapters
    mine, everywhere = (frozen if engine.module.adapted else trained for trained, frozen in pairs)
    check_same_parameters(found, global_layouts(everywhere), fix=fix, spare=(AHEAD,))
    if {name for name in found.names() if name.startswith(AHEAD)} - global_layouts(everywhere).keys():
        log("blocks of multi-token prediction are left out: the other run has more of them (model.ahead)")
    engine.load_state(mine, _loaded_by(found, engine, mesh, weights_only=True), steps=0)
    of_all(lambda: _fill_blocks(found, engine.module, mesh), mesh.axis("world"), what="lora.base")
    load_extra(found, engine.module, log=log, staged=whole is not None)


def _fill_blocks(found: Reader, model: nn.Module, mesh: Mesh) -> None:
    """Encode the checkpoint's matrices into the model's quantized blocks (moe/nn/blocks.py), one matrix at a time. Raises BadInput for a
    matrix that the blocks cannot hold exactly. Experts come first: if only other matrices do not fit, the fix keeps the experts' blocks."""
    less = "fp8" if any(isinstance(module, Experts) for module in model.modules()) else "whole"
    for path, module in sorted(model.named_modules(), key=lambda named: not isinstance(named[1], Experts)):
        for name, (blocks, layout) in module.blocks.items() if isinstance(module, Experts | Linear) else ():
            where, (_, *sizes) = global_name(f"{path}.{name}"), blocks.shape
            if isinstance(module, Linear):
                _encode(blocks, 0, found.load(where, "weight", layout, mesh).t(), f"{where} in {found.path.name}", less)
                continue
            for expert, number in enumerate(module.held):
                box = (slice(expert, expert + 1), *(slice(0, size) for size in sizes))
                (matrix,) = found.load(where, "weight", layout, mesh, box)
                _encode(blocks, expert, matrix, f"expert {number} of {where} in {found.path.name}", "whole")


def _encode(blocks: Blocks, number: int, matrix_IO: Tensor, where: str, less: str) -> None:
    """Encode `matrix_IO` as matrix `number` of the quantized blocks. Raises BadInput if they cannot hold its values exactly. where: name of
    the matrix in errors. less: value of lora.base that the error's fix names; with it, fewer matrices or none are quantized."""
    check_values(matrix_IO, where)
    if not blocks.put(number, matrix_IO):
        needed = f"weights that were published in {blocks.form} blocks, and not trained since"
        raise BadInput("lora.base", got=f"{blocks.form}, which cannot hold {where} exactly", needed=needed, fix=Set("it", less))


_SECTIONS = {"counters": dict, "loss_scale": dict, "recipe": dict, "tokenizer": dict, "data": str}


def opened(path: Path) -> Reader:
    """Open a verified checkpoint of a run. Raises BadInput if its state lacks a section or has an impossible value."""
    what, fix = f"checkpoint {path.name}", "take another checkpoint, or write these values as moe convert does"
    if not (path / "manifest.json").is_file():  # rank 0 has found and verified the checkpoint, so it is on another machine's disk
        needed, said = "the folder that rank 0 reads, on every machine", "give its absolute path, on a disk that all machines share"
        raise BadInput(what, got=f"no manifest in {path.absolute()}", needed=needed, fix=said)
    reader = Reader(path)
    held = reader.state if isinstance(reader.state, dict) else {}
    for name, kind in _SECTIONS.items():
        if not isinstance(held.get(name), kind):
            got = f"a state whose {name} is {type(held[name]).__name__}" if name in held else f"a state without {name}"
            raise BadInput(what, got=got, needed=", ".join(_SECTIONS), fix=fix)
    scale = held["loss_scale"]
    numbers = all(isinstance(scale.get(name), int | float) and math.isfinite(scale[name]) for name in ("value", "good_steps"))
    if not numbers or scale["value"] <= 0 or scale["good_steps"] < 0:
        raise BadInput(what, got=f"loss scale {scale}", needed="value above 0 and good_steps from 0, both finite", fix=fix)
    counters, names = held["counters"], Counters.__dataclass_fields__
    whole = all(isinstance(counters.get(name), int) and counters[name] >= 0 for name in names)
    if not whole or counters["updates"] + counters["skipped"] > counters["step"]:
        needed = f"{', '.join(names)} as whole numbers from 0, with updates + skipped at most step"
        raise BadInput(what, got=f"counters {counters}", needed=needed, fix=fix)
    return reader


def check_values(tensor: Tensor, what: str, *, squares: bool = False) -> None:
    """Raise BadInput for values that no run writes, but that a file with correct hashes may have: integers, values that are not finite, or,
    with `squares`, negative means of squares. what: the tensor's name."""
    got = None
    if not tensor.is_floating_point():
        got = f"values of {str(tensor.dtype).removeprefix('torch.')}"
    elif not finite(tensor):
        got = "values that are not finite"
    elif squares and (tensor < 0).any():
        got = "values below 0"
    if got is not None:
        needed = "finite floating-point numbers" + (", not below 0 because they are means of squares" if squares else "")
        raise BadInput(what, got=got, needed=needed, fix="take an earlier checkpoint, or convert it again")


def load_factors(reader: Reader, kfac: Kfac, mesh: Mesh, *, updates: int, log: Callable[[str], None]) -> None:
    """Load K-FAC's Kronecker factors and their inverses. updates: number of updates that the run has made. If some factors are missing, as
    after training with AdamW, log that they will be computed."""

    def stored(kind: str, name: str, layout: Layout) -> Tensor | None:
        full, kind = global_name(name), FACTOR.format(kind)
        first = full if layout.unstack is None else layout.unstack.format(0)
        if (first, kind) not in reader.entries:
            return None
        found = reader.load(full, kind, layout, mesh)
        check_values(found, f"{kind} of {full} in {reader.path.name}")
        return found

    if not kfac.load(stored, updates=updates):
        log("the checkpoint lacks some of K-FAC's factors: they are computed at the next refresh")


def load_extra(reader: Reader, model: nn.Module, *, log: Callable[[str], None], staged: bool = False) -> None:
    """Load routers' biases. Biases that only the checkpoint or only the model has are logged, because a resumed run may add or remove
    biases. Raises BadInput for a bias of another shape, and for one that is missing although the checkpoint's run trained with it. staged:
    whether this rank has only some pipeline stages; biases of other stages are then not logged."""
    stored, held = reader.names(EXTRA), extra_state(model)
    before = build_run(reader.state["recipe"])
    # whether the checkpoint must have the biases, because its run trained with them; moe convert makes checkpoints of step 0
    required = reader.state["counters"]["step"] > 0 and before.router.bias_rate is not None
    for name, tensor in held.items():
        lost = name not in stored and required and _layer(name) in before.model.layers_with_experts()
        if lost or stored.get(name, tuple(tensor.shape)) != tuple(tensor.shape):
            got, needed = "nothing" if lost else f"shape {list(stored[name])}", f"shape {list(tensor.shape)}"
            raise BadInput(f"{name} in {reader.path.name}", got=got, needed=needed, fix="take an earlier checkpoint, or convert it again")
        if name in stored:
            found = reader.region(name, EXTRA, tuple(slice(0, size) for size in tensor.shape))
            check_values(found, f"{EXTRA} of {name} in {reader.path.name}")
            tensor.copy_(found)
        else:
            log(f"the checkpoint has no {name}: it starts at zero")
    here = {layer.layer for layer in moe_layers(model)}
    for name in stored.keys() - held.keys():
        if not staged or _layer(name) in here:
            log(f"this recipe has no {name}: the checkpoint's is left out")


def _layer(name: str) -> int:
    return int(name.split(".")[1])


def global_layouts(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Return a dict: a parameter's name in checkpoints -> its layout."""
    return {global_name(name): layout for name, layout in layouts.items()}
