"""Compares pipeline steps with torch.distributed.pipelining: the same modules and micro-batches on two processes, in turn.

Losses and all gradients must be the same. `python -m tests.measured torchs-pipelines --json FILE`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.bench.grids.pipeline import Stages, connect, runtime_for, schedule_for
from moe.bench.timing import CPU, in_turn, ratio, slowest
from moe.launch import exit_codes
from moe.recipe.sections import Model
from moe.records.results import write_json
from parallel.mesh.mesh import Axis
from parallel.pipeline.schedule import Schedule
from parallel.process.fork import run_on_ranks
from tests.support.stages import batch, layers

Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, target token ids) of a micro-batch -> its loss
PEERS = ("gpipe", "1f1b", "interleaved")
SAME = 1e-6  # largest allowed relative difference between our losses and gradients and torch's


def main(*, rounds: int = 15, json: str | None = None) -> int:
    """Prints a row for each schedule. Returns 1 if torch's pipelining is faster than ours or gives other results."""
    torch.set_num_threads(1)
    print(f"{'schedule':<12}{'ours':>14}{'torch':>14}{'ratio':>9}{'losses':>12}{'gradients':>12}", flush=True)
    rows = []
    for name in PEERS:
        row = peers_row(name, rounds=rounds)
        rows.append(row)
        times = f"{1000 * row['seconds']:>11.1f} ms{1000 * row['torch_seconds']:>11.1f} ms{row['ratio']:>9.3f}"
        print(f"{name:<12}{times}{row['losses_apart']:>12.1e}{row['gradients_apart']:>12.1e}", flush=True)
    if json:
        write_json(json, verb="measured torchs-pipelines", rows=rows)
    return exit_codes.of(all(row["passed"] for row in rows))


def peers_row(name: str, *, microbatches: int = 8, width: int = 256, size: int = 2, rounds: int = 15) -> dict[str, Any]:
    """Return a schedule's table row: step times of our and torch's pipelining, and the largest relative differences of their results."""
    ranks = 2
    found = run_on_ranks(_compared, ranks, ranks, name, microbatches, width, size, rounds, timeout_s=300)
    seconds = slowest([rank["seconds"] for rank in found])
    losses = [rank["losses"] for rank in found if rank["losses"]["ours"]][0]
    apart = max(abs(a / b - 1) for a, b in zip(losses["ours"], losses["torch"], strict=True))
    gradients, times = max(rank["gradients"] for rank in found), ratio(seconds["ours"], seconds["torch"])
    row: dict[str, Any] = {"what": "peers", "schedule": name, "ranks": ranks, "stages": schedule_for(name, ranks, microbatches).num_stages}
    row |= {"microbatches": microbatches, "seconds": statistics.median(seconds["ours"])}
    row |= {"torch_seconds": statistics.median(seconds["torch"]), "ratio": times}
    row |= {"ratios": sorted(a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)), "losses_apart": apart}
    return row | {"gradients_apart": gradients, "passed": times <= 1.0 and apart <= SAME and gradients <= SAME}


def _compared(rank: int, ranks: int, name: str, microbatches: int, width: int, size: int, rounds: int) -> dict[str, Any]:
    """Run both pipelines on this rank. Return `seconds` of each round and `losses` of each micro-batch, by "ours" and "torch", and
    `gradients`: the largest relative difference.
    """
    mesh, schedule = connect(rank, ranks), schedule_for(name, ranks, microbatches)
    config = Model(num_layers=4, d_model=width, num_heads=4, d_ff=4 * width, max_length=128, tied_embeddings=False)
    inputs, targets = batch(microbatches, size, config.max_length)
    model, stages = layers(config, schedule, inputs[0])
    runtime = runtime_for(schedule, mesh, stages)
    mine = {stage: stages[stage] for stage in schedule.stages_of(rank)}
    total = microbatches * targets[0].numel()

    def loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
        return F.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten(), reduction="sum") / total

    def ours() -> list[float]:
        crossing = (size, config.max_length, width)
        work = Stages(mine, schedule, rank, inputs=inputs, crossing=crossing, loss=lambda y, j: loss(y, targets[j]))
        runtime.run(work)
        return [work.losses[j].item() for j in sorted(work.losses)]

    pipelines = {"ours": ours, "torch": _torch_step(name, schedule, mine, mesh.axis("pp"), (inputs, targets), loss)}
    losses: dict[str, list[float]] = {}
    gradients: dict[str, list[Tensor]] = {}

    def run(name: str) -> None:
        losses[name] = pipelines[name]()
        gradients[name] = [p.grad for module in mine.values() for p in module.parameters() if p.grad is not None]

    def before() -> None:
        model.zero_grad(set_to_none=True)
        dist.barrier()

    for name in (*pipelines, *pipelines):
        before()
        run(name)
    seconds = in_turn({name: partial(run, name) for name in pipelines}, rounds=rounds, warmups=0, before=before)
    apart = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(gradients["ours"], gradients["torch"], strict=True)]
    return {"seconds": seconds, "losses": losses, "gradients": max(apart)}


def _torch_step(
    kind: str, schedule: Schedule, mine: dict[int, nn.Module], axis: Axis, data: tuple[list[Tensor], list[Tensor]], loss: Loss
) -> Callable[[], list[float]]:
    """A function that runs one step of torch's pipelining and returns the loss of each micro-batch, if this rank has the last stage."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    staged = [PipelineStage(module, stage, schedule.num_stages, CPU, group=axis.group) for stage, module in mine.items()]
    how: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}[kind]
    peer = how(staged if kind == "interleaved" else staged[0], len(data[0]), loss_fn=loss, scale_grads=False)
    inputs, targets = (torch.cat(tensors) for tensors in data)
    first, last = 0 in mine, schedule.num_stages - 1 in mine

    def step() -> list[float]:
        losses: list[Tensor] = []
        peer.step(*([inputs] if first else []), **({"target": targets, "losses": losses} if last else {}), return_outputs=False)
        return [found.item() for found in losses]

    return step
