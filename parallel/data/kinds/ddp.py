"""DDP: every rank holds all weights, gradients and optimizer states (parallel/data/ddp.py). DP: DDP's engine with replicas of the model in
threads of one process (parallel/data/dp.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from parallel.data.kinds.kind import EngineKind, Setup

if TYPE_CHECKING:
    from torch import nn

    from parallel.data.engine import Engine, Rule


def start(model: nn.Module, setup: Setup, optimizer: Rule) -> Engine:
    from parallel.data.ddp import DDP

    working = setup.working if setup.casts == "step" else None
    return DDP(model, layouts=setup.layouts, mesh=setup.mesh, optimizer=optimizer, working=working)


def start_dp(model: nn.Module, setup: Setup, optimizer: Rule) -> Engine:
    import torch

    from parallel.data.ddp import DDP
    from parallel.data.dp import Replicas
    from parallel.process.process import gpus

    first = next(model.parameters()).device
    apart = first.type == "cuda" and gpus() >= setup.replicas
    devices = [torch.device("cuda", i) if apart else first for i in range(setup.replicas)]
    replicas = Replicas(model, devices=devices, scatter=setup.scatter, gather=setup.gather)
    return DDP(model, layouts=setup.layouts, mesh=setup.mesh, optimizer=optimizer, forward=replicas)


DDP = EngineKind("ddp", start, {"kind": "ddp"}, steps_by_stage=True, gradients="buckets", casts=("use", "step"))
# stage 0 of ZeRO shards nothing, so it is DDP, but with the recipe keys of ZeRO (engine, offload) and fp32 master weights
ZERO_0 = replace(DDP, name="zero0", sharding={"kind": "zero", "stage": 0}, keys=("engine", "offload"), planned_as="ddp", master_copy=True)
DP = replace(
    DDP,
    name="dp",
    start=start_dp,
    sharding={"kind": "dp"},
    keys=("replicas",),
    steps_by_stage=False,
    threads=True,
    planned_as="ddp",
    casts=("use",),
)
