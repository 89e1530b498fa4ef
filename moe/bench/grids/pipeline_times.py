"""A pipeline's step time, compared with the timeline simulated from the mean seconds of each of its actions (Recorder).

The stages sleep as if devices were computing, so that two cores suffice for four processes. The remaining differences are effects that a
simulator does not know: the runtime's own work between actions, waiting for a message that is taken too early, and sends that block a rank.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from moe.bench.grids.stages import Asleep, Seconds, Stages, barrier, connect, descend, runtime_for, schedule_for
from parallel.mesh.mesh import Axis, Mesh
from parallel.pipeline.runtime import Recorder
from parallel.pipeline.schedule import Action, Op, Schedule, Span
from parallel.pipeline.simulator.simulate import Timeline, simulate
from parallel.process.fork import run_on_ranks

SECONDS = Seconds(forward=0.02, inputs=0.02, weights=0.02, update=0.005)  # seconds for all stages of a rank together
ROWS, WIDTH = 32, 256  # size of the tensors sent between stages
WITHIN = 0.10


def timed(rank: int, ranks: int, names: list[str], microbatches: int, steps: int, scale: float) -> list[dict[str, Any]]:
    """Run `steps` steps of each schedule in `names` on this rank, after one more step as a warm-up. Return a dict for each schedule.

    It has `steps`: start and end in seconds, and `actions`, the mean seconds of each kind of action and stage ("F0"); `transfer`: seconds
    of a message; `sum`: seconds of a sum of gradients. microbatches: in a step. scale: factor of SECONDS, the time for which a stage
    sleeps.
    """
    mesh = connect(rank, ranks)
    return [_timed(mesh, schedule_for(name, ranks, microbatches), steps, scale) for name in names]


def _timed(mesh: Mesh, schedule: Schedule, steps: int, scale: float) -> dict[str, Any]:
    axis = mesh.axis("pp")
    share = scale * schedule.num_ranks / schedule.num_stages if len(schedule.homes[0]) == 1 else scale  # a replicated stage counts whole
    slow = Seconds(SECONDS.forward * share, SECONDS.inputs * share, SECONDS.weights * share, SECONDS.update * share)
    stages: dict[int, nn.Module] = {stage: Asleep(WIDTH, slow) for stage in range(schedule.num_stages)}
    runtime = runtime_for(schedule, mesh, stages)
    inputs = [torch.ones(ROWS, WIDTH)] * schedule.microbatches
    mine = {stage: stages[stage] for stage in schedule.stages_of(axis.index)}

    def change(module: nn.Module) -> None:
        time.sleep(slow.update)
        descend(module)

    found = []
    for _ in range(steps + 1):
        work = Stages(
            mine,
            schedule,
            axis.index,
            inputs=inputs,
            crossing=(ROWS, WIDTH),
            loss=lambda y, _: y.mean(),
            change=change if schedule.num_updates > 1 else None,
        )
        recorder = Recorder()
        started = barrier()
        runtime.run(work, watchers=[recorder])
        found.append({"start": started, "end": time.perf_counter(), "actions": _means(recorder.record)})
    return {"steps": found[1:], "transfer": _transfer_seconds(axis), "sum": _sum_seconds(axis)}


def _means(record: list[Span]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for took in record:
        found.setdefault(_key(took.action), []).append(took.end - took.start)
    return {key: statistics.mean(seconds) for key, seconds in found.items()}


def _key(action: Action) -> str:
    return f"{action.op}{action.stage}"


def _transfer_seconds(axis: Axis, *, times: int = 20) -> float:
    """Seconds of a message from the first rank to the second: half of the median round trip."""
    if axis.index > 1:
        return 0.0
    tensor, other, seconds = torch.zeros(ROWS, WIDTH), axis.ranks[1 - axis.index], []
    for _ in range(times):
        started = time.perf_counter()
        for turn in (0, 1):
            (dist.send if turn == axis.index else dist.recv)(tensor, other, group=axis.group)
        seconds.append((time.perf_counter() - started) / 2)
    return statistics.median(seconds)


def _sum_seconds(axis: Axis, *, times: int = 10) -> float:
    """Seconds of summing one stage's gradient over the ranks."""
    tensor, seconds = torch.zeros(WIDTH, WIDTH), []
    for _ in range(times):
        started = barrier()
        dist.all_reduce(tensor, group=axis.group)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def simulated(schedule: Schedule, actions: list[dict[str, float]], *, transfer: float, summation: float) -> Timeline:
    """The timeline simulated from each rank's mean seconds of each action, of a message and of a sum."""

    def cost(rank: int, action: Action) -> float:
        return summation if action.op is Op.S else actions[rank][_key(action)]

    return simulate(schedule, cost, transfer_time=transfer)


def times_rows(ranks: int, names: list[str], *, microbatches: int, steps: int = 5, scale: float = 1.0) -> list[dict[str, Any]]:
    """Rows with medians over steps: measured seconds, and seconds simulated from the same step's actions."""
    by_rank = run_on_ranks(timed, ranks, ranks, names, microbatches, steps, scale, timeout_s=300)
    rows = []
    for name, *found in zip(names, *by_rank, strict=True):
        schedule = schedule_for(name, ranks, microbatches)
        transfer, summation = found[0]["transfer"], max(rank["sum"] for rank in found)
        each, timelines = [], []
        for step in zip(*(rank["steps"] for rank in found), strict=True):
            each.append(max(rank["end"] for rank in step) - min(rank["start"] for rank in step))
            timelines.append(simulated(schedule, [rank["actions"] for rank in step], transfer=transfer, summation=summation))
        measured, said = statistics.median(each), statistics.median(t.makespan for t in timelines)
        error = said / measured - 1
        rows.append(
            {"what": "times", "schedule": name, "ranks": ranks, "stages": schedule.num_stages, "microbatches": schedule.microbatches}
            | {"measured_seconds": measured, "simulated_seconds": said, "error": error}
            | {"least_seconds": min(each), "most_seconds": max(each), "transfer_seconds": transfer, "bubble": timelines[0].bubble()}
            | {"passed": abs(error) <= WITHIN}
        )
    return rows
