"""Seconds of a pipeline's step, compared with its simulated timeline, and with torch's own pipelining.

    times      every schedule: compared with the timeline simulated from the mean seconds of each of its actions (Recorder)
    peers      GPipe, 1F1B and interleaved 1F1B on two processes: compared with torch.distributed.pipelining on the same modules and
               micro-batches, in turn; losses and all gradients must be the same

For `times`, the stages sleep for the time in which devices would compute, so that two cores suffice for four processes. The remaining
differences are unknown to a simulator: the runtime's own work between actions, waiting for messages, and sends that block a rank.
`moe bench pipeline --json FILE`; `--only times` (or peers) and `--kinds 1f1b,zb_v` select some of it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.bench.grids.stages import CPU, Asleep, Seconds, Stages, batch, connect, descend, layers, runtime_for, schedule_for
from moe.bench.timing import conclude, in_turn, ratio, slowest
from moe.recipe.sections import Model
from parallel.errors import BadInput
from parallel.mesh.mesh import Axis, Mesh
from parallel.pipeline.runtime import Recorder
from parallel.pipeline.schedule import Action, Op, Schedule, Span
from parallel.pipeline.schedules.catalog import SCHEDULES, kind_of
from parallel.pipeline.simulator.simulate import Timeline, simulate
from parallel.process.fork import run_on_ranks

SECONDS = Seconds(forward=0.02, inputs=0.02, weights=0.02, update=0.005)  # sleeping time of all stages of a rank together
ROWS, WIDTH = 32, 256  # size of the tensors sent between sleeping stages
WITHIN = 0.10  # largest relative difference of simulated and measured seconds
PEERS = ("gpipe", "1f1b", "interleaved")
SAME = 1e-6  # largest relative difference of losses and gradients from torch's
_OF = f"{'schedule':<12}{'ranks':>6}{'stages':>7}{'micro':>7}"
HEADS = {
    "times": f"{_OF}{'measured':>14}{'simulated':>14}{'error':>9}",
    "peers": f"{_OF}{'ours':>14}{'torch':>14}{'ratio':>9}{'losses':>12}{'gradients':>12}",
}


def main(
    *, nproc: int | None = None, only: str = ",".join(HEADS), kinds: str | None = None, rounds: int = 15, json: str | None = None
) -> int:
    """`moe bench pipeline`: returns 1 if a step's time is over 10 % off the simulated one, or torch is faster or differs."""
    parts = only.split(",")
    for part in parts:
        if part not in HEADS:
            raise BadInput("--only", got=part, needed=f"some of {', '.join(HEADS)}, with commas between", fix="--only times")
    names = kinds.split(",") if kinds else list(SCHEDULES)
    for name in names:
        kind_of(name)
    if nproc is not None and (nproc < 2 or nproc % 2):
        raise BadInput("--nproc", got=nproc, needed="an even number of processes, as chimera needs", fix="--nproc 2")
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for part in parts:
        print(HEADS[part], flush=True)
        for row in _rows(part, [nproc] if nproc else [2, 4], names, rounds):
            rows.append(row)
            print(_line(row) + ("" if row["passed"] else "  FAIL"), flush=True)
    return conclude(json, "pipeline", rows)


def _rows(part: str, sizes: list[int], names: list[str], rounds: int) -> Iterator[dict[str, Any]]:
    if part == "peers":
        yield from (peers_row(name, rounds=rounds) for name in names if name in PEERS)
        return
    for ranks in sizes:
        yield from times_rows(ranks, names, microbatches=2 * ranks)


def _line(row: dict[str, Any]) -> str:
    line = f"{row['schedule']:<12}{row['ranks']:>6}{row['stages']:>7}{row['microbatches']:>7}"
    if row["what"] == "times":
        return f"{line}{1000 * row['measured_seconds']:>11.1f} ms{1000 * row['simulated_seconds']:>11.1f} ms{row['error']:>+9.2%}"
    line += f"{1000 * row['seconds']:>11.1f} ms{1000 * row['torch_seconds']:>11.1f} ms"
    return f"{line}{row['ratio']:>9.3f}{row['losses_apart']:>12.1e}{row['gradients_apart']:>12.1e}"


# --- compared with the simulated timeline -------------------------------------------------------------------------------------


def times_rows(ranks: int, names: list[str], *, microbatches: int, steps: int = 5, scale: float = 1.0) -> list[dict[str, Any]]:
    """Return a row for each schedule: median seconds of a step, measured, and simulated from its actions. scale: multiplies SECONDS."""
    by_rank = run_on_ranks(_timed, ranks, ranks, names, microbatches, steps, scale, timeout_s=300)
    rows = []
    for name, *found in zip(names, *by_rank, strict=True):
        schedule = schedule_for(name, ranks, microbatches)
        transfer, summation = found[0]["transfer"], max(rank["sum"] for rank in found)
        each, timelines = [], []
        for step in zip(*(rank["steps"] for rank in found), strict=True):
            each.append(max(rank["end"] for rank in step) - min(rank["start"] for rank in step))
            timelines.append(_simulated(schedule, [rank["actions"] for rank in step], transfer=transfer, summation=summation))
        measured, simulated = statistics.median(each), statistics.median(t.makespan for t in timelines)
        error = simulated / measured - 1
        rows.append(
            {"what": "times", "schedule": name, "ranks": ranks, "stages": schedule.num_stages, "microbatches": schedule.microbatches}
            | {"measured_seconds": measured, "simulated_seconds": simulated, "error": error}
            | {"least_seconds": min(each), "most_seconds": max(each), "transfer_seconds": transfer, "bubble": timelines[0].bubble()}
            | {"passed": abs(error) <= WITHIN}
        )
    return rows


def _timed(rank: int, ranks: int, names: list[str], microbatches: int, steps: int, scale: float) -> list[dict[str, Any]]:
    """Run each schedule on this rank. Return for each `steps` (see `_time`), seconds of a message `transfer`, of an all-reduce `sum`."""
    mesh = connect(rank, ranks)
    found = []
    for name in names:
        timed = _time(mesh, schedule_for(name, ranks, microbatches), steps, scale)
        found.append({"steps": timed, "transfer": _transfer_seconds(mesh.axis("pp")), "sum": _sum_seconds(mesh.axis("pp"))})
    return found


def _time(mesh: Mesh, schedule: Schedule, steps: int, scale: float) -> list[dict[str, Any]]:
    """Run steps after a warm-up. Return for each: `start` and `end` in seconds, `actions`: operation and stage ("F0") -> mean seconds."""
    axis = mesh.axis("pp")
    copied = len(schedule.homes[0]) > 1  # a stage with copies on several ranks takes as long as all stages of a rank
    share = scale if copied else scale * schedule.num_ranks / schedule.num_stages
    slow = Seconds(SECONDS.forward * share, SECONDS.inputs * share, SECONDS.weights * share, SECONDS.update * share)
    stages: dict[int, nn.Module] = {stage: Asleep(WIDTH, slow) for stage in range(schedule.num_stages)}
    runtime = runtime_for(schedule, mesh, stages)
    inputs = [torch.ones(ROWS, WIDTH)] * schedule.microbatches
    mine = {stage: stages[stage] for stage in schedule.stages_of(axis.index)}

    def change(module: nn.Module) -> None:
        time.sleep(slow.update)
        descend(module)

    how: dict[str, Any] = {"loss": lambda y, _: y.mean(), "change": change if schedule.num_updates > 1 else None}
    found = []
    for _ in range(steps + 1):
        work = Stages(mine, schedule, axis.index, inputs=inputs, crossing=(ROWS, WIDTH), **how)
        recorder = Recorder()
        dist.barrier()
        started = time.perf_counter()  # this clock is shared by all processes of the machine
        runtime.run(work, watchers=[recorder])
        found.append({"start": started, "end": time.perf_counter(), "actions": _means(recorder.record)})
    return found[1:]


def _means(record: list[Span]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for took in record:
        found[f"{took.action.op}{took.action.stage}"].append(took.end - took.start)
    return {key: statistics.mean(seconds) for key, seconds in found.items()}


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
    """Median seconds of an all-reduce of a stage's gradient."""
    tensor, seconds = torch.zeros(WIDTH, WIDTH), []
    for _ in range(times):
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor, group=axis.group)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def _simulated(schedule: Schedule, actions: list[dict[str, float]], *, transfer: float, summation: float) -> Timeline:
    """The timeline simulated from measured seconds: actions[rank]["F0"], `transfer` of a message, `summation` of a gradient all-reduce."""

    def cost(rank: int, action: Action) -> float:
        return summation if action.op is Op.S else actions[rank][f"{action.op}{action.stage}"]

    return simulate(schedule, cost, transfer_time=transfer)


# --- compared with torch's pipelining --------------------------------------------------------------------------------------------


def peers_row(name: str, *, microbatches: int = 8, width: int = 256, size: int = 2, rounds: int = 15) -> dict[str, Any]:
    """Return the row of a schedule: our seconds / torch's (median), and the largest relative differences of losses and gradients."""
    ranks = 2
    config = {"num_layers": 4, "d_model": width, "num_heads": 4, "d_ff": 4 * width, "max_length": 128, "tied_embeddings": False}
    found = run_on_ranks(_compared, ranks, ranks, name, microbatches, config, size, rounds, timeout_s=300)
    seconds = slowest([rank["seconds"] for rank in found])
    losses = [rank["losses"] for rank in found if rank["losses"]["ours"]][0]
    apart = max(abs(a / b - 1) for a, b in zip(losses["ours"], losses["torch"], strict=True))
    gradients, times = max(rank["gradients"] for rank in found), ratio(seconds["ours"], seconds["torch"])
    row: dict[str, Any] = {"what": "peers", "schedule": name, "ranks": ranks, "stages": schedule_for(name, ranks, microbatches).num_stages}
    row |= {"microbatches": microbatches, "seconds": statistics.median(seconds["ours"])}
    row |= {"torch_seconds": statistics.median(seconds["torch"]), "ratio": times}
    row |= {"ratios": sorted(a / b for a, b in zip(seconds["ours"], seconds["torch"], strict=True)), "losses_apart": apart}
    return row | {"gradients_apart": gradients, "passed": times <= 1.0 and apart <= SAME and gradients <= SAME}


def _compared(rank: int, ranks: int, name: str, microbatches: int, config: dict[str, int], size: int, rounds: int) -> dict[str, Any]:
    """Return `seconds` by round and `losses` by micro-batch of "ours" and "torch", and the largest relative difference of `gradients`."""
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
    losses: dict[str, list[float]] = {}
    gradients: dict[str, list[Tensor]] = {}

    def run(way: str) -> None:
        losses[way] = ways[way]()
        gradients[way] = [p.grad for module in mine.values() for p in module.parameters() if p.grad is not None]

    def before() -> None:
        model.zero_grad(set_to_none=True)
        dist.barrier()

    for way in (*ways, *ways):
        before()
        run(way)
    seconds = in_turn({way: partial(run, way) for way in ways}, rounds=rounds, device=CPU, warmups=0, before=before)
    apart = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(gradients["ours"], gradients["torch"], strict=True)]
    return {"seconds": seconds, "losses": losses, "gradients": max(apart)}


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
