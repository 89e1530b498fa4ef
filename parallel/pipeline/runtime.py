"""Executes one rank's actions of any Schedule: the simulator draws the same schedule that runs here.

    for each action:  receive its inputs from other ranks (Schedule.receives)  ->  F B I W S U  ->  send its result (Schedule.sends)

The runtime handles orders and tensors. The `Work` decides what a stage computes, how gradients are summed and what an update does.
Sends and receives overlap with computation (parallel/pipeline/links.py). Between F and B, a micro-batch keeps its input and an
edge of the autograd graph; its output is freed once it is sent.

    runtime = Runtime(schedule, axis, Links(up, down))
    runtime.run(work)               # one batch; collective over the ranks of `axis`
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel.errors import BadInput
from parallel.mesh.collectives import max_over
from parallel.mesh.mesh import Axis
from parallel.numerics.weight_gradient import PendingGradients, defer_gradients
from parallel.pipeline.links import Links, Traffic
from parallel.pipeline.replicas import StageReplicas
from parallel.pipeline.schedule import COMPUTE, Action, Message, Node, Op, Schedule


class Work(Protocol):
    """Computation of one rank's stages, which the caller implements. `microbatch` counts over the whole schedule."""

    dtype: torch.dtype
    device: torch.device

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of the tensors that pass between stages; equal at every boundary."""
        ...

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Run a stage on `x` (None on the first stage). Returns the next stage's input, or on the last stage the scalar loss."""
        ...

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        """Add gradients to the weights and to the input of `forward`. `gradient`: gradient of its output; None on the last stage."""
        ...

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        """Context in which the stage's weights are those of this version."""
        ...

    def update(self, stage: int, version: int) -> None: ...


class TimedAction(NamedTuple):
    """Start and end of an action, in seconds of time.perf_counter."""

    action: Action
    start: float
    end: float


class Watcher(Protocol):
    """Callbacks around a rank's actions in training. Work that `begin` and `after` do fills the bubble."""

    def begin(self) -> None:
        """Called once, before the rank waits for the first action's messages."""
        ...

    def before(self, action: Action) -> None:
        """Called before the rank waits for the action's messages."""
        ...

    def after(self, at: int, took: TimedAction) -> None:
        """Called after action number `at` and its sends, before the rank waits for the next action's messages."""
        ...


@dataclass
class Recorder:
    """Watcher that records every action's times."""

    record: list[TimedAction] = field(default_factory=list)

    def begin(self) -> None: ...

    def before(self, action: Action) -> None: ...

    def after(self, at: int, took: TimedAction) -> None:
        self.record.append(took)


class _Kept(NamedTuple):
    """Tensors of a micro-batch that are kept from F to its backward pass: the input, and the edge to the output in autograd's graph."""

    x: Tensor | None
    output: GradientEdge


class _Step(NamedTuple):
    """An action with the messages that it receives and sends."""

    action: Action
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


class _Plan:
    """One rank's steps, messages and micro-batches of a schedule. `code`: a hash that is equal on all ranks if their schedules are."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        nodes = [Node(rank, at) for at in range(len(schedule.orders[rank]))]
        self.schedule, self.traffic = schedule, Traffic.of(schedule, rank)
        self.steps = [_Step(schedule.action(n), schedule.receives(n), schedule.sends(n)) for n in nodes]
        self.microbatches = sorted({a.microbatch for order in schedule.orders for a in order if a.op in COMPUTE})
        self.code = hash_of((schedule.homes, schedule.orders))


@dataclass
class Runtime:
    """Runs one rank of a pipeline.

    schedule: the schedule of one batch. axis: the ranks of the pipeline. replicas: sums gradients of parameters that several ranks hold.
    """

    schedule: Schedule
    axis: Axis
    links: Links
    replicas: StageReplicas | None = None
    _agreed: set[int] = field(default_factory=set)
    _plans: dict[int, _Plan] = field(default_factory=dict)  # by id of the schedule
    _forwards: dict[int, Schedule] = field(default_factory=dict)

    def run(self, work: Work, schedule: Schedule | None = None, *, watchers: Sequence[Watcher] = ()) -> None:
        """Run forward and backward passes of a whole schedule (default: `self.schedule`). Collective over the pipeline's ranks."""
        _Run(self, work, self._plan(schedule or self.schedule), watchers, train=True).run()

    def forward(self, work: Work, microbatches: int) -> None:
        """Run only forward passes, without gradients, on the ranks that train the same micro-batches. Collective."""
        with torch.no_grad():
            if microbatches not in self._forwards:
                self._forwards[microbatches] = forwards(self.schedule, microbatches)
            _Run(self, work, self._plan(self._forwards[microbatches]), (), train=False).run()

    def _plan(self, schedule: Schedule) -> _Plan:
        if id(schedule) not in self._plans:
            self._plans[id(schedule)] = _Plan(schedule, self.axis.index)
        return self._plans[id(schedule)]


class _Run:
    def __init__(self, runtime: Runtime, work: Work, plan: _Plan, watchers: Sequence[Watcher], *, train: bool) -> None:
        self.runtime, self.work, self.plan, self.watchers, self.train = runtime, work, plan, watchers, train
        self.last = plan.schedule.num_stages - 1
        self.results: dict[tuple[bool, int, int], Tensor] = {}  # (forward?, stage, micro-batch) -> result, until the next stage uses it
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.pending: dict[tuple[int, int], PendingGradients] = {}

    def run(self) -> None:
        runtime, links = self.runtime, self.runtime.links
        self._agree()
        links.begin(self.plan.traffic, self._buffer)
        for watcher in self.watchers:
            watcher.begin()
        for at, step in enumerate(self.plan.steps):
            for watcher in self.watchers:
                watcher.before(step.action)
            for message in step.receives:
                self.results[_key(message.op, message.stage, message.microbatch)] = links.take(message)
            started = time.perf_counter()
            self._act(step.action)
            for message in step.sends:
                links.send(message, self.results.pop(_key(message.op, message.stage, message.microbatch)))
            took = TimedAction(step.action, started, time.perf_counter())
            for watcher in self.watchers:
                watcher.after(at, took)
        links.end()
        if self.train and runtime.replicas is not None:
            runtime.replicas.finish()

    def _buffer(self, message: Message) -> Tensor:
        return torch.empty(self.work.shape(message.microbatch), dtype=self.work.dtype, device=self.work.device)

    def _act(self, action: Action) -> None:
        op, stage, microbatch, version = action
        if op is Op.S:
            assert self.runtime.replicas is not None
            self.runtime.replicas.start(stage)
        elif op is Op.U:
            self.work.update(stage, version)
        elif op is Op.W:
            self.pending.pop((stage, microbatch)).compute()
        else:
            with self.work.reading(stage, version):
                (self._forward if op is Op.F else partial(self._backward, op))(stage, microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        x = self.results.pop((True, stage - 1, microbatch)) if stage else None
        if x is not None and self.train:
            x.requires_grad_()
        output = self.work.forward(stage, microbatch, x)
        if self.train:
            self.kept[stage, microbatch] = _Kept(x, get_gradient_edge(output))
        if stage < self.last:
            self.results[True, stage, microbatch] = output.detach().contiguous()

    def _backward(self, op: Op, stage: int, microbatch: int) -> None:
        x, output = self.kept.pop((stage, microbatch))
        gradient = self.results.pop((False, stage + 1, microbatch)) if stage < self.last else None
        if op is Op.I:
            with defer_gradients() as pending:
                self.work.backward(output, gradient)
            self.pending[stage, microbatch] = pending
        else:
            self.work.backward(output, gradient)
        if x is not None:
            assert x.grad is not None
            self.results[False, stage, microbatch] = x.grad.contiguous()

    def _agree(self) -> None:
        """Check, once for each schedule and shape, that all ranks run the same schedule. Raises BadInput on all ranks if not."""
        shapes = tuple(self.work.shape(j) for j in self.plan.microbatches)
        code = hash_of((self.plan.code, shapes, str(self.work.dtype)))
        if code in self.runtime._agreed:
            return
        both = torch.tensor([code, -code], dtype=torch.int64, device=self.work.device)
        largest, smallest = max_over(both, self.runtime.axis).tolist()
        if largest != -smallest:
            raise BadInput(
                f"pipeline rank {self.runtime.axis.index}",
                got=f"schedule {self.plan.schedule.name} of {len(shapes)} micro-batches {list(shapes[0])} {self.work.dtype}",
                needed="the same schedule and shapes on every rank of the pipeline",
                fix="start every rank with the same recipe and the same batch",
            )
        self.runtime._agreed.add(code)


def _key(op: Op, stage: int, microbatch: int) -> tuple[bool, int, int]:
    return op is Op.F, stage, microbatch


def hash_of(value: object) -> int:
    """Hash that is equal in every process, unlike hash()."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """Schedule of forward passes only, for any number of micro-batches. Micro-batch j runs on the ranks of j mod m in `schedule`.

    Micro-batches form groups, one micro-batch for each rank. All ranks order by (group, stage, micro-batch), and an F needs only an F
    that comes earlier in that order, so there is no deadlock.
    """
    orders: list[list[tuple[int, Action]]] = [[] for _ in schedule.orders]
    for j in range(microbatches):
        for stage in range(schedule.num_stages):
            way = schedule.find(Op.F, stage, j % schedule.microbatches)
            assert way is not None
            orders[way.rank].append((j // schedule.num_ranks, Action(Op.F, stage, j)))
    ordered = tuple(tuple(action for _, action in sorted(order, key=lambda o: (o[0], o[1].stage, o[1].microbatch))) for order in orders)
    return Schedule(f"{schedule.name} forward", schedule.homes, microbatches, microbatches, ordered)
