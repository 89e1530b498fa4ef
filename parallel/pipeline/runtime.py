"""Executes one rank's actions of any Schedule: the simulator draws the same schedule that runs here.

    for each action:  receive its inputs from other ranks (Schedule.receives)  ->  F B I W S U  ->  send its result (Schedule.sends)

The runtime handles orders and tensors. `Work` decides what a stage computes, how gradients are summed and what an update does.
Sends and receives overlap with computation (parallel/pipeline/links.py). Between F and B, a micro-batch keeps its input and the graph edge
at which its backward pass begins; its output is freed once it is sent.

    runtime = Runtime(schedule, axis, Links(up, down))
    runtime.run(work)               # one batch; collective over the ranks of `axis`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from parallel.errors import BadInput
from parallel.mesh.collectives import max_over
from parallel.mesh.gradients import StartedSum, on_stages, start_sum
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh
from parallel.numerics.weight_gradient import PendingGradients, defer_gradients
from parallel.pipeline.links import Links, Traffic
from parallel.pipeline.schedule import COMPUTE, Action, Message, Node, Op, Schedule, Span, Watcher, stage_complete_at


class Work(Protocol):
    """Computation of one rank's stages, which the caller implements. Micro-batches are numbered over the whole schedule."""

    dtype: torch.dtype
    device: torch.device

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Return the shape of the tensors that pass between stages; it is equal between all stages."""
        ...

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Run a stage on `x` (None on the first stage). Returns the next stage's input, or on the last stage the scalar loss."""
        ...

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        """Add gradients to the weights and to the input of `forward`. `gradient`: gradient of its output; None on the last stage."""
        ...

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        """Return a context in which the stage's weights are those of this version."""
        ...

    def update(self, stage: int, version: int) -> None: ...


@dataclass
class Recorder(Watcher):
    """Watcher that records every action's times."""

    record: list[Span] = field(default_factory=list)

    def after(self, at: int, took: Span) -> None:
        self.record.append(took)


class StageReplicas:
    """Sums the gradients of this rank's parameters that other pipeline ranks hold too: Chimera's replicas of a stage, a tied embedding.

    parameters, layouts: of this rank, by name; the `holders` of a layout are these ranks. of_stage: stage -> names of its parameters.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], layouts: dict[str, Layout], mesh: Mesh, *, of_stage: dict[int, list[str]]
    ) -> None:
        self.shared = {name: parameter for name, parameter in parameters.items() if layouts[name].holders}
        self.layouts, self.mesh, self.of_stage = layouts, mesh, of_stage
        self.flying: list[StartedSum] = []
        self.started: set[str] = set()

    def start(self, stage: int) -> None:
        """Start the sum of a stage's gradients (action S). It runs while other actions compute."""
        self._start(self.of_stage.get(stage, ()))

    def finish(self) -> None:
        """Sum the gradients that no S summed, and wait for all sums."""
        self._start(name for name in self.shared if name not in self.started)
        for one in self.flying:
            one.finish()
        self.flying.clear()
        self.started.clear()

    def _start(self, names: Iterable[str]) -> None:
        """Start one sum, over one flat tensor, for all names that the same ranks hold."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            if name in self.shared:
                together.setdefault(self.layouts[name].holders, []).append(name)
        for held in together.values():
            axis = on_stages(self.layouts[held[0]].holders, self.mesh)
            self.flying.append(start_sum([self._gradient(name) for name in held], axis, first=held[0]))
            self.started.update(held)

    def _gradient(self, name: str) -> Tensor:
        parameter = self.shared[name]
        if parameter.grad is None:  # no token reached it on this rank, but every holder must take part in the sum
            parameter.grad = torch.zeros_like(parameter)
        local: Tensor = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad  # this rank's shard with FSDP
        return local


class OverlappedSums(Watcher):
    """Watcher that starts the data-parallel sum of a stage's gradients as soon as they are complete, while other actions still run.

    rank 0 of interleaved, two chunks    ... 4B2 4B3 | 0B0 0B1 0B2 0B3 |
                                                     ^ the sum of stage 4 starts here, the sum of stage 0 at the end

    Parameters that several stages hold are first summed over these stages, so their sum starts after the last action. Only the order of
    actions decides when a sum starts, so all ranks that take part start it at the same point.

    names: stage -> names of the parameters that no other stage holds. start: called after each action with the names of the parameters
    whose gradients are now complete (often none): it starts their sums, and stores the results of sums that have ended.
    """

    def __init__(
        self, schedule: Schedule, rank: int, names: Mapping[int, Sequence[str]], *, start: Callable[[Sequence[str]], None]
    ) -> None:
        self.stage_at, self.names, self.start = stage_complete_at(schedule.orders[rank]), names, start

    def after(self, at: int, took: Span) -> None:
        self.start(self.names.get(self.stage_at[at], ()) if at in self.stage_at else ())


class _Plan:
    """One rank's actions with their messages, and the micro-batches of a schedule. `code`: a hash, equal on ranks with equal schedules."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        nodes = [Node(rank, at) for at in range(len(schedule.orders[rank]))]
        self.schedule, self.traffic = schedule, Traffic.of(schedule, rank)
        self.steps = [(schedule.action(n), schedule.receives(n), schedule.sends(n)) for n in nodes]
        self.microbatches = sorted({a.microbatch for order in schedule.orders for a in order if a.op in COMPUTE})
        self.code = hash_of((schedule.homes, schedule.orders))


@dataclass
class Runtime:
    """Runs one rank of a pipeline.

    schedule: the schedule of one batch. axis: the pipeline's ranks. links: channels to the other ranks. replicas: sums the gradients of
    parameters that several ranks hold.
    """

    schedule: Schedule
    axis: Axis
    links: Links
    replicas: StageReplicas | None = None
    _agreed: set[int] = field(default_factory=set)
    _plans: dict[int, _Plan] = field(default_factory=dict)  # keys: id(schedule)
    _forwards: dict[int, Schedule] = field(default_factory=dict)  # keys: number of micro-batches

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
        self.kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}  # (stage, micro-batch) -> input of F, edge of its output
        self.pending: dict[tuple[int, int], PendingGradients] = {}

    def run(self) -> None:
        runtime, links = self.runtime, self.runtime.links
        self._check_equal()
        links.begin(self.plan.traffic, self._buffer)
        for watcher in self.watchers:
            watcher.begin()
        for at, (action, receives, sends) in enumerate(self.plan.steps):
            for watcher in self.watchers:
                watcher.before(action)
            for message in receives:
                self.results[message.op is Op.F, message.stage, message.microbatch] = links.take(message)
            started = time.perf_counter()
            self._act(action)
            for message in sends:
                links.send(message, self.results.pop((message.op is Op.F, message.stage, message.microbatch)))
            took = Span(action, started, time.perf_counter())
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
            self.kept[stage, microbatch] = x, get_gradient_edge(output)
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

    def _check_equal(self) -> None:
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


def hash_of(value: object) -> int:
    """Return a hash of a value's repr, which is equal in every process, unlike hash()."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """Make a schedule of forward passes only. Micro-batch j runs on the ranks of micro-batch j modulo m of `schedule`, which has m.

    Micro-batches form groups, one micro-batch for each rank. All ranks order by (group, stage, micro-batch), and an F needs only an F
    that comes earlier in that order, so there is no deadlock.
    """
    orders: list[list[tuple[int, Action]]] = [[] for _ in schedule.orders]
    for j in range(microbatches):
        for stage in range(schedule.num_stages):
            node = schedule.find(Op.F, stage, j % schedule.microbatches)
            assert node is not None
            orders[node.rank].append((j // schedule.num_ranks, Action(Op.F, stage, j)))
    ordered = tuple(tuple(action for _, action in sorted(order)) for order in orders)
    return Schedule(f"{schedule.name} forward", schedule.homes, microbatches, microbatches, ordered)
