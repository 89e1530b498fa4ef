"""Loads a checkpoint, written by any number of ranks, as one unsharded model: to generate, evaluate, convert, or begin another run.

Adapters (LoRA, moe/nn/lora.py) are merged into the base model that their checkpoint names:

    checkpoints/step-40   only adapters: layers.0.attention.q.lora_a, ...; its JSON has "base": folder and hash of the base's checkpoint
    whole(path)           reader of the weights W + s B A under the base's parameter names, with a recipe without adapters
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

from torch import Tensor

from moe.checks.begins import another_run, no_base
from moe.model.initialize import depth_ahead, global_name
from moe.model.transformer import Transformer
from moe.nn.lora import adapted, pair_of
from moe.parallelize.build import build
from moe.recipe import hash_table, sections
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.start.state import EXTRA, check_values, global_layouts, load_extra, opened
from parallel.errors import BadInput
from parallel.mesh.layout import Box
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process.process import World
from parallel.store import checkpoint
from parallel.store.stored import Reader, check_same_parameters

WHERE = "base"  # key in the JSON of a checkpoint of adapters; its value, made by `described`, names their base model
_TRAINS = "moe train also accepts --init_from WHERE_IT_IS"


def choose(run_dir: Path, *, step: int | None = None) -> Path:
    """Return the folder of a run's newest valid checkpoint, or of its checkpoint at `step`. Raises BadInput."""
    world, log = Mesh.of(Degrees()).axis("world"), lambda text: print(text, file=sys.stderr)
    path = checkpoint.newest(run_dir / "checkpoints", world=world, log=log, step=step, flag="--step")
    if path is None:
        raise BadInput("run folder", got=run_dir, needed="a run with a checkpoint", fix=another_run(run_dir))
    return path


def restore(path: Path, run: Run | None = None) -> Transformer:
    """Return the model of a checkpoint, with adapters merged into it, in evaluation mode. run: the checkpoint's recipe, if the caller has
    built it already. Raises BadInput."""
    mesh, reader = Mesh.of(Degrees()), whole(path)
    alone = {"degrees": sections.Parallel(dp=1, ep=1), "tiling": sections.Tiling(), "lora": sections.Lora()}
    run = (run or build_run(reader.state["recipe"])).model_copy(update=alone)
    model, layouts = build(run, mesh, device=World().device, table=reader.state.get(hash_table.STATE))
    check_same_parameters(reader, global_layouts(layouts))
    for name, parameter in model.named_parameters():
        stored = reader.load(global_name(name), "weight", layouts[name], mesh)
        check_values(stored, f"weight of {global_name(name)} in {path.name}")
        parameter.data.copy_(stored)
    load_extra(reader, model, log=lambda text: print(text, file=sys.stderr))
    return model.eval()


def described(base: Reader) -> dict[str, str]:
    """Return the value that a checkpoint of adapters stores about its base model: {"path": folder, "manifest": hash of its
    manifest.json}."""
    return {"path": str(base.path.resolve()), "manifest": _hash(base.path)}


def moved_base(found: Reader, given: Path | None) -> Path | None:
    """Return the folder to which the base model of the adapters `found` was moved. given: the value of --init_from. If `given` is a
    checkpoint, return it. If it is the folder of a run that has a checkpoint with the base's name (step-N), and no checkpoint is at the
    base's old place, return this checkpoint. Else return None."""
    if given is None or (given / "manifest.json").is_file():
        return given
    there = Path((found.state.get(WHERE) or {}).get("path", ""))
    within = given / "checkpoints" / there.name
    return within if (within / "manifest.json").is_file() and not (there / "manifest.json").is_file() else None


def base_of(found: Reader, moved: Path | None = None) -> Reader:
    """Return a reader of the base model of `found`, a checkpoint of adapters. moved: folder to which the base was moved; None: it is where
    `found` says. Raises BadInput."""
    said = found.state.get(WHERE)
    said = said if isinstance(said, dict) and isinstance(said.get("path"), str) else {}
    path, there = moved or Path(said.get("path", "")), Path(said.get("path", "BASE"))
    what, needed = "the base of a run of adapters", f"the checkpoint for which the adapters of {found.path.name} were trained"
    if not said or not (path / "manifest.json").is_file():
        fix = f"link it (mkdir -p {there.parent} && ln -s WHERE_IT_IS {there}), or move it back; {_TRAINS}"
        raise BadInput(what, got=f"no checkpoint in {path}", needed=needed, fix=fix)
    if _hash(path) != said.get("manifest"):
        fix = f"move it back to {there}; {_TRAINS}"
        raise BadInput(what, got=f"another checkpoint in {path}", needed=f"{needed}, which was at {there}", fix=fix)
    checkpoint.verify(path)
    return whole(path)


def whole(path: Path) -> Reader:
    """Return a reader of a checkpoint's model, with its adapters, if it has any, merged into their base. Raises BadInput."""
    reader = opened(path)
    return Merged(reader, base_of(reader)) if WHERE in reader.state else reader


class Merged(Reader):
    """Reader of a base model with adapters, which are merged into each weight when it is read. It has no optimizer states."""

    def __init__(self, adapters: Reader, base: Reader) -> None:
        self.path, self.base, self.adapters = adapters.path, base, adapters
        recipe = adapters.state["recipe"]
        run = build_run(recipe)
        self.scale, self.ahead = run.lora.scale, run.model.ahead
        self.state: dict[str, Any] = adapters.state | {"recipe": recipe | {"lora": sections.Lora().model_dump(mode="json")}}
        self.entries = {}

    def names(self, kind: str = "weight") -> dict[str, tuple[int, ...]]:
        if kind == "weight":
            # the base may have more modules of multi-token prediction
            return {name: shape for name, shape in self.base.names().items() if depth_ahead(name) <= self.ahead}
        return self.adapters.names(kind) if kind == EXTRA else {}

    def region(self, name: str, kind: str, region: Box) -> Tensor:
        if kind == EXTRA:
            return self.adapters.region(name, kind, region)
        if kind != "weight":
            needed = "a run that trained all weights: frozen weights have no optimizer states"
            raise BadInput(f"{kind} of {name}", got="a run of adapters", needed=needed, fix="leave optimizer states out: --moments fresh")
        weight, (left, right) = self.base.region(name, kind, region), pair_of(name)
        shapes = self.adapters.names()
        if left not in shapes:
            return weight
        rows, columns = region
        every = slice(0, shapes[right][0])
        narrow = self.adapters.region(left, kind, (rows, every)), self.adapters.region(right, kind, (every, columns))
        return adapted(weight, *narrow, scale=self.scale, dtype=weight.dtype)  # fp32, also if the base is narrower


def check_base(rank: int, *, source: Reader | None, found: Reader | None) -> None:
    """Raise BadInput if the recipe has adapters but there is no checkpoint to start from. Also raise it if the run's own checkpoint has
    adapters and the recipe does not, or the reverse. rank: lora.rank. source: the checkpoint of --init_from. found: the run's own."""
    if rank and source is None and found is None:
        raise no_base(rank)
    if found is not None and bool(rank) != (WHERE in found.state):
        before = found.state["recipe"].get("lora", {}).get("rank", 0)
        what = "adapters" if before else "all weights"
        fix = f"--lora.rank {before}, or begin another run with this one: --out ANOTHER --init_from {found.path.parent.parent}"
        raise BadInput("lora.rank", got=f"{rank}", needed=f"{before}: {found.path.name} has {what}", fix=fix)


def _hash(path: Path) -> str:
    return hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest()
