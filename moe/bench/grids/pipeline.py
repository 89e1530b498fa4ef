"""Measures the time of a step of every pipeline schedule, and compares it with the timeline simulated from the mean seconds of each action.

Each stage sleeps instead of computing, so that two cores suffice for four processes. The simulation leaves out three costs, by which the
measured time may differ: the runtime's own work between actions, waiting for messages, and sends that block a rank.
Without --nproc it runs on 2 processes, then on 4.

`Stages` runs any plain torch modules as stages on the project's pipeline runtime. Every rank builds the whole model and runs only its own
stages. With schedules that update weights before all backward passes have ended (PipeDream, 2BW), each stage keeps several versions of its
weights, as in training.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from moe.bench.timing import CPU, conclude, in_turn
from parallel.errors import BadInput
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.numerics.weight_gradient import PendingGradients, gradient_or_later
from parallel.pipeline.links import Links
from parallel.pipeline.runtime import Recorder, Runtime, StageReplicas
from parallel.pipeline.schedule import Action, Op, Schedule, Span
from parallel.pipeline.schedules import SCHEDULES, kind_of, make_schedule
from parallel.pipeline.simulator.simulate import Timeline, simulate
from parallel.pipeline.weights import Versions
from parallel.process import process
from parallel.process.fork import run_on_ranks

PASS_S = 0.02  # seconds that a rank sleeps for a micro-batch in each of: forward pass, gradients of inputs, gradients of weights
UPDATE_S = 0.005  # seconds that a rank sleeps in an update of the weights, divided among its stages
ROWS, WIDTH = 32, 256  # shape of the tensors sent between sleeping stages
WITHIN = 0.10  # largest allowed relative difference between simulated and measured seconds


def main(*, nproc: int | None = None, kinds: str | None = None, json: str | None = None) -> int:
    """`moe bench pipeline`. Returns 1 if a simulated time differs by more than WITHIN from the measured one. nproc: number of ranks; None:
    2, then 4. kinds: comma-separated names of schedules; None: all."""
    names = kinds.split(",") if kinds else list(SCHEDULES)
    for name in names:
        kind_of(name)
    if nproc is not None and (nproc < 2 or nproc % 2):
        raise BadInput("--nproc", got=nproc, needed="an even number of processes, which the schedule chimera needs", fix="--nproc 2")
    torch.set_num_threads(1)
    print(f"{'schedule':<12}{'ranks':>6}{'stages':>7}{'micro':>7}{'measured':>14}{'simulated':>14}{'error':>9}", flush=True)
    rows: list[dict[str, Any]] = []
    for ranks in [nproc] if nproc else [2, 4]:
        for row in times_rows(ranks, names, microbatches=2 * ranks):
            rows.append(row)
            line = f"{row['schedule']:<12}{row['ranks']:>6}{row['stages']:>7}{row['microbatches']:>7}"
            line += f"{1000 * row['measured_seconds']:>11.1f} ms{1000 * row['simulated_seconds']:>11.1f} ms{row['error']:>+9.2%}"
            print(line + ("" if row["passed"] else "  FAIL"), flush=True)
    return conclude(json, "pipeline", rows)


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
    """Run `steps` steps of every schedule on this rank. Return a dict for each schedule: `steps`, a dict for each step (see `_time`);
    `transfer` and `all_reduce`, the seconds of one message and of one all-reduce. names: of the schedules."""
    mesh = connect(rank, ranks)
    axis, found = mesh.axis("pp"), []
    for name in names:
        timed = _time(mesh, schedule_for(name, ranks, microbatches), steps)
        found.append({"steps": timed, "transfer": _transfer_seconds(axis), "all_reduce": _all_reduce_seconds(axis)})
    return found


def _time(mesh: Mesh, schedule: Schedule, steps: int) -> list[dict[str, Any]]:
    """Run `steps` steps after a warm-up. Return a dict for each: `start` and `end`, readings of time.perf_counter; `actions`, a dict:
    action, such as "F0" for the forward pass of stage 0 -> mean seconds.
    """
    axis = mesh.axis("pp")
    # A rank sleeps PASS_S for a micro-batch, divided equally among its stages. In chimera, where stages have copies on several ranks, a
    # micro-batch passes only one of a rank's stages, which therefore takes all of PASS_S.
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


def _transfer_seconds(axis: Axis) -> float:
    """Median seconds of a message between ranks 0 and 1, as half of a round trip; 0 on other ranks."""
    if axis.index > 1:
        return 0.0
    tensor, other, seconds = torch.zeros(ROWS, WIDTH), axis.ranks[1 - axis.index], []
    for _ in range(20):
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
    """Simulate the schedule. actions: for each rank, action ("F0": forward pass of stage 0) -> seconds. transfer: seconds of a message.
    reduction: seconds of a gradient's all-reduce."""

    def cost(rank: int, action: Action) -> float:
        return reduction if action.op is Op.S else actions[rank][f"{action.op}{action.stage}"]

    return simulate(schedule, cost, transfer_time=transfer)


# --- plain modules as stages ---------------------------------------------------------------------------------------------


@dataclass
class Stages:
    """Forward, backward and update functions that one rank's pipeline runtime calls. stages: stage number -> module. inputs: the first
    stage's input for each micro-batch. crossing: shape of the tensors sent between stages. loss(output of the last stage, index of the
    micro-batch): returns the loss. change(module): updates a stage's weights; None: weights are never updated.
    """

    stages: Mapping[int, nn.Module]
    schedule: Schedule
    rank: int
    inputs: Sequence[Tensor]
    crossing: tuple[int, ...]
    loss: Callable[[Tensor, int], Tensor]
    change: Callable[[nn.Module], None] | None = None
    dtype, device = torch.float32, CPU

    def __post_init__(self) -> None:
        order, stages = self.schedule.orders[self.rank], {} if self.change is None else self.stages
        self.versions = {stage: Versions(list(module.parameters()), order, stage) for stage, module in stages.items()}
        self.losses: dict[int, Tensor] = {}

    def shape(self, microbatch: int) -> tuple[int, ...]:
        return self.crossing

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        output: Tensor = self.stages[stage](self.inputs[microbatch] if x is None else x)
        if stage < self.schedule.num_stages - 1:
            return output
        loss = self.loss(output, microbatch)
        self.losses[microbatch] = loss.detach()
        return loss

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        torch.autograd.backward(output, gradient)

    def deferred(self, pending: PendingGradients) -> None:
        pending.compute()

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        return self.versions[stage].reading(version) if stage in self.versions else nullcontext()

    def update(self, stage: int, version: int) -> None:
        if self.change is not None:
            change, module = self.change, self.stages[stage]
            self.versions[stage].update(version, lambda: change(module))


def descend(module: nn.Module) -> None:
    """Update the weights by gradient descent with learning rate 1e-6, which hardly changes the losses, and set gradients to zero."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=1e-6)
                parameter.grad.zero_()


# --- the stages' modules ------------------------------------------------------------------------------------------------


class Asleep(nn.Module):
    """Linear layer x W. The forward pass and the gradients of x and of W each sleep for `seconds`, as if a device were computing."""

    def __init__(self, width: int, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.eye(width)), seconds

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Asleep.apply(x, self.weight, self.seconds)
        return y


class _Asleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, seconds: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.seconds = weight, seconds
        time.sleep(seconds)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x,), seconds = ctx.saved_tensors, ctx.seconds

        def of_weight() -> Tensor:
            time.sleep(seconds)
            product: Tensor = x.t() @ grad
            return product

        time.sleep(seconds)
        return grad @ ctx.weight.t(), gradient_or_later(ctx.weight, of_weight), None


# --- the runtime ------------------------------------------------------------------------------------------------------


def schedule_for(name: str, ranks: int, microbatches: int) -> Schedule:
    """Return the schedule `name` for `microbatches` micro-batches. If the pipeline does not drain between updates, there are twice as many,
    because the first batch of 2BW alone would be 1F1B."""
    kind = SCHEDULES[name]
    if not kind.continuous:
        return make_schedule(name, ranks=ranks, microbatches=microbatches)
    each = kind.update_every or microbatches
    return make_schedule(name, ranks=ranks, microbatches=each, batches=2 * microbatches // each)


def connect(rank: int, ranks: int) -> Mesh:
    """Return a mesh with one axis, pp, over all `ranks` ranks. Collective: connects the processes."""
    return process.connect(Degrees(pp=ranks), process.World(rank, ranks))


def runtime_for(schedule: Schedule, mesh: Mesh, stages: Mapping[int, nn.Module]) -> Runtime:
    """Return this rank's pipeline runtime. stages: stage number -> module, for the stages of all ranks. Collective: makes process
    groups."""
    axis = mesh.axis("pp")
    for homes in sorted({homes for homes in schedule.homes if len(homes) > 1}):
        mesh.part("pp", homes, label="replicas")
    down = mesh.part("pp", tuple(range(axis.size)), label="down")
    assert down is not None
    return Runtime(schedule, axis, Links(axis, down), _replicas(schedule, mesh, stages))


def _replicas(schedule: Schedule, mesh: Mesh, stages: Mapping[int, nn.Module]) -> StageReplicas:
    parameters: dict[str, nn.Parameter] = {}
    layouts: dict[str, Layout] = {}
    of_stage: dict[int, list[str]] = {}
    for stage in schedule.stages_of(mesh.axis("pp").index):
        held, homes = {f"{stage}.{name}": p for name, p in stages[stage].named_parameters()}, schedule.homes[stage]
        layouts |= {name: Layout(tuple(p.shape), holders=homes if len(homes) > 1 else ()) for name, p in held.items()}
        of_stage[stage] = list(held)
        parameters |= held
    return StageReplicas(parameters, layouts, mesh, of_stage=of_stage)
