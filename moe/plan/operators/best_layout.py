"""Finds the Mesh-TensorFlow layout with the fewest seconds, or the fewest bytes, among all legal layouts. Exact.

    cost = sum over operators (FLOPs of a part, sums of its results, statistics) + sum over tensors (exchanges and sums of their readers)
    each term depends on a few dim names, with few legal choices: one table of costs, used for all equal layers

The search decides the axis of one name after another, the names with the largest differences of cost first. The sum over all tables of
the least cost that agrees with the decisions is a lower bound. A branch with a bound that is not below the best layout is dropped
(branch and bound). Bytes are bounded in the same way, by tables of the tensors' sizes.

Mesh-TensorFlow's own search (auto_mtf, an integer program) minimises only the memory of a forward pass.
Source: Mesh-TensorFlow (arXiv 1811.02084), section 4; Land and Doig 1960 for the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from math import inf
from typing import Literal, NamedTuple

from moe.plan.operators.mesh_tensorflow import by_letter, cuts, program, renamed
from parallel.annotations.graph import Graph, Operator
from parallel.annotations.partition import Machine, Program, flops, indices, needed, peak, size, tensors, work_of
from parallel.annotations.resharding import Sharding, Sizes
from parallel.errors import BadInput

Objective = Literal["seconds", "bytes"]
Choice = dict[str, str]  # dim name -> its axis, or NONE (not split); names that are missing are not decided yet
NONE = ""


class Best(NamedTuple):
    """A layout, with a rank's seconds and bytes in a step. tried: number of examined layouts, partial ones included."""

    layout: dict[str, str]
    seconds: float
    bytes: float
    tried: int


def best_layout(
    graph: Graph,
    mesh: Sizes,
    machine: Machine,
    *,
    objective: Objective = "seconds",
    of_weight: float = 16,
    most_bytes: float = inf,
) -> Best:
    """Find the legal layout with the fewest seconds (then bytes), or bytes (then seconds), that takes at most `most_bytes` a rank.

    of_weight: bytes of a weight with its states, as in Program.bytes. Raises BadInput if no layout takes at most `most_bytes`.
    """
    search = _Search(renamed(graph), mesh, machine, objective, of_weight, most_bytes)
    search.go({}, search.names)
    if search.best is None:
        least = best_layout(graph, mesh, machine, objective="bytes", of_weight=of_weight)
        raise BadInput(
            "most_bytes",
            got=f"{most_bytes:,.0f}",
            needed=f"at least {least.bytes:,.0f}, the least of any layout on {dict(mesh)}",
            fix="give the mesh more ranks",
        )
    made = program(graph, mesh, search.best)
    return Best(search.best, made.seconds(machine), made.bytes(of_weight=of_weight), search.tried)


@dataclass(frozen=True)
class _Table:
    """Costs of one term, for each legal choice of the names that it depends on. times: number of equal terms in the sum."""

    names: tuple[str, ...]
    costs: tuple[tuple[Choice, float], ...]
    times: int = 1
    found: dict[tuple[str | None, ...], float] = field(default_factory=dict, compare=False)

    def least(self, decided: Choice) -> float:
        """Least cost among the choices that agree with the decisions; infinite if none does."""
        key = tuple(decided.get(name) for name in self.names)
        if key not in self.found:
            mine = [(name, axis) for name, axis in zip(self.names, key, strict=True) if axis is not None]
            fitting = (cost for choice, cost in self.costs if all(choice[name] == axis for name, axis in mine))
            self.found[key] = self.times * min(fitting, default=inf)
        return self.found[key]

    @property
    def spread(self) -> float:
        found = [cost for _, cost in self.costs]
        return self.times * (max(found) - min(found))


class _Search:
    """Branch and bound, depth first."""

    def __init__(self, graph: Graph, mesh: Sizes, machine: Machine, objective: Objective, of_weight: float, most_bytes: float) -> None:
        self.graph, self.objective, self.of_weight, self.most_bytes = graph, objective, of_weight, most_bytes
        self.times, self.sizes = _times(graph, mesh, machine), _sizes(graph, mesh)
        self.axes = {name: axes for name, axes in _axes(graph, mesh).items() if axes}
        self.names = sorted(self.axes, key=lambda name: (-sum(t.spread for t in self.times if name in t.names), name))
        self.best: dict[str, str] | None = None
        self.cost: tuple[float, ...] = (inf, inf, inf)
        self.tried = 0

    def go(self, decided: Choice, left: list[str]) -> None:
        self.tried += 1
        seconds = sum(table.least(decided) for table in self.times)
        if seconds == inf:
            return
        held = self._bytes(decided)
        pair = (seconds, held) if self.objective == "seconds" else (held, seconds)
        cost = (*(float(f"{n:.12e}") for n in pair), sum(map(bool, decided.values())))  # rounded: the order of sums changes last digits
        if held > self.most_bytes or cost >= self.cost:
            return
        if not left:
            self.best, self.cost = {name: axis for name, axis in sorted(decided.items()) if axis}, cost
            return
        for axis in (*self.axes[left[0]], NONE):
            self.go(decided | {left[0]: axis}, left[1:])

    def _bytes(self, decided: Choice) -> float:
        """Lower bound of the bytes with these decisions."""
        least = {id(table): table.least(decided) for table in self.sizes.values()}
        held = {name: least[id(table)] for name, table in self.sizes.items()}
        weights = sum(held.pop(name) for name in self.graph.parameters)
        return self.of_weight * weights + self.graph.itemsize * peak(self.graph, held)


def _axes(graph: Graph, mesh: Sizes) -> dict[str, list[str]]:
    """Axes that may split each name: their size divides the sizes of all dims with that name."""
    found: dict[str, list[str]] = {}
    for dim in graph.dims.values():
        found[dim.name] = [axis for axis in found.get(dim.name, mesh) if dim.size % mesh[axis] == 0]
    return found


def _choices(graph: Graph, mesh: Sizes, together: Iterable[str]) -> Iterator[Choice]:
    """All choices for the names of these letters. Names of letters in the same string must not be split over the same axis."""
    groups = [{graph.dims[letter].name for letter in letters} for letters in together]
    names, axes = sorted(set().union(*groups)), _axes(graph, mesh)
    apart = {frozenset(pair) for group in groups for pair in combinations(sorted(group), 2)}

    def go(choice: Choice, left: list[str]) -> Iterator[Choice]:
        if not left:
            yield choice
            return
        for axis in (NONE, *axes[left[0]]):
            if not axis or not any(other == axis and frozenset((name, left[0])) in apart for name, other in choice.items()):
                yield from go(choice | {left[0]: axis}, left[1:])

    return go({}, names)


def _table(graph: Graph, mesh: Sizes, together: Iterable[str], cost: Callable[[Choice], float], times: int = 1) -> _Table:
    costs = tuple((choice, cost({name: axis for name, axis in choice.items() if axis})) for choice in _choices(graph, mesh, together))
    return _Table(tuple(costs[0][0]), costs, times)


def _times(graph: Graph, mesh: Sizes, machine: Machine) -> list[_Table]:
    """Terms of a step's seconds: a table for each kind of operator, and one for each kind of tensor with its readers."""
    readers = {name: tuple(op for op in graph.operators if name in op.inputs) for name in tensors(graph)}
    alike: dict[object, tuple[str, tuple[Operator, ...], int]] = {}
    for name, read in (*((op.name, (op,)) for op in graph.operators), *((name, read) for name, read in readers.items() if read)):
        own = read[0].name == name
        forms = frozenset(
            (op.rule, op.flops, op.whole, op.statistics, tuple(i for i, n in enumerate(op.inputs) if n == name)) for op in read
        )
        key = (own, graph.letters(name), name in indices(graph), forms)
        alike[key] = (name, read, alike[key][2] + 1) if key in alike else (name, read, 1)
    return [
        _table(graph, mesh, [graph.letters(name), *(op.factors for op in read)], _seconds(graph, mesh, machine, name, read), times)
        for name, read, times in alike.values()
    ]


def _seconds(graph: Graph, mesh: Sizes, machine: Machine, tensor: str, read: tuple[Operator, ...]) -> Callable[[Choice], float]:
    """Function from a layout to the seconds of an operator's work, or of the exchanges between a tensor and its readers."""
    constant = indices(graph)

    def seconds(layout: Choice) -> float:
        of = by_letter(graph, layout)
        work = tuple(work_of(op, cuts(of, op), constant) for op in read)
        around = {tensor, *(name for op in read for name in (*op.inputs, op.name))}
        made = Program(graph, mesh, {name: Sharding(needed(of, graph.letters(name))) for name in around}, work)
        if read[0].name == tensor:
            moved = [move for move in made.moves if move.why != "enter"]
            return flops(work[0], mesh) / machine.flops + sum(machine.seconds(move.step) for move in moved)
        return sum(machine.seconds(move.step) for move in made.moves if move.why == "enter" and move.tensor == tensor)

    return seconds


def _sizes(graph: Graph, mesh: Sizes) -> dict[str, _Table]:
    """Tables of each tensor's elements on a rank. Tensors with equal letters share a table."""
    found: dict[str, _Table] = {}
    for name in tensors(graph):
        letters = graph.letters(name)
        if letters not in found:
            found[letters] = _table(
                graph,
                mesh,
                [letters],
                lambda choice, name=name, letters=letters: size(graph, name, Sharding(needed(by_letter(graph, choice), letters)), mesh),  # type: ignore[misc]
            )
    return {name: found[graph.letters(name)] for name in tensors(graph)}
