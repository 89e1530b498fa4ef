"""Executes one rank's actions of a Schedule. Sends and receives overlap with computation.

for each action:  receive its inputs from other ranks (ActionGraph.received)  ->  execute it (Op)  ->  send its result (ActionGraph.sent)

runtime = Runtime(schedule, axis, Links(up, down))
runtime.run(work)               # one batch; collective over the ranks of `axis`

Ops: F forward, B backward, I input gradient only, W weight gradient only, S all-reduce over replicas of a stage, U optimizer update.
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
from parallel.pipeline.check import action_graph
from parallel.pipeline.links import Links, Traffic
from parallel.pipeline.schedule import COMPUTE, Action, Message, Op, Schedule, Span, Watcher, stage_complete_at


class Work(Protocol):
    """Interface that the caller of the runtime implements: the forward passes, backward passes and updates of a rank's stages."""

    dtype: torch.dtype
    device: torch.device

    def shape(self, microbatch: int) -> tuple[int, ...]:
        """Return the shape of a micro-batch's activations between stages. It must be equal between all stages."""
        ...

    def forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor:
        """Run a stage on its input `x` (None on the first stage). Return the next stage's input, or the scalar loss on the last stage."""
        ...

    def backward(self, output: GradientEdge, gradient: Tensor | None) -> None:
        """Run autograd's backward pass from `output`, the graph edge of the result of `forward`. gradient: None on the last stage."""
        ...

    def deferred(self, pending: PendingGradients) -> None:
        """Compute the weight gradients that `backward` deferred."""
        ...

    def reading(self, stage: int, version: int) -> AbstractContextManager[None]:
        """Return a context manager in which the stage's parameters have the values of this weight version."""
        ...

    def update(self, stage: int, version: int) -> None:
        """Update the stage's weights by the optimizer, which makes weight version `version`."""
        ...


@dataclass
class Recorder(Watcher):
    """Watcher that appends every action, with its start and end, to `record`."""

    record: list[Span] = field(default_factory=list)

    def after(self, at: int, took: Span) -> None:
        self.record.append(took)


class StageReplicas:
    """All-reduces the gradients of parameters that several pipeline ranks hold: replicas of a stage (Chimera), or a tied embedding.
    parameters, layouts: name -> parameter or layout, for this rank's parameters. of_stage: stage -> names of its parameters."""

    def __init__(
        self, parameters: dict[str, nn.Parameter], layouts: dict[str, Layout], mesh: Mesh, *, of_stage: dict[int, list[str]]
    ) -> None:
        self.shared = {name: parameter for name, parameter in parameters.items() if layouts[name].holders and parameter.requires_grad}
        self.layouts, self.mesh, self.of_stage = layouts, mesh, of_stage
        self.running: list[StartedSum] = []
        self.started: set[str] = set()  # names whose all-reduce has started in this step

    def start(self, stage: int) -> None:
        """Start the all-reduce of a stage's gradients (action S), which runs while other actions compute."""
        self._start(self.of_stage.get(stage, ()))

    def finish(self) -> None:
        """Start the all-reduces of shared gradients that no action S has started, then wait for all all-reduces."""
        self._start(name for name in self.shared if name not in self.started)
        for one in self.running:
            one.finish()
        self.running.clear()
        self.started.clear()

    def _start(self, names: Iterable[str]) -> None:
        """Start one all-reduce, of one flat tensor, for each group of parameters that the same ranks hold."""
        together: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            if name in self.shared:
                together.setdefault(self.layouts[name].holders, []).append(name)
        for held in together.values():
            axis = on_stages(self.layouts[held[0]].holders, self.mesh)
            self.running.append(start_sum([self._gradient(name) for name in held], axis, first=held[0]))
            self.started.update(held)

    def _gradient(self, name: str) -> Tensor:
        parameter = self.shared[name]
        if parameter.grad is None:  # for example an expert without tokens; every rank that holds it must still join the all-reduce
            parameter.grad = torch.zeros_like(parameter)
        shard: Tensor = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad  # FSDP: a DTensor
        return shard


Sums = Callable[[Sequence[str]], None]  # called with names of parameters whose gradients are to be reduced over data-parallel ranks


class OverlappedReduction(Watcher):
    """Watcher that starts the data-parallel reduction of a stage's gradients as soon as they are complete, while other actions still run.

    rank 0 of interleaved, two chunks    ... 4B2 4B3 | 0B0 0B1 0B2 0B3 |                      4B2: stage 4, backward, micro-batch 2
                                               ^ the reduction of stage 4 starts during 4B3, that of stage 0 during 0B3

    names: stage -> names of the parameters whose gradients are complete after the stage's last backward action. expect: called with these
    names before that action, so that the engine starts a reduction as soon as its gradients are complete. start: called after each action
    with the names of parameters whose gradients this action has completed (often none). It starts the reductions that have not started,
    and stores the results of reductions that have ended."""

    def __init__(self, schedule: Schedule, rank: int, names: Mapping[int, Sequence[str]], *, expect: Sums, start: Sums) -> None:
        self.stage_at, self.names, self.expect, self.start = stage_complete_at(schedule.orders[rank]), names, expect, start
        self.last = {schedule.orders[rank][at] for at in self.stage_at}

    def before(self, action: Action) -> None:
        if action in self.last:
            self.expect(self.names.get(action.stage, ()))

    def after(self, at: int, took: Span) -> None:
        self.start(self.names.get(self.stage_at[at], ()) if at in self.stage_at else ())


class _Plan:
    """A schedule prepared for one rank. steps: for each action of the rank, (action, messages to receive, messages to send).
    code: hash of the schedule, which ranks compare."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        graph = action_graph(schedule)
        self.schedule, self.traffic = schedule, Traffic.of(schedule, rank)
        self.steps = [
            (graph.actions[n], [*map(graph.message, graph.received(n))], [*map(graph.message, graph.sent(n))])
            for n in range(*graph.first[rank : rank + 2])
        ]
        self.microbatches = sorted({a.microbatch for order in schedule.orders for a in order if a.op in COMPUTE})
        self.code = hash_of((schedule.homes, schedule.orders))


@dataclass
class Runtime:
    """Runs one rank of a pipeline.
    schedule: the schedule of one batch. axis: the pipeline's ranks. links: sends and receives. replicas: all-reduces the gradients of
    parameters that several pipeline ranks hold. trained_from: the first stage that has trained weights."""

    schedule: Schedule
    axis: Axis
    links: Links
    replicas: StageReplicas | None = None
    trained_from: int = 0
    _agreed: set[int] = field(default_factory=set)  # hashes of schedules and shapes that are known to be equal on all ranks
    _plans: dict[int, _Plan] = field(default_factory=dict)  # id(schedule) -> its plan
    _forwards: dict[int, Schedule] = field(default_factory=dict)  # number of micro-batches -> a schedule of forward passes only

    def run(self, work: Work, schedule: Schedule | None = None, *, watchers: Sequence[Watcher] = ()) -> None:
        """Run all of this rank's actions of a schedule (default: `self.schedule`). watchers: callbacks around each action. Collective over
        the pipeline's ranks."""
        _Run(self, work, self._plan(schedule or self.schedule), watchers, train=True).run()

    def forward(self, work: Work, microbatches: int) -> None:
        """Run only forward passes, without autograd, of `microbatches` micro-batches, a number that may differ from the schedule's.
        Collective over the pipeline's ranks."""
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
        self.results: dict[tuple[bool, int, int], Tensor] = {}  # (forward?, stage, micro-batch) -> result, until the next stage reads it
        # (stage, micro-batch) -> (input of F, None on the first stage; autograd edge of F's output, None if nothing up to it is trained)
        self.saved: dict[tuple[int, int], tuple[Tensor | None, GradientEdge | None]] = {}
        self.pending: dict[tuple[int, int], PendingGradients] = {}  # (stage, micro-batch) -> weight gradients that W will compute

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
            self.work.deferred(self.pending.pop((stage, microbatch)))
        else:
            with self.work.reading(stage, version):
                (self._forward if op is Op.F else partial(self._backward, op))(stage, microbatch)

    def _forward(self, stage: int, microbatch: int) -> None:
        x = self.results.pop((True, stage - 1, microbatch)) if stage else None
        if x is not None and self.train and stage > self.runtime.trained_from:
            x.requires_grad_()
        output = self.work.forward(stage, microbatch, x)
        if self.train:
            edge = get_gradient_edge(output) if output.requires_grad else None  # kept instead of the output; the output's memory is freed
            self.saved[stage, microbatch] = x, edge
        if stage < self.last:
            self.results[True, stage, microbatch] = output.detach().contiguous()

    def _backward(self, op: Op, stage: int, microbatch: int) -> None:
        x, output = self.saved.pop((stage, microbatch))
        gradient = self.results.pop((False, stage + 1, microbatch)) if stage < self.last else None
        if output is None:
            self.pending[stage, microbatch] = PendingGradients()
        elif op is Op.I:
            with defer_gradients() as pending:
                self.work.backward(output, gradient)
            self.pending[stage, microbatch] = pending
        else:
            self.work.backward(output, gradient)
        if x is not None:
            unread = stage <= self.runtime.trained_from  # the schedule sends a gradient that no stage needs
            assert unread or x.grad is not None
            self.results[False, stage, microbatch] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()

    def _check_equal(self) -> None:
        """Raise BadInput on all ranks if any two ranks have different schedules, shapes or dtypes. A combination that was equal before
        is not checked again."""
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
    """Return a hash of a value's repr. It is equal in all processes, unlike Python's hash()."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=7).digest(), "little")


def forwards(schedule: Schedule, microbatches: int) -> Schedule:
    """Return a schedule of forward passes only. Micro-batch j runs on the ranks that run micro-batch j % m in `schedule`, which has m
    micro-batches. Each rank's actions are sorted by (j // num_ranks, stage, j). A forward pass needs only that of the previous stage, which
    comes earlier in this order, so there is no deadlock."""
    homes = {(a.stage, a.microbatch): rank for rank, order in enumerate(schedule.orders) for a in order if a.op is Op.F}
    orders: list[list[tuple[int, Action]]] = [[] for _ in schedule.orders]
    for j in range(microbatches):
        for stage in range(schedule.num_stages):
            orders[homes[stage, j % schedule.microbatches]].append((j // schedule.num_ranks, Action(Op.F, stage, j)))
    ordered = tuple(tuple(action for _, action in sorted(order)) for order in orders)
    return Schedule(f"{schedule.name} forward", schedule.homes, microbatches, microbatches, ordered)
