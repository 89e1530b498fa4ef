"""FlexFlow's execution simulator (arXiv 1807.05358, section 5): the tasks of one forward and backward pass, and their times.

    each operator cut into parts on devices  ->  tasks: compute forward, backward; fetch data from other devices; sum gradients

A part of an operator reads a region of each input. If other devices have the region, one task fetches it through the network port of the
part's device. If the input is the sum of t partial sums, 2/t of the bytes of each are fetched, as in a ring all-reduce. If several devices
have copies of a region, it comes from the part's own device if possible, otherwise equally from all. A device and its port each handle one
task at a time, in the order in which the tasks become ready. Of tasks that become ready together, the one with the smallest key is first.

Delta simulation: after a change of placement, only some tasks are simulated again. Tasks that became ready before the first changed task
keep their times. The paper instead recomputes the times that depend on a change. Both give the result of a full simulation.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from moe.plan.job.states import model_states
from moe.plan.operators.links import Machine
from moe.plan.search.strategies import Settings
from parallel.annotations.graph import Graph, Operator

# key of a task: (kind, number, index of the part). The number is:
#     FORWARD, BACKWARD  the operator's
#     FETCH, RETURN      the edge's
#     SUM                the parameter's (`input_number`)
#     JOIN               before a SUM: the parameter's (and the index is the region's, not the part's);
#                        before a FETCH or RETURN: above all parameters', another one for each edge and direction
Key = tuple[int, int, int]
FORWARD, BACKWARD, FETCH, RETURN, SUM, JOIN = range(6)  # kinds of tasks. RETURN fetches a gradient; JOIN only waits for several tasks
FINE_S_PER_BYTE = 1e-9  # penalty: seconds added for each byte above a device's memory, 1 ms a MB as in FlexFlow


@dataclass(frozen=True)
class Placed:
    """Placement of an operator: part i runs on device first + i * stride. degrees: how the work is cut, as (letter of the dim, number of
    parts), outermost first. With the letter "", the parts are copies that do the same work."""

    degrees: tuple[tuple[str, int], ...] = ()
    first: int = 0
    stride: int = 1

    @cached_property
    def parts(self) -> int:
        return prod(n for _, n in self.degrees)

    def num_pieces(self, letters: str) -> int:
        """Return the number of different pieces into which this placement cuts a tensor with the dims `letters`."""
        return prod(n for letter, n in self.degrees if letter and letter in letters)


Placement = Mapping[str, Placed]  # operator -> its placement


class Task(NamedTuple):
    """A task. where: number of the device or port that it occupies (-1: none). after: keys of the tasks that must end before it starts."""

    where: int
    seconds: float
    after: tuple[Key, ...]


@dataclass
class Ran:
    """Result of a simulation. tasks: key -> task. ready: key -> time in seconds at which the task could start. ends: key -> time at which
    it ended. order: (ready time, key) of all tasks in the order in which they were executed."""

    tasks: dict[Key, Task]
    order: list[tuple[float, Key]] = field(default_factory=list)
    ready: dict[Key, float] = field(default_factory=dict)
    ends: dict[Key, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(self.ends.values(), default=0.0)


def run(tasks: dict[Key, Task], before: Ran | None = None) -> Ran:
    """Simulate all tasks. before: result of an earlier simulation with similar tasks; the times of tasks before the first difference are
    copied from it."""
    ran = Ran(tasks)
    since = 0.0 if before is None else _first_change(tasks, before)
    free: dict[int, float] = {}
    for ready, key in [] if before is None else before.order:
        if ready >= since:
            break
        ran.order.append((ready, key))
        ran.ready[key], ran.ends[key] = ready, before.ends[key]  # type: ignore[union-attr]
        free[tasks[key].where] = ran.ends[key]
    waits: dict[Key, int] = {}
    after: dict[Key, list[Key]] = {}
    heap: list[tuple[float, Key]] = []
    ready_at: dict[Key, float] = {}
    for key, task in tasks.items():
        if key in ran.ends:
            continue
        open_, latest = 0, 0.0
        for other in task.after:
            if other in ran.ends:
                latest = max(latest, ran.ends[other])
            else:
                open_ += 1
                after.setdefault(other, []).append(key)
        waits[key], ready_at[key] = open_, latest
        if open_ == 0:
            heap.append((latest, key))
    heapq.heapify(heap)
    while heap:
        ready, key = heapq.heappop(heap)
        task = tasks[key]
        end = ready + task.seconds if task.where < 0 else max(ready, free.get(task.where, 0.0)) + task.seconds
        if task.where >= 0:
            free[task.where] = end
        ran.order.append((ready, key))
        ran.ready[key], ran.ends[key] = ready, end
        for later in after.get(key, ()):
            ready_at[later] = max(ready_at[later], end)
            waits[later] -= 1
            if not waits[later]:
                heapq.heappush(heap, (ready_at[later], later))
    assert len(ran.ends) == len(tasks), "some tasks wait for each other in a circle"
    return ran


def _first_change(tasks: dict[Key, Task], before: Ran) -> float:
    """Return the earliest time from which the simulation of `tasks` can differ from `before`. Tasks that become ready earlier have equal
    times in both."""
    gone = [before.ready[key] for key in before.tasks.keys() - tasks.keys()]
    new = {key for key, task in tasks.items() if before.tasks.get(key) != task}
    old = [before.ready[key] for key in new if key in before.ready]
    known = ([before.ends[other] for other in tasks[key].after if other in before.ends and other not in new] for key in new)
    least = [max(ends, default=0.0) for ends in known]
    return min([*gone, *old, *least], default=before.seconds + 1.0)


@dataclass(frozen=True)
class _Regions:
    """Regions of one tensor that the parts of a placed operator read or write, as fractions of each dim."""

    low: Any  # [parts, dims] start of each part's region
    high: Any  # [parts, dims] end of each part's region
    device: Any  # [parts] number of each part's device
    group: Any  # [parts] number of the region; parts with equal numbers have copies of one region
    copies: int  # number of copies of each region
    partial: int  # number of partial sums that add up to the tensor; 1 if the tensor is not a sum


class Simulator:
    """Simulates placements of one graph on one machine. weight: layer -> number of equal layers that it represents."""

    def __init__(self, graph: Graph, machine: Machine, settings: Settings, weight: Mapping[int, float] | None = None):
        self.graph, self.machine, self.settings = graph, machine, settings
        self.weight = {op.name: (weight or {}).get(op.layer, 1.0) for op in graph.operators}
        self.number = {op.name: i for i, op in enumerate(graph.operators)}
        inputs = ((op.name, place) for op in graph.operators for place in range(len(op.inputs)))
        self.input_number = {key: i for i, key in enumerate(inputs)}
        self._blocks: dict[Any, dict[Key, Task]] = {}  # cache: placed operator or edge -> its tasks
        self._seen: dict[Any, _Regions] = {}  # cache: arguments of `_regions` -> its result

    def tasks(self, placement: Placement) -> dict[Key, Task]:
        """Return a dict: key -> task for all tasks of one forward and backward pass."""
        made: dict[Key, Task] = {}
        for op in self.graph.operators:
            made |= self._block((op.name, placement[op.name]), self._own, op, placement)
        for i, edge in enumerate(self.graph.edges):
            made |= self._block((i, placement[edge.writer], placement[edge.reader]), self._between, i, placement)
        return made

    def seconds(self, placement: Placement, ran: Ran) -> float:
        """Return the seconds of a simulated placement, plus a penalty for bytes above a device's memory. ran: result of its simulation."""
        return ran.seconds + FINE_S_PER_BYTE * self.excess(placement)

    def excess(self, placement: Placement) -> float:
        """Return the bytes by which the fullest device exceeds its memory; 0 if all fit."""
        held = np.zeros(self.machine.devices)
        for op in self.graph.operators:
            placed = placement[op.name]
            one = self.graph.size(op.output) * self.graph.itemsize / placed.num_pieces(op.output)
            for name, term in zip(op.inputs, op.terms, strict=True):
                if name in self.graph.parameters:
                    stage, pieces, storage = int(1 in self.settings.sharded), placed.num_pieces(term), self.settings.storage
                    mine = self.graph.size(term) / pieces / self.graph.readers_of[name]
                    one += model_states(mine, stage=stage, copies=placed.parts // pieces, storage=storage).total
            held[self._devices(placed)] += one * self.weight[op.name]
        return max(0.0, float(held.max()) - self.machine.memory_bytes)

    def _block(self, key: Any, make: Any, *args: Any) -> dict[Key, Task]:
        """Return the tasks in the cache under `key`. If they are not there, make(*args) makes them."""
        if key not in self._blocks:
            self._blocks[key] = make(*args)
        return self._blocks[key]

    def _devices(self, placed: Placed) -> Any:
        return placed.first + placed.stride * np.arange(placed.parts)

    def _own(self, op: Operator, placement: Placement) -> dict[Key, Task]:
        """Return a dict: key -> task for one operator: forward and backward of each part, and all-reduces of its parameters' gradients."""
        placed, n, made = placement[op.name], self.number[op.name], {}
        devices, weight = self._devices(placed), self.weight[op.name]
        moved = sum(self.graph.size(term) / placed.num_pieces(term) for term in (*op.terms, op.output)) * self.graph.itemsize
        once = op.flops / placed.num_pieces(op.factors) / self.machine.flops + moved / self.machine.moved + self._statistics(op, placed)
        edges_in = [(i, e) for i, e in enumerate(self.graph.edges) if e.reader == op.name]
        edges_out = [(i, e) for i, e in enumerate(self.graph.edges) if e.writer == op.name]
        for part, device in enumerate(devices.tolist()):
            made[FORWARD, n, part] = Task(device, once * weight, tuple((FETCH, i, part) for i, _ in edges_in))
            after = ((FORWARD, n, part), *((RETURN, i, part) for i, _ in edges_out))
            made[BACKWARD, n, part] = Task(device, 2 * once * weight, after)
        for place, (name, term) in enumerate(zip(op.inputs, op.terms, strict=True)):
            if name in self.graph.parameters:
                made |= self._sum(op, place, term, placed)
        return made

    def _statistics(self, op: Operator, placed: Placed) -> float:
        """Return the seconds in which the parts of a norm or a loss all-reduce their partial statistics, one fp32 number for each
        position."""
        rest = "".join(a for a in op.output if a not in op.statistics)
        count, size = placed.num_pieces(op.statistics), self.graph.size(rest) * 4 / placed.num_pieces(rest)
        return self._all_reduce(size, placed.parts, count) if count > 1 else 0.0

    def _all_reduce(self, size_bytes: float, span: int, count: int) -> float:
        """Return the seconds of an all-reduce over `count` devices, evenly spaced among `span` adjacent devices: first within each node,
        then between nodes."""
        within = min(count, max(1, self.machine.node_size * count // max(span, self.machine.node_size)))
        inside, between, nodes = self.machine.inside, self.machine.between, max(1, count // within)
        seconds = inside.alpha_s + 2 * (within - 1) / within * size_bytes * inside.beta_s if within > 1 else 0.0
        return seconds + (between.alpha_s + 2 * (nodes - 1) / nodes * size_bytes / within * between.beta_s if nodes > 1 else 0.0)

    def _sum(self, op: Operator, place: int, term: str, placed: Placed) -> dict[Key, Task]:
        """Return a dict: key -> task for the all-reduce of a parameter's gradient; empty if no parts of `op` have partial sums of it. The
        parameter is the operator's input number `place`, and `term` has the letters of its dims. The tasks belong to one micro-batch.
        The all-reduce runs once a step, so its time is divided by the number of micro-batches."""
        count = prod(n for letter, n in placed.degrees if letter and letter not in term)
        if count == 1:
            return {}
        number, which, made = self.number[op.name], self.input_number[op.name, place], {}
        size = self.graph.size(term) * self.settings.gradient_bytes / placed.num_pieces(term)
        seconds = self._all_reduce(size, placed.parts * placed.stride, count) / self.settings.microbatches * self.weight[op.name]
        seconds /= self.graph.readers_of[op.inputs[place]]
        regions = self._regions(op.factors, term, placed)
        for part, device in enumerate(self._devices(placed).tolist()):
            join = (JOIN, which, int(regions.group[part]))
            same = np.flatnonzero((regions.low == regions.low[part]).all(1) & (regions.high == regions.high[part]).all(1))
            made[join] = Task(-1, 0.0, tuple((BACKWARD, number, int(other)) for other in same))
            made[SUM, which, part] = Task(self.machine.devices + device, seconds, (join,))
        return made

    def _regions(self, factors: str, term: str, placed: Placed) -> _Regions:
        """Return, for each part of an operator with dims `factors`, the region (start and end in each dim) of a tensor with dims `term`
        that the part reads or writes."""
        key = (factors, term, placed)
        if key in self._seen:
            return self._seen[key]
        counts = [n for _, n in placed.degrees] or [1]
        index = np.unravel_index(np.arange(placed.parts), counts)
        low, high = np.zeros((placed.parts, len(term))), np.ones((placed.parts, len(term)))
        partial, part_of = 1, np.zeros(placed.parts, dtype=int)
        for i, (letter, n) in enumerate(placed.degrees):
            if letter and letter in term:
                place = term.index(letter)
                width = (high[:, place] - low[:, place]) / n
                low[:, place] = low[:, place] + index[i] * width
                high[:, place] = low[:, place] + width
            elif letter:
                partial, part_of = partial * n, part_of * n + index[i]
        _, group = np.unique(np.column_stack([np.round(low, 9), part_of]), axis=0, return_inverse=True)
        copies = prod(n for letter, n in placed.degrees if not letter)
        made = _Regions(low, high, self._devices(placed), group.reshape(-1), copies, partial)
        self._seen[key] = made
        return made

    def _between(self, i: int, placement: Placement) -> dict[Key, Task]:
        """Return a dict: key -> task for edge number i: the reader's parts fetch the tensor from the writer's parts, and the writer's parts
        fetch its gradient."""
        edge = self.graph.edges[i]
        writer, reader = self.graph.named[edge.writer], self.graph.named[edge.reader]
        size = self.graph.size(writer.output) * self.graph.itemsize
        given = self._regions(writer.factors, writer.output, placement[edge.writer])
        read = self._regions(reader.factors, reader.terms[edge.place], placement[edge.reader])
        made = self._fetches(given, read, size, (FORWARD, self.number[edge.writer]), (FETCH, i), self.weight[edge.reader])
        return made | self._fetches(read, given, size, (BACKWARD, self.number[edge.reader]), (RETURN, i), self.weight[edge.reader])

    def _fetches(
        self, have: _Regions, need: _Regions, size: float, source: tuple[int, int], what: tuple[int, int], weight: float
    ) -> dict[Key, Task]:
        """Return a dict: key -> task for the parts in `need`, each of which fetches its region of a tensor from the parts in `have`. size:
        bytes of the tensor. source: (kind, operator) of the tasks that make the tensor. what: (kind, edge) of the fetching tasks. weight:
        number of equal layers that the tasks stand for."""
        # in the following matrices, rows are the parts in `need`, and columns are the parts in `have`
        sides = np.minimum(need.high[:, None], have.high[None]) - np.maximum(need.low[:, None], have.low[None])
        overlap = np.clip(sides, 0.0, 1.0).prod(axis=2)
        overlap[overlap < 1e-12] = 0.0
        own = need.device[:, None] == have.device[None]
        groups = np.eye(int(have.group.max()) + 1)[have.group]
        mine = (own @ groups)[:, have.group] > 0  # whether the device of the row's part has a copy of the column's region
        from_there = overlap * size / have.copies * (2.0 / have.partial if have.partial > 1 else 1.0) * ~mine
        near = need.device[:, None] // self.machine.node_size == have.device[None] // self.machine.node_size
        inside, between = (from_there * near).sum(1), (from_there * ~near).sum(1)
        waits = (overlap > 0) & (own | ~mine)
        made: dict[Key, Task] = {}
        joins: dict[bytes, Key] = {}
        for part in range(len(need.device)):
            row = waits[part].tobytes()
            others = np.flatnonzero(waits[part])
            if len(others) > 1 and row not in joins:
                joins[row] = (JOIN, len(self.input_number) + 2 * what[1] + (what[0] == RETURN), part)
                made[joins[row]] = Task(-1, 0.0, tuple((*source, int(other)) for other in others))
            after = (joins[row],) if row in joins else tuple((*source, int(other)) for other in others)
            a, b = float(inside[part]), float(between[part])
            links = ((a, self.machine.inside), (b, self.machine.between))
            link_s = sum(link.alpha_s + size_bytes * link.beta_s for size_bytes, link in links if size_bytes)
            where = self.machine.devices + int(need.device[part]) if link_s else -1
            made[what[0], what[1], part] = Task(where, link_s * weight, after)
        return made
