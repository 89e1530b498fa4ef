"""Executes one rank's actions of any Schedule: the schedule that is drawn is the one that runs.

    for each action:  receive what it needs from other ranks (Schedule.receives)  ->  F B I W S U  ->  send its result (Schedule.sends)

The runtime handles orders and tensors. The `Work` decides what a stage computes, how gradients are summed and what an update is.
Sends and receives overlap with computation (parallel/pipeline/links.py). Between F and B, a micro-batch keeps its input and an
edge of the autograd graph; its output is freed once it is sent.
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
    """The computation of one rank's stages. `microbatch` counts over the whole schedule."""

    dtype: torch.dtype
    device: torch.device

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Shape of the tensors between stages, the same at every boundary."""
        ...

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Run a stage: returns the next stage's input, or on the last stage the scalar to differentiate. x: None on the first stage."""
        ...

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        """Add gradients to the weights and to the input of `forward`. `gradient`: the output's; None on the last stage."""
        ...

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        """A context in which the stage's weights have this version."""
        ...

    def update(self, stage: int, version: int) -> None: ...


class Took(NamedTuple):
    """An action's start and end, in seconds of time.perf_counter."""

    action: Action
    start: float
    end: float


class Watcher(Protocol):
    """Something beside a rank's actions in training. It may do work of its own in `begin` and `after`: that runs in the bubble."""

    def begin(self) -> None:
        """Before the first action of the order, and before what it needs is waited for."""
        ...

    def before(self, action: Action) -> None:
        """Before the action's messages are waited for."""
        ...

    def after(self, at: int, took: Took) -> None:
        """After the at-th action of the order and its sends, before what the next one needs is waited for."""
        ...


@dataclass
class Recorder:
    """The Watcher that keeps every action's times."""

    record: list[Took] = field(default_factory=list)

    def begin(self) -> None: ...

    def before(self, action: Action) -> None: ...

    def after(self, at: int, took: Took) -> None:
        self.record.append(took)


class _Kept(NamedTuple):
    """What a micro-batch keeps between F and its backward pass."""

    x: Tensor | None
    output: GradientEdge


class _Step(NamedTuple):
    """An action with the messages before and after it."""

    action: Action
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


class _Plan:
    """What one rank needs to know of a schedule to execute it. `code`: equal for equal schedules, in every process."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        nodes = [Node(rank, at) for at in range(len(schedule.orders[rank]))]
        self.schedule, self.traffic = schedule, Traffic.of(schedule, rank)
        self.steps = [_Step(schedule.action(n), schedule.receives(n), schedule.sends(n)) for n in nodes]
        self.microbatches = sorted({a.microbatch for order in schedule.orders for a in order if a.op in COMPUTE})
        self.code = hash_of((schedule.homes, schedule.orders))


@dataclass
class Runtime:
    """One rank of a pipeline. `schedule`: of one batch; `axis`: the ranks of the pipeline; `replicas`: sums what several of them hold."""

    schedule: Schedule
    axis: Axis
    links: Links
    replicas: StageReplicas | None = None
    _agreed: set[int] = field(default_factory=set)
    _plans: dict[int, _Plan] = field(default_factory=dict)  # by id of the schedule
    _forwards: dict[int, Schedule] = field(default_factory=dict)

    def run(self, work: Work, schedule: Schedule | None = None, *, watchers: Sequence[Watcher] = ()) -> None:
        """Forward and backward of a whole schedule (default: the one batch's). Collective over the pipeline's ranks."""
        _Run(self, work, self._plan(schedule or self.schedule), watchers, train=True).run()

    def forward(self, work: Work, microbatches: int) -> None:
        """Forward passes only, without gradients. Micro-batch j runs on the stages that train micro-batch j. Collective."""
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
        self.results: dict[tuple[bool, int, int], Tensor] = {}  # (forward?, stage, micro-batch), until the neighbour takes it
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.pending: dict[tuple[int, int], PendingGradients] = {}

    def run(self) -> None:
        runtime, links = self.runtime, self.runtime.links
        self._agree()
        links.begin(self.plan.traffic, self._room)
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
            took = Took(step.action, started, time.perf_counter())
            for watcher in self.watchers:
                watcher.after(at, took)
        links.end()
        if self.train and runtime.replicas is not None:
            runtime.replicas.finish()

    def _room(self, message: Message) -> Tensor:
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
        """Check once per schedule and shape that every rank is about to run the same. Raises BadInput on all ranks if not."""
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
                needed="the same on every rank of the pipeline",
                fix="start every rank with the same recipe and the same batch",
            )
        self.runtime._agreed.add(code)


def _key(op: Op, stage: int, microbatch: int) -> tuple[bool, int, int]:
    return op is Op.F, stage, microbatch


def hash_of(value: object) -> int:
    """A hash that is the same in every process, unlike hash()."""
    from hashlib import blake2b

    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """A schedule of F alone for any number of micro-batches, in groups of as many as ranks. Number j takes the path of j mod m.

    All ranks order by (group, stage, micro-batch), and an F needs only F before it in that order, so there is no deadlock.
    """
    orders: list[list[tuple[int, Action]]] = [[] for _ in schedule.orders]
    for j in range(microbatches):
        for stage in range(schedule.num_stages):
            way = schedule.find(Op.F, stage, j % schedule.microbatches)
            assert way is not None
            orders[way.rank].append((j // schedule.num_ranks, Action(Op.F, stage, j)))
    ordered = tuple(tuple(action for _, action in sorted(order, key=lambda o: (o[0], o[1].stage, o[1].microbatch))) for order in orders)
    return Schedule(f"{schedule.name} forward", schedule.homes, microbatches, microbatches, ordered)
