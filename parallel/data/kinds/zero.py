"""ZeRO by DeepSpeed: stages 1 and 2 (parallel/data/zero.py), and stage 3, which gathers each weight separately (parallel/data/zero3.py)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from parallel.data.kinds import ddp
from parallel.data.kinds.kind import At, EngineKind, GatheredSizes, Setup, StandIn

if TYPE_CHECKING:
    import torch
    from torch import nn

    from parallel.data.engine import Engine, Rule
    from parallel.numerics.first_values import Fill

_WHY = "DeepSpeed's engine reads tensors' memory addresses, which the fake tensors of a rehearsal do not have"


def load() -> None:
    from parallel.data.deepspeed import load_deepspeed

    load_deepspeed()


def cut(model: nn.Module, setup: Setup, device: torch.device, fill: Fill) -> None:
    from parallel.data.zero3 import ShardedInit

    ShardedInit(setup.layouts, setup.mesh, device=device, fill=fill, offload=setup.offload)(model)


def _start(stage: int, model: nn.Module, setup: Setup, optimizer: Rule) -> Engine:
    """Start the engine of this ZeRO stage. Start DDP instead if there are pipeline stages, a single data-parallel rank and no offload,
    because then nothing is sharded."""
    if setup.mesh.axis("pp").size > 1 and setup.mesh.axis("dp", "sp").size == 1 and setup.offload.optimizer == "none":
        return ddp.start(model, setup, optimizer)
    from parallel.data.engine import AdamW

    assert isinstance(optimizer, AdamW)
    given: dict[str, Any] = {name: getattr(setup, name) for name in ("layouts", "mesh", "offload", "working")}
    if stage == 3:
        from parallel.data.zero3 import Zero3

        return Zero3(model, optimizer=optimizer, **given)
    from parallel.data.zero import Zero

    return Zero(model, stage, optimizer=optimizer, **given)


def gathered(at: At, w: GatheredSizes) -> float:
    """Return the bytes of gathered weights and unsharded gradients at moment `at` of a step (docs/parallel/planner_memory.md, Stage 3)."""
    bucket, sums = min(w.bucket, w.held), min(w.bucket, w.trained)
    live = min(w.held, max(2 * w.bucket, w.matrix if at == "work" else w.table))  # elements that DeepSpeed keeps gathered at a time
    if at == "bucket":  # weights of the layers whose gradients are in the bucket are already freed
        return w.compute_bytes * min(live, w.held - bucket) + (2 + 1 / w.copies) * w.sum_bytes * sums
    return w.compute_bytes * (live + (bucket if at == "forward" or (at == "work" and live < w.held) else 0.0))


def _zero(stage: int, **facts: Any) -> EngineKind:
    fixed: dict[str, Any] = {"keys": ("engine", "offload"), "load": load, "steps": "elements", "master_copy": True, "bucket": "passes"}
    fixed["unless_flat"] = "fsdp"
    return EngineKind(f"zero{stage}", partial(_start, stage), {"kind": "zero", "stage": stage}, stage=stage, **(fixed | facts))


def _instead(stage: int, sharded: str) -> StandIn:
    why = f"{_WHY}: DDP is used instead of ZeRO-{stage}; with ZeRO, a rank of N would hold only 1/N of the {sharded}"
    return StandIn({"kind": "ddp", "stage": 0}, why)


_TO_HOST = frozenset({("optimizer", "cpu")})
ZERO_1 = _zero(1, offloads=_TO_HOST, stands_in=_instead(1, "optimizer states"))
ZERO_2 = _zero(2, offloads=_TO_HOST, with_stages="fsdp", stands_in=_instead(2, "optimizer states and gradients"))
ZERO_3 = _zero(
    3,
    cut=cut,
    frees_weights=True,
    offloads=frozenset((states, place) for states in ("optimizer", "parameters") for place in ("cpu", "nvme")),
    with_stages="fsdp",
    stands_in=StandIn({"engine": "fsdp"}, f"{_WHY}: torch's FSDP is used instead of ZeRO-3, and shards in the same way"),
    gradients="buffer",
    bucket="always",
    gathered=gathered,
    moments=("forward", "bucket"),
)
