"""Measures the time of a pipeline's step, and compares it with a simulation (`times`) and with torch's own pipelining (`peers`).

    times      every schedule: compared with the timeline simulated from the mean seconds of each of its actions (Recorder)
    peers      GPipe, 1F1B and interleaved 1F1B on two processes: compared with torch.distributed.pipelining on the same modules and
               micro-batches, in turn; losses and all gradients must be the same

For `times`, each stage sleeps for as long as a device would compute, so that two cores suffice for four processes. The simulation leaves
out the runtime's own work between actions, waiting for messages, and sends that block a rank, so the measured time may differ by these.
`moe bench pipeline --json FILE`; `--only times` or `--only peers` runs one comparison, `--kinds 1f1b,zb_v` only these schedules.
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

from moe.bench.grids.stages import Asleep, Stages, batch, connect, descend, layers, runtime_for, schedule_for
from moe.bench.timing import CPU, conclude, in_turn, ratio, slowest
from moe.recipe.sections import Model
from parallel.errors import BadInput
from parallel.mesh.mesh import Axis, Mesh
from parallel.pipeline.runtime import Recorder
from parallel.pipeline.schedule import Action, Op, Schedule, Span
from parallel.pipeline.schedules.catalog import SCHEDULES, kind_of
from parallel.pipeline.simulator.simulate import Timeline, simulate
from parallel.process.fork import run_on_ranks

PASS_S = 0.02  # seconds for which the stages of a rank sleep together: in a forward pass, in the backward pass for inputs or for weights
UPDATE_S = 0.005  # likewise in an update of the weights
ROWS, WIDTH = 32, 256  # shape of the tensors sent between sleeping stages
WITHIN = 0.10  # largest allowed relative difference between simulated and measured seconds
Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, target token ids) of a micro-batch -> its loss
PEERS = ("gpipe", "1f1b", "interleaved")
SAME = 1e-6  # largest allowed relative difference between our losses and gradients and those of torch
_OF = f"{'schedule':<12}{'ranks':>6}{'stages':>7}{'micro':>7}"
HEADS = {
    "times": f"{_OF}{'measured':>14}{'simulated':>14}{'error':>9}",
    "peers": f"{_OF}{'ours':>14}{'torch':>14}{'ratio':>9}{'losses':>12}{'gradients':>12}",
}


def main(
    *, nproc: int | None = None, only: str = ",".join(HEADS), kinds: str | None = None, rounds: int = 15, json: str | None = None
) -> int:
    """`moe bench pipeline`. Returns 1 if a measured time differs by over 10 % from the simulated one, or if torch's pipelining is faster
    than ours or gives other results.
    """
    parts = only.split(",")
    for part in parts:
        if part not in HEADS:
            raise BadInput("--only", got=part, needed=f"some of {', '.join(HEADS)}, with commas between", fix="--only times")
    names = kinds.split(",") if kinds else list(SCHEDULES)
    for name in names:
        kind_of(name)
    if nproc is not None and (nproc < 2 or nproc % 2):
        raise BadInput("--nproc", got=nproc, needed="an even number of processes, which the schedule chimera needs", fix="--nproc 2")
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


def times_rows(ranks: int, names: list[str], *, microbatches: int, steps: int = 5) -> list[dict[str, Any]]:
    """Return a table row for each schedule in `names`: a step's median measured seconds, and its median simulated seconds."""
    by_rank = run_on_ranks(_timed, ranks, ranks, names, microbatches, steps, timeout_s=300)
    rows = []
    for name, *found in zip(names, *by_rank, strict=True):
        schedule = schedule_for(name, ranks, microbatches)
        transfer, reduction = found[0]["transfer"], max(rank["all_reduce"] for rank in found)
        each, timelines = [], []
        for step in zip(*(rank["steps"] for rank in found), strict=True):
            each.append(max(rank["end"] for rank in step) - min(rank["start"] for rank in step))
            timelines.append(_simulated(schedule, [rank["actions"] for rank in step], transfer=transfer, reduction=reduction))
        measured, simulated = statistics.median(each), statistics.median(t.makespan for t in timelines)
        error = simulated / measured - 1
        rows.append(
            {"what": "times", "schedule": name, "ranks": ranks, "stages": schedule.num_stages, "microbatches": schedule.microbatches}
            | {"measured_seconds": measured, "simulated_seconds": simulated, "error": error}
            | {"least_seconds": min(each), "most_seconds": max(each), "transfer_seconds": transfer, "bubble": timelines[0].bubble()}
            | {"passed": abs(error) <= WITHIN}
        )
    return rows


def _timed(rank: int, ranks: int, names: list[str], microbatches: int, steps: int) -> list[dict[str, Any]]:
    """Run every schedule on this rank. Return for each: `steps` (see `_time`) and the seconds of a `transfer` and of an `all_reduce`."""
    mesh = connect(rank, ranks)
    axis, found = mesh.axis("pp"), []
    for name in names:
        timed = _time(mesh, schedule_for(name, ranks, microbatches), steps)
        found.append({"steps": timed, "transfer": _transfer_seconds(axis), "all_reduce": _all_reduce_seconds(axis)})
    return found


def _time(mesh: Mesh, schedule: Schedule, steps: int) -> list[dict[str, Any]]:
    """Run `steps` steps after a warm-up. Return a dict for each: `start` and `end` (clock), `actions` (such as "F0", forward of stage 0 ->
    mean seconds).
    """
    axis = mesh.axis("pp")
    # PASS_S is divided among a rank's stages; if each stage has copies on several ranks (chimera), every copy takes PASS_S
    share = 1.0 if len(schedule.homes[0]) > 1 else schedule.num_ranks / schedule.num_stages
    stages: dict[int, nn.Module] = {stage: Asleep(WIDTH, PASS_S * share) for stage in range(schedule.num_stages)}
    runtime = runtime_for(schedule, mesh, stages)
    inputs = [torch.ones(ROWS, WIDTH)] * schedule.microbatches
    mine = {stage: stages[stage] for stage in schedule.stages_of(axis.index)}

    def change(module: nn.Module) -> None:
        time.sleep(UPDATE_S * share)
        descend(module)

    how: dict[str, Any] = {"loss": lambda y, _: y.mean(), "change": change if schedule.num_updates > 1 else None}
    found = []
    for _ in range(steps + 1):
        work = Stages(mine, schedule, axis.index, inputs=inputs, crossing=(ROWS, WIDTH), **how)
        recorder = Recorder()
        dist.barrier()
        started = time.perf_counter()  # the same clock in all processes of the machine
        runtime.run(work, watchers=[recorder])
        found.append({"start": started, "end": time.perf_counter(), "actions": _means(recorder.record)})
    return found[1:]


def _means(record: list[Span]) -> dict[str, float]:
    found: dict[str, list[float]] = defaultdict(list)
    for took in record:
        found[f"{took.action.op}{took.action.stage}"].append(took.end - took.start)
    return {key: statistics.mean(seconds) for key, seconds in found.items()}


def _transfer_seconds(axis: Axis, *, times: int = 20) -> float:
    """Median seconds of a message between ranks 0 and 1, as half of a round trip; 0 on other ranks."""
    if axis.index > 1:
        return 0.0
    tensor, other, seconds = torch.zeros(ROWS, WIDTH), axis.ranks[1 - axis.index], []
    for _ in range(times):
        started = time.perf_counter()
        for turn in (0, 1):
            (dist.send if turn == axis.index else dist.recv)(tensor, other, group=axis.group)
        seconds.append((time.perf_counter() - started) / 2)
    return statistics.median(seconds)


def _all_reduce_seconds(axis: Axis) -> float:
    """Median seconds of an all-reduce of one stage's gradient over the ranks of the pipeline."""
    tensor = torch.zeros(WIDTH, WIDTH)
    work = {"all-reduce": lambda: dist.all_reduce(tensor, group=axis.group)}
    return statistics.median(in_turn(work, rounds=10, warmups=0, before=dist.barrier)["all-reduce"])


def _simulated(schedule: Schedule, actions: list[dict[str, float]], *, transfer: float, reduction: float) -> Timeline:
    """Simulate the schedule. actions[rank]["F0"]: seconds of an action; transfer: of a message; reduction: of a gradient's all-reduce."""

    def cost(rank: int, action: Action) -> float:
        return reduction if action.op is Op.S else actions[rank][f"{action.op}{action.stage}"]

    return simulate(schedule, cost, transfer_time=transfer)


# --- compared with torch's pipelining --------------------------------------------------------------------------------------------


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
