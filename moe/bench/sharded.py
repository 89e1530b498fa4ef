"""Kinds of data parallelism by the short names that `moe bench memory`, `comm` and `kinds` take, and the models they are measured on.

ddp   fsdp   zero1 .. zero3        then: +cpu, +nvme    the optimizer's state there        +cpu-all, +nvme-all    parameters too
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe.config import Run
from moe.model.transformer import Transformer
from moe.parallelize import build, start_engine
from moe.recipe import build as build_run
from parallel import process
from parallel.data.engine import Engine
from parallel.errors import BadInput, did_you_mean
from parallel.layout import Layout
from parallel.mesh import Mesh
from parallel.process import World
from parallel.states import FP32, FP32_AND_COPY, Storage

CPU = torch.device("cpu")
PLAIN = ("ddp", "fsdp", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Kind:
    """`stage` of the closed forms (parallel/states.py), and what one parameter's states take before they are sharded."""

    name: str
    stage: int
    storage: Storage
    sharding: dict[str, Any]

    @property
    def by_deepspeed(self) -> bool:
        return bool(self.sharding["kind"] == "zero")

    @property
    def place(self) -> str:
        """Where the optimizer's state lies: device, cpu or nvme."""
        return str(self.sharding.get("offload", {}).get("optimizer", "device"))

    def with_path(self, folder: str) -> Kind:
        """The same kind with a folder for what goes to a disk."""
        if self.place != "nvme":
            return self
        return Kind(self.name, self.stage, self.storage, self.sharding | {"offload": self.sharding["offload"] | {"path": folder}})


def kind_of(name: str) -> Kind:
    """Raises BadInput."""
    found = re.fullmatch(r"(ddp|fsdp|zero([0-3]))(\+(cpu|nvme)(-all)?)?", name)
    if not found:
        near = did_you_mean(name, list(PLAIN))
        fix = f"did you mean {near}?" if near else f"--kinds {','.join(PLAIN)}"
        raise BadInput("--kinds", got=name, needed=f"of {', '.join(PLAIN)}, and after some +cpu, +nvme, +cpu-all, +nvme-all", fix=fix)
    place, parameters = found[4], found[4] if found[5] else "none"
    offload = {"offload": {"optimizer": place, "parameters": parameters}} if place else {}
    if found[2] is None:
        return Kind(name, 3 if found[1] == "fsdp" else 0, FP32, {"kind": found[1]} | offload)
    return Kind(name, int(found[2]), FP32_AND_COPY, {"kind": "zero", "stage": int(found[2])} | offload)


def kinds_of(names: str | None) -> list[Kind]:
    """Those named, with commas between; otherwise all without offload that this version's recipes have. Raises BadInput."""
    if names is not None:
        return [kind_of(name) for name in names.split(",")]
    return [kind for kind in map(kind_of, PLAIN) if _is_there(kind)]


def _is_there(kind: Kind) -> bool:
    try:
        build_run({"sharding": kind.sharding})
    except BadInput:
        return False
    return True


def load_engines(kinds: list[Kind]) -> None:
    """Import what the kinds need, once, before ranks are forked."""
    if any(kind.by_deepspeed for kind in kinds):
        from parallel.data.zero import load_deepspeed

        load_deepspeed()


@dataclass(frozen=True)
class Started:
    """One engine on the ranks that are running."""

    run: Run
    mesh: Mesh
    model: Transformer
    layouts: dict[str, Layout]
    engine: Engine


def start(values: dict[str, Any], rank: int, ranks: int) -> Started:
    """The recipe's engine around its model, as the trainer makes them. Every rank must call it."""
    run = build_run(values).check(ranks)
    mesh = process.connect(run.mesh_degrees(), World(rank, ranks))
    model, layouts = build(run, mesh, device=CPU)
    return Started(run, mesh, model, layouts, start_engine(run, model, layouts, mesh))


def tokens_of(rank: int, *, sequences: int, length: int, step: int = 0) -> Tensor:
    """Int64 [sequences, length + 1] of bytes."""
    return torch.randint(256, (sequences, length + 1), generator=torch.Generator().manual_seed(1000 * step + rank))
