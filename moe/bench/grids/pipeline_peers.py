"""Compares this project's pipeline with torch.distributed.pipelining, with the same modules, micro-batches and order of actions: seconds
per step, losses, gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.bench.grids.stages import CPU, Stages, barrier, batch, connect, layers, runtime_for, schedule_for
from moe.recipe.sections import Model
from parallel.mesh.mesh import Axis
from parallel.pipeline.schedule import Schedule
from parallel.process.fork import run_on_ranks

NAMES = ("gpipe", "1f1b", "interleaved")
SAME = 1e-6  # largest difference of losses, and of gradients relative to the largest gradient of a weight


def compared(rank: int, ranks: int, name: str, microbatches: int, config: dict[str, int], size: int, rounds: int) -> dict[str, Any]:
    """One rank's seconds in each round, ours and torch's; its losses, and the largest difference of gradients."""
    mesh, model_config = connect(rank, ranks), Model(**config)
    schedule = schedule_for(name, ranks, microbatches)
    inputs, targets = batch(microbatches, size, model_config.max_length)
    model, stages = layers(model_config, schedule, inputs[0])
    runtime = runtime_for(schedule, mesh, stages)
    mine = {stage: stages[stage] for stage in schedule.stages_of(rank)}
    total = microbatches * targets[0].numel()

    def loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum") / total

    crossing = (size, model_config.max_length, model_config.d_model)

    def ours() -> list[float]:
        work = Stages(mine, schedule, rank, inputs=inputs, crossing=crossing, loss=lambda y, j: loss(y, targets[j]))
        runtime.run(work)
        return [work.losses[j].item() for j in sorted(work.losses)]

    ways = {"ours": ours, "torch": _torch_step(name, schedule, mine, mesh.axis("pp"), inputs, targets, loss)}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[float]] = {}
    gradients: dict[str, list[Tensor]] = {}
    for number in range(rounds + 2):
        for way in list(ways)[:: 1 if number % 2 else -1]:
            model.zero_grad(set_to_none=True)
            started = barrier()
            losses[way] = ways[way]()
            if number >= 2:
                seconds[way].append(time.perf_counter() - started)
            gradients[way] = [p.grad.clone() for module in mine.values() for p in module.parameters() if p.grad is not None]
    apart = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(gradients["ours"], gradients["torch"], strict=True)]
    return {"seconds": seconds, "losses": losses, "gradients": max(apart), "number": len(apart)}


def _torch_step(
    name: str,
    schedule: Schedule,
    mine: dict[int, nn.Module],
    axis: Axis,
    inputs: list[Tensor],
    targets: list[Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[], list[float]]:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    staged = [PipelineStage(module, stage, schedule.num_stages, CPU, group=axis.group) for stage, module in mine.items()]
    how: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[name]
    peer = how(staged if name == "interleaved" else staged[0], len(inputs), loss_fn=loss, scale_grads=False)
    whole, wanted = torch.cat(inputs), torch.cat(targets)
    first, last = 0 in mine, schedule.num_stages - 1 in mine

    def step() -> list[float]:
        losses: list[Tensor] = []
        peer.step(*([whole] if first else []), **({"target": wanted, "losses": losses} if last else {}), return_outputs=False)
        return [found.item() for found in losses]

    return step


def peers_row(name: str, *, microbatches: int = 8, width: int = 256, size: int = 2, rounds: int = 15) -> dict[str, Any]:
    """The row of a schedule: ratio of seconds, and differences of losses and gradients."""
    ranks = 2
    config = {"num_layers": 4, "d_model": width, "num_heads": 4, "d_ff": 4 * width, "max_length": 128, "tied_embeddings": False}
    found = run_on_ranks(compared, ranks, ranks, name, microbatches, config, size, rounds, timeout_s=300)
    seconds = {way: [max(each) for each in zip(*(rank["seconds"][way] for rank in found), strict=True)] for way in ("ours", "torch")}
    ratios = [a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)]
    losses = [rank["losses"] for rank in found if rank["losses"]["ours"]][0]
    apart = max(abs(a / b - 1) for a, b in zip(losses["ours"], losses["torch"], strict=True))
    gradients = max(rank["gradients"] for rank in found)
    ratio = statistics.median(ratios)
    return {
        "what": "peers",
        "schedule": name,
        "ranks": ranks,
        "stages": schedule_for(name, ranks, microbatches).num_stages,
        "microbatches": microbatches,
        "seconds": statistics.median(seconds["ours"]),
        "torch_seconds": statistics.median(seconds["torch"]),
        "ratio": ratio,
        "ratios": sorted(ratios),
        "losses_apart": apart,
        "gradients_apart": gradients,
        "passed": ratio <= 1.0 and apart <= SAME and gradients <= SAME,
    }
