"""Alpa's two searches (arXiv 2201.12023): shardings of a stage's operators, and the stages.

Within a stage (section 4): the cheapest sharding strategies of all operators, by an integer linear program

    minimize    sum_i  s_i . c_i   +   sum_ij  e_ij . R_ij        s_i: 0 or 1 for each strategy of operator i; c_i: costs
                                                                  e_ij: 0 or 1 for each pair of shardings, of i's output
                                                                  and of j's input; R_ij: resharding costs
    such that   each row of e_ij (a sharding of i's output) adds up to the sum of s_i over the strategies with this sharding, and each
                column likewise for s_j; and model states and kept outputs fit into memory

A recomputed layer runs its forward pass, a third of its cost, twice, and only its last output stays live. R_ij has one row for each
sharding (type State), not for each strategy, because several strategies give the same sharding. Therefore e has few variables, which need
not be integers, and the linear relaxation is tight. First the relaxation is solved (HiGHS, by scipy.optimize.milp). If its solution takes
exactly one strategy for each operator, as it usually does, this is the optimum. Otherwise the integer program is solved. With more than
`LARGE` variables that would be slow, so the relaxation is rounded instead. Each operator in turn gets the cheapest strategy among the
strategies with a large value in the relaxation, given the choices for earlier operators.

Between stages (section 5): cuts layers into stages, and devices into submeshes, by dynamic programming

    step time = sum_i t_i + (B - 1) max_i t_i              B micro-batches, each of which takes t_i seconds on stage i

For every possible time t_max of the slowest stage, in ascending order:

    F(s, l, d) = min over k > l and submeshes of n <= d devices:   F(s - 1, k, d - n) + t(l..k, n, s - 1)     for stages with t <= t_max

t(l..k, n, later) is the time of a stage with the layers l to k - 1 on n devices; inf if the stage does not fit into memory. `later` is the
number of later stages: for each of them, 1F1B keeps the activations of one more micro-batch. F(s, l, d) is the least sum of the times of s
stages with the layers from l to the last, on d devices. The result is the smallest F(s, 0, D) + (B - 1) t_max over all s and t_max, for D
devices. The search ends when B t_max exceeds the best result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np

from moe.plan.operators.links import Mesh
from moe.plan.search.strategies import AGAIN, Cost, Settings, State, Strategy, candidates, change, cost_of, read_together
from parallel.annotations.graph import Graph
from parallel.errors import BadInput, counted

LARGE = 60_000
Options = dict[str, tuple[Strategy, ...]]
Time = Callable[[int, int, int, int], float]  # (first layer, end layer, devices, number of later stages) -> seconds, or inf


@dataclass(frozen=True)
class Assignment:
    """Result of `intra_op`. graph: the given graph with added operators `NAME.read`, each of which reshards the tensor NAME once for
    several readers (`read_together`). chosen: operator -> strategy."""

    graph: Graph
    chosen: Mapping[str, Strategy]
    cost: Cost
    solved: Literal["exactly", "relaxed and rounded"]


def intra_op(
    graph: Graph,
    mesh: Mesh,
    settings: Settings | None = None,
    *,
    memory_bytes: float = inf,
    in_flight: int = 1,
    fixed: Mapping[str, State] | None = None,
    same: tuple[tuple[str, str], ...] = (),
    weight: Mapping[int, float] | None = None,
    again: Mapping[int, str] | None = None,
    large: int = LARGE,
    gap: float = 1e-9,
) -> Assignment:
    """Find the cheapest strategies on `mesh`. Raises BadInput if no choice of strategies fits into memory.

    memory_bytes: memory of a device for parameters, gradients, optimizer states and the outputs of `in_flight` micro-batches. fixed:
    operator -> required sharding of its output. same: pairs of operators whose outputs must have equal shardings. weight: layer -> number
    of layers that it represents. again: recomputed layer -> operator whose output is kept. large: number of variables above which the
    relaxation is rounded. gap: fraction by which the integer program may miss the optimum.
    """
    settings, joined = settings or Settings(), read_together(graph)
    options = candidates(joined, mesh, settings)
    for name, state in (fixed or {}).items():
        options[name] = tuple(s for s in options[name] if s.gives == state)
    program = _Program(joined, mesh, options, weight or {}, again or {})
    program.alike(same)
    if memory_bytes < inf:
        program.within(memory_bytes, in_flight)
    values = program.solve("relaxed")
    whole = values is not None and program.is_whole(values)
    if values is not None and not whole and program.size <= large:
        values, whole = program.solve("integer", gap), True
    if values is None:
        least = sum(min(program.bytes_of(name, s, in_flight) for s in one) for name, one in options.items())
        fix = f"give each device more memory (at least {least / 2**30:.1f} GiB), or take more devices or smaller micro-batches"
        raise BadInput(
            "memory", got=f"{memory_bytes / 2**30:.1f} GiB a device", needed="enough for at least one choice of strategies", fix=fix
        )
    chosen = program.read(values) if whole else program.rounded(values)
    for share in (0.97, 0.94, 0.9, 0.8):  # if the rounded choice does not fit, try again with this fraction of the memory
        if whole or memory_bytes == inf or program.held(chosen, in_flight) <= memory_bytes:
            break
        program.within(memory_bytes * share, in_flight)
        values = program.solve("relaxed")
        chosen = chosen if values is None else program.rounded(values)
    return Assignment(joined, chosen, cost_of(joined, mesh, chosen), "exactly" if whole else "relaxed and rounded")


class _Program:
    """The linear program. A column (variable) is a strategy of an operator, or a pair of a tensor's shardings: (as the writing operator
    gives it, as a reading operator needs it). options: operator -> strategies. weight: layer -> number of layers that it represents.
    again: recomputed layer -> operator whose output is kept."""

    def __init__(self, graph: Graph, mesh: Mesh, options: Options, weight: Mapping[int, float], again: Mapping[int, str]) -> None:
        self.graph, self.mesh, self.options = graph, mesh, options
        self.weight = {op.name: weight.get(op.layer, 1.0) for op in graph.operators}
        self.paid = {op.name: self.weight[op.name] * (AGAIN if op.layer in again else 1.0) for op in graph.operators}
        self.kept = {op.name for op in graph.operators if again.get(op.layer, op.name) == op.name}
        self.first: dict[str, int] = {}
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []  # (column -> coefficient, lower bound, upper bound)
        for name, one in options.items():
            if not one:
                got, fix = "no strategy that gives the sharding in `fixed`", "choose a sharding that divides the operator's sizes"
                raise BadInput(f"operator {name}", got=got, needed="at least one", fix=fix)
            self.first[name] = len(self.costs)
            self.costs += [s.seconds * self.paid[name] for s in one]
            self.rows.append(({self.first[name] + i: 1.0 for i in range(len(one))}, 1.0, 1.0))
        self.integers = len(self.costs)
        for edge in graph.edges:
            self._edge(edge.writer, edge.reader, edge.place)

    @property
    def size(self) -> int:
        return len(self.costs)

    def _states(self, name: str, place: int | None) -> dict[State, list[int]]:
        """Return a dict: sharding of the operator's input number `place` (None: of its output) -> columns of the strategies with it."""
        found: dict[State, list[int]] = {}
        for i, s in enumerate(self.options[name]):
            found.setdefault(s.gives if place is None else s.reads[place], []).append(self.first[name] + i)
        return found

    def _edge(self, writer: str, reader: str, place: int) -> None:
        """Add a column for each pair of shardings with which `reader` can read the output of `writer` as input number `place`. Also add the
        rows that tie these columns to the chosen strategies."""
        given, read = self._states(writer, None), self._states(reader, place)
        size = self.graph.size(self.graph.letters(writer)) * self.graph.itemsize
        rows: dict[State, dict[int, float]] = {a: dict.fromkeys(columns, -1.0) for a, columns in given.items()}
        columns: dict[State, dict[int, float]] = {b: dict.fromkeys(columns, -1.0) for b, columns in read.items()}
        for a in given:
            for b in read:
                seconds = change(size, self.mesh, a, b)
                if seconds < inf:
                    rows[a][len(self.costs)] = columns[b][len(self.costs)] = 1.0
                    self.costs.append(seconds * self.paid[reader])
        self.rows += [(row, 0.0, 0.0) for row in (*rows.values(), *columns.values())]

    def alike(self, same: tuple[tuple[str, str], ...]) -> None:
        """Add rows that force the two outputs of each pair of operators in `same` to have equal shardings."""
        for one, other in same:
            a, b = self._states(one, None), self._states(other, None)
            for state in a.keys() | b.keys():
                row = dict.fromkeys(a.get(state, []), 1.0)
                for column in b.get(state, []):
                    row[column] = row.get(column, 0.0) - 1.0
                self.rows.append((row, 0.0, 0.0))

    def within(self, memory_bytes: float, in_flight: int) -> None:
        """Add a row for the memory limit: the sum of the chosen strategies' bytes / `memory_bytes` is at most 1. All kept outputs count,
        because all are in memory when the backward pass begins."""
        row: dict[int, float] = {}
        for name, one in self.options.items():
            for i, s in enumerate(one):
                row[self.first[name] + i] = self.bytes_of(name, s, in_flight) / memory_bytes
        self.rows.append((row, 0.0, 1.0))

    def held(self, chosen: Mapping[str, Strategy], in_flight: int) -> float:
        """Return the peak memory of a device in bytes with the chosen strategies: model states and outputs."""
        return sum(self.bytes_of(name, s, in_flight) for name, s in chosen.items())

    def bytes_of(self, name: str, strategy: Strategy, in_flight: int) -> float:
        """Return the bytes of an operator's states and kept outputs on a device, times the number of layers that its layer represents."""
        outputs = strategy.output_bytes * in_flight if name in self.kept else 0.0
        return (strategy.state_bytes + outputs) * self.weight[name]

    def solve(self, how: Literal["integer", "relaxed"], gap: float = 1e-9) -> Any:
        """Return the value of each column in the solution; None if there is no solution. how: `integer`: columns of strategies are 0 or 1.
        `relaxed`: all columns may be fractions. gap: fraction by which the integer program may miss the optimum."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        where = [(r, c, v) for r, (row, _, _) in enumerate(self.rows) for c, v in row.items()]
        r, c, v = (np.array(x) for x in zip(*where, strict=True))
        matrix = csr_array((v.astype(float), (r, c)), shape=(len(self.rows), self.size))
        costs = np.array(self.costs)
        scale = costs[costs > 0].mean() if (costs > 0).any() else 1.0
        integers = np.zeros(self.size, dtype=int)
        integers[: self.integers] = how == "integer"
        limits = LinearConstraint(matrix, np.array([low for _, low, _ in self.rows]), np.array([high for _, _, high in self.rows]))
        found = milp(costs / scale, constraints=limits, integrality=integers, bounds=Bounds(0, 1), options={"mip_rel_gap": gap})
        return found.x

    def is_whole(self, values: Any) -> bool:
        """Return whether the relaxation's solution takes exactly one strategy for each operator; if so, no integer solution is better."""
        return all(min(abs(v), abs(1 - v)) < 1e-6 for v in values[: self.integers])

    def read(self, values: Any) -> dict[str, Strategy]:
        """Return operator -> the strategy with the largest value. values: result of `solve`."""
        return {name: one[max(range(len(one)), key=lambda i: values[self.first[name] + i])] for name, one in self.options.items()}

    def rounded(self, values: Any) -> dict[str, Strategy]:
        """Round the relaxation's solution. Returns operator -> strategy. Only strategies with more than half of the operator's largest
        value are considered. Of these, each operator in turn gets the cheapest, given the choices for earlier operators."""
        chosen: dict[str, Strategy] = {}
        for op in self.graph.operators:
            one, first = self.options[op.name], self.first[op.name]
            likely = max(values[first + i] for i in range(len(one)))

            def paid(s: Strategy, inputs: tuple[str, ...] = op.inputs) -> float:
                return s.seconds + sum(
                    change(self.graph.size(self.graph.letters(x)) * self.graph.itemsize, self.mesh, chosen[x].gives, reads)
                    for x, reads in zip(inputs, s.reads, strict=True)
                    if x in chosen
                )

            some = [s for i, s in enumerate(one) if values[first + i] > 0.5 * likely]
            able = [s for s in some if paid(s) < inf] or list(one)
            chosen[op.name] = min(able, key=paid)
        return chosen


@dataclass(frozen=True)
class Stage:
    """A stage: layers `first` to `end` - 1 on `devices` devices. seconds: time of one micro-batch, forward and backward."""

    first: int
    end: int
    devices: int
    seconds: float


@dataclass(frozen=True)
class Stages:
    """Stages of the whole model. seconds: time of a step."""

    stages: tuple[Stage, ...]
    seconds: float


def total(times: Sequence[float], microbatches: int) -> float:
    """Return the seconds of a step. times: seconds of one micro-batch on each stage."""
    return sum(times) + (microbatches - 1) * max(times)


def inter_op(time: Time, *, layers: int, devices: int, submeshes: Sequence[int], microbatches: int, gap: float = 1e-9) -> Stages:
    """Find the stages that use all devices and have the least step time. Raises BadInput if no stages fit into memory. time: (first, end,
    devices, number of later stages) -> seconds of one micro-batch on the stage, or inf. submeshes: numbers of devices that a stage may
    have. gap: if two values of t_max differ by less than this fraction, only the smaller is tried."""
    most = min(layers, devices)
    # t[later, submesh][first, end]: seconds of a stage that `later` stages follow; inf if the stage does not fit, or end <= first
    t = np.full((most, len(submeshes), layers + 1, layers + 1), inf)
    for later in range(most):
        for j, n in enumerate(submeshes):
            for first in range(layers):
                for end in range(first + 1, layers + 1):
                    t[later, j, first, end] = time(first, end, n, later)
    best, found = inf, None
    tried = -inf
    for t_max in np.unique(t[np.isfinite(t)]):
        if microbatches * t_max >= best:
            break
        if t_max <= tried * (1 + gap):
            continue
        tried = t_max
        sums, choice = _sums(np.where(t <= t_max * (1 + gap), t, inf), layers, devices, submeshes)
        values = sums[:, 0, devices] + (microbatches - 1) * t_max
        stages = int(values.argmin())
        if values[stages] < best:
            made = _walk(choice, t, stages, devices, submeshes)
            seconds = total([stage.seconds for stage in made], microbatches)  # less than values[stages] if all stages take less than t_max
            if seconds < best:
                best, found = seconds, Stages(made, seconds)
    if found is None:
        got = f"none that fit into memory, for {counted(layers, 'layer')} on {counted(devices, 'device')}"
        fix = "give devices more memory, or take more devices or smaller micro-batches"
        raise BadInput("stages", got=got, needed="stages that fit into memory", fix=fix)
    return found


def _sums(t: Any, layers: int, devices: int, submeshes: Sequence[int]) -> tuple[Any, Any]:
    """Return the arrays F[s, l, d] (top of this file) and choice[s, l, d, 2]: (index of the submesh, end layer) of the first stage. t:
    seconds, as in `inter_op`."""
    most = len(t)
    sums = np.full((most + 1, layers + 1, devices + 1), inf)
    choice = np.zeros((most + 1, layers + 1, devices + 1, 2), dtype=np.int32)
    sums[0, layers, 0] = 0.0
    for s in range(1, most + 1):
        for j, n in enumerate(submeshes):
            if n > devices or not np.isfinite(t[s - 1, j]).any():
                continue
            # both[l, k, rest]: seconds if the first of s stages has layers l to k - 1 on n devices, and the other stages have the layers
            # from k on `rest` devices; so d = n + rest
            both = t[s - 1, j][:layers, :, None] + sums[s - 1][None, :, : devices + 1 - n]
            end = both.argmin(axis=1)
            value = np.take_along_axis(both, end[:, None, :], axis=1)[:, 0]
            better = value < sums[s, :layers, n:]
            sums[s, :layers, n:] = np.where(better, value, sums[s, :layers, n:])
            choice[s, :layers, n:, 0] = np.where(better, j, choice[s, :layers, n:, 0])
            choice[s, :layers, n:, 1] = np.where(better, end, choice[s, :layers, n:, 1])
    return sums, choice


def _walk(choice: Any, t: Any, stages: int, devices: int, submeshes: Sequence[int]) -> tuple[Stage, ...]:
    """Return the `stages` stages that F[stages, 0, devices] stands for, in order. choice: from `_sums`. t: seconds, as in `inter_op`."""
    made, first = [], 0
    for s in range(stages, 0, -1):
        j, end = (int(x) for x in choice[s, first, devices])
        made.append(Stage(first, end, submeshes[j], float(t[s - 1, j, first, end])))
        first, devices = end, devices - submeshes[j]
    return tuple(made)
