"""DP: replicas in threads of one process (parallel/data/dp.py), around DDP's engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallel.data.kinds import ddp
from parallel.data.kinds.kind import EngineKind, Setup

if TYPE_CHECKING:
    from torch import nn

    from parallel.data.engine import Engine, Rule


def start(model: nn.Module, setup: Setup, optimizer: Rule) -> Engine:
    import torch

    from parallel.data.ddp import DDP
    from parallel.data.dp import Replicas

    first = next(model.parameters()).device
    apart = first.type == "cuda" and torch.cuda.device_count() >= setup.replicas
    devices = [torch.device("cuda", i) if apart else first for i in range(setup.replicas)]
    replicas = Replicas(model, devices=devices, scatter=setup.scatter, gather=setup.gather)
    return DDP(model, layouts=setup.layouts, mesh=setup.mesh, optimizer=optimizer, forward=replicas)


DP: EngineKind = replace(
    ddp.DDP, name="dp", start=start, sharding={"kind": "dp"}, keys=("replicas",), steps_by_stage=False, threads=True, planned_as="ddp"
)
