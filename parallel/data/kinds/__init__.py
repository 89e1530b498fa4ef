"""Facts about data-parallel engines (DP and DDP, FSDP, ZeRO), and the list of them by name. A new engine needs its own file, a file of
facts in this folder, and a row in this list. This folder does not import torch."""

from __future__ import annotations

from typing import Literal

from parallel.data.kinds.ddp import DDP, DP, ZERO_0
from parallel.data.kinds.fsdp import FSDP
from parallel.data.kinds.kind import EngineKind
from parallel.data.kinds.zero import ZERO_1, ZERO_2, ZERO_3

Named = Literal["dp", "ddp", "fsdp", "zero"]  # values of sharding.kind; the engines named zero differ by sharding.stage
ENGINES: dict[str, EngineKind] = {kind.name: kind for kind in (DP, DDP, FSDP, ZERO_0, ZERO_1, ZERO_2, ZERO_3)}
PLAIN, CUT = DDP.name, FSDP.name  # PLAIN: the engine of a single rank; CUT: the engine that shards every weight


def engine_named(kind: str, stage: int) -> EngineKind:
    """Return the engine for the recipe's values of `sharding.kind` and `sharding.stage`. The stage matters only for "zero"."""
    return next(row for row in ENGINES.values() if row.sharding["kind"] == kind and row.sharding.get("stage", stage) == stage)


def planned() -> tuple[str, ...]:
    """Return the names of the engines whose memory and time the planner predicts; every other engine names one of these in `planned_as`."""
    return tuple(name for name, kind in ENGINES.items() if kind.planned_as is None)


def offloading(states: str, place: str) -> EngineKind:
    """Return the engine with the lowest ZeRO stage that can offload `states` ("optimizer" or "parameters") to `place` ("cpu" or "nvme")."""
    return min((kind for kind in ENGINES.values() if (states, place) in kind.offloads), key=lambda kind: kind.stage)
