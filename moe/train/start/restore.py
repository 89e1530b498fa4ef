"""Loads a checkpoint, from any number of ranks, as one whole model on this device: to generate, evaluate or convert."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from moe.data import Tokenizer
from moe.data import load as load_tokenizer
from moe.model.names import global_name
from moe.model.transformer import Transformer
from moe.parallelize.build import build
from moe.recipe import hash_table
from moe.recipe.load import build_run
from moe.train.start.adapters import whole
from moe.train.start.state import check_values, load_extra, opened
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.store import checkpoint
from parallel.store.stored import check_same_parameters


def choose(run_dir: Path, *, step: int | None = None) -> Path:
    """Return the folder of a run's newest valid checkpoint, or of that of `step`. Raises BadInput."""
    world, log = Mesh.of(Degrees()).axis("world"), lambda text: print(text, file=sys.stderr)
    path = checkpoint.newest(run_dir / "checkpoints", world=world, log=log, step=step, flag="--step")
    if path is None:
        raise BadInput("run folder", got=run_dir, needed="a run with a checkpoint", fix="train first: moe train switch_tiny")
    return path


def load_model(run_dir: Path, *, step: int | None = None) -> tuple[Transformer, Tokenizer, int]:
    """Return (model, tokenizer, step) of the checkpoint that `choose` finds. Raises BadInput."""
    path = choose(run_dir, step=step)
    state = opened(path).state
    return restore(path), load_tokenizer(state["tokenizer"]), int(state["counters"]["step"])


def restore(path: Path) -> Transformer:
    """Return the model of a checkpoint, with adapters merged into it, in evaluation mode. Raises BadInput."""
    mesh, reader = Mesh.of(Degrees()), whole(path)
    run = build_run(reader.state["recipe"] | {"degrees": {"dp": 1, "ep": 1}, "tiling": {}})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, layouts = build(run, mesh, device=device, table=reader.state.get(hash_table.STATE))
    check_same_parameters(reader, {global_name(n): layout for n, layout in layouts.items()})
    for name, parameter in model.named_parameters():
        stored = reader.load(global_name(name), "weight", layouts[name], mesh)
        check_values(stored, f"weight of {global_name(name)} in {path.name}")
        parameter.data.copy_(stored)
    load_extra(reader, model, log=lambda text: print(text, file=sys.stderr))
    return model.eval()
