"""Mesh-TensorFlow: dims have names, and a layout gives the mesh axis over which each name is split. All shardings follow from the names.

    layout   batch:rows, heads:columns, hidden:columns, vocab:columns, experts:rows           mesh axes: rows, columns
    einsum   b:rows, f:columns    blf, fd -> bld    each rank computes its part; f is summed, so an all-reduce over columns follows

    legal    each name is on at most one axis; no two names of a tensor or operator are on the same axis; the axis divides the size
    costs    partition.py: FLOPs of a rank, all-reduces over split sums, resharding of a tensor that is read under other names, bytes

The names of a tensor's dims decide its sharding. To reshard a tensor, its dims are renamed (Mesh-TensorFlow's reshape). In MoE layers,
tensors between dispatch and combine have dims named `experts` and `expert_batch`, and all other tensors have `experts_whole` and `batch`.
If batch and experts are both on the axis `rows`, this renaming is the all-to-all.

`best_layout` finds the best of all legal layouts by branch and bound. A step's cost is a sum of terms: FLOPs and all-reduces of each
operator, resharding of each tensor. A term depends on a few dim names with few legal axes, so a table holds all its costs. Equal layers
share their tables. The search chooses the axis of one name after another. It starts with the names whose axis changes the costs most. The
sum of the least costs in all tables, given the axes chosen so far, is a lower bound. A branch is dropped if its bound is not below the cost
of the best layout so far. A lower bound of a rank's bytes is computed in the same way. Mesh-TensorFlow's own search (auto_mtf, an integer
program) minimizes only the memory of a forward pass.

Sources: Mesh-TensorFlow (arXiv 1811.02084), sections 3 and 4, and its moe.py; Land and Doig 1960 for the search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import inf
from typing import Literal, NamedTuple

from parallel.annotations.graph import Dim, Graph, Operator
from parallel.annotations.partition import Cuts, Machine, Program, flops, indices, needed, peak, size, tensors, work_of
from parallel.annotations.resharding import Sharding, Sizes, check_axes
from parallel.errors import BadInput, did_you_mean

Layout = Mapping[str, str]  # name of a dim -> axis of the mesh that splits it
# in MoE layers, `renamed` calls the dim `batch` INSIDE between dispatch and combine, and the dim `experts` OUTSIDE everywhere else. So
# batch and experts can each be on one mesh axis inside and on another outside
INSIDE, OUTSIDE = "expert_batch", "experts_whole"
Objective = Literal["seconds", "bytes"]
Choice = dict[str, str]  # name of a dim -> its axis, or NONE (whole); a missing name has no axis yet
NONE = ""


def layout_of(text: str, graph: Graph, mesh: Sizes) -> dict[str, str]:
    """Parse a layout `name:axis, ...`. Raises BadInput for unknown or repeated names, unknown axes, and illegal layouts."""
    found: dict[str, str] = {}
    for rule in filter(None, (word.strip() for word in text.split(","))):
        name, colon, axis = (part.strip() for part in rule.partition(":"))
        names = sorted({dim.name for dim in renamed(graph).dims.values()})
        if not colon:
            dim = did_you_mean(name.split()[0], names) or names[0]
            raise BadInput("layout", got=repr(rule), needed="name:axis", fix=f"write {dim}:{next(iter(mesh), 'axis')}")
        if name in found:
            raise BadInput("layout", got=f"{name} twice", needed="each dim over one axis at most", fix=f"leave out {rule}")
        found[name] = axis
    check(graph, found, mesh)
    return found


def check(graph: Graph, layout: Layout, mesh: Sizes) -> None:
    """Raise BadInput for unknown names and axes, sizes that are not divisible, and two dims of a tensor or operator on one axis."""
    graph = renamed(graph)
    names = sorted({dim.name for dim in graph.dims.values()})
    for name, axis in layout.items():
        if name not in names:
            near = did_you_mean(name, names) or names[0]
            raise BadInput("layout", got=f"a dim {name!r}", needed=f"one of {', '.join(names)}", fix=f"use {near}")
        check_axes([axis], mesh, what=f"layout {name}:{axis}")
    for dim in graph.dims.values():
        if dim.name in layout and dim.size % mesh[layout[dim.name]]:
            ways = mesh[layout[dim.name]]
            got, fix = f"{dim.name} of size {dim.size} over {ways} ranks", f"make it {-(-dim.size // ways) * ways}, or leave {dim.name} out"
            raise BadInput(f"layout {dim.name}:{layout[dim.name]}", got=got, needed=f"a size that {ways} divides", fix=fix)
    for where, letters in together(graph).items():
        for a, b in combinations((graph.dims[letter].name for letter in letters), 2):
            if a in layout and layout.get(b) == layout[a]:
                other = next((axis for axis in mesh if axis != layout[a]), None)
                what, got = f"layout {a}:{layout[a]}, {b}:{layout[b]}", f"two dims of {where} on {layout[a]}"
                fix = f"leave out {b}" + (f", or use {b}:{other}" if other else "")
                raise BadInput(what, got=got, needed="each dim of a tensor on an axis of its own", fix=fix)


def together(graph: Graph) -> dict[str, str]:
    """Return a dict: tensor or operator -> letters of its dims. A layout must not put two of these dims on one mesh axis."""
    return {name: graph.letters(name) for name in (*graph.inputs, *graph.parameters)} | {op.name: op.factors for op in graph.operators}


def renamed(graph: Graph) -> Graph:
    """Return the graph with two dims of MoE layers renamed: `batch` to INSIDE between dispatch and combine, and `experts` to OUTSIDE
    everywhere else."""
    roles = {op.name: {graph.dims[letter].name for letter in op.factors} for op in graph.operators}
    inside = {op.name for op in graph.operators if op.kind in ("product", "pointwise") and {"experts", "slots"} <= roles[op.name]}
    if not inside:
        return graph
    free = iter(chr(c) for c in range(ord("A"), ord("Z") + 1) if chr(c) not in graph.dims)
    dims, of_inside, of_outside = dict(graph.dims), dict[str, str](), dict[str, str]()
    for letter, dim in graph.dims.items():
        role, table = {"batch": (INSIDE, of_inside), "experts": (OUTSIDE, of_outside)}.get(dim.name, ("", of_inside))
        if role:
            table[letter] = next(free)
            dims[table[letter]] = Dim(role, dim.size)
    operators = tuple(_with(op, of_inside if op.name in inside else of_outside) for op in graph.operators)
    weights = {name for op in graph.operators if op.name in inside for name in op.inputs}
    outside = str.maketrans(of_outside)
    parameters = {name: letters if name in weights else letters.translate(outside) for name, letters in graph.parameters.items()}
    inputs = {name: letters.translate(outside) for name, letters in graph.inputs.items()}
    return Graph(dims, inputs, parameters, operators, graph.itemsize)


def _with(op: Operator, letters: Mapping[str, str]) -> Operator:
    table = str.maketrans(dict(letters))
    return replace(op, rule=op.rule.translate(table), whole=op.whole.translate(table), statistics=op.statistics.translate(table))


def program(graph: Graph, mesh: Sizes, layout: Layout) -> Program:
    """Return the program of all ranks for a layout. Raises BadInput for an illegal layout."""
    check(graph, layout, mesh)
    graph = renamed(graph)
    of = by_letter(graph, layout)
    shardings = {name: Sharding(needed(of, graph.letters(name))) for name in tensors(graph)}
    constant = indices(graph)
    return Program(graph, mesh, shardings, tuple(work_of(op, cuts(of, op), constant) for op in graph.operators))


def by_letter(graph: Graph, layout: Layout) -> Cuts:
    """Return a dict: letter of a dim -> the mesh axis that splits it, as a tuple. Dims that are not split are left out."""
    return {letter: (layout[dim.name],) for letter, dim in graph.dims.items() if dim.name in layout}


def cuts(layout: Cuts, op: Operator) -> Cuts:
    """Return a dict: letter -> axes that cut an operator's work. It is `layout` (see `by_letter`) without the dims that must stay whole."""
    return {letter: layout[letter] for letter in op.factors if letter in layout and letter not in op.whole}


class Best(NamedTuple):
    """A layout, with the seconds of a step and the bytes of a rank. tried: number of layouts examined, partial ones included."""

    layout: dict[str, str]
    seconds: float
    bytes: float
    tried: int


def best_layout(
    graph: Graph, mesh: Sizes, machine: Machine, *, objective: Objective = "seconds", of_weight: float = 16, most_bytes: float = inf
) -> Best:
    """Find the best of the legal layouts that need at most `most_bytes` on each rank. objective: what is minimized, seconds or bytes; the
    other of the two breaks ties. of_weight: bytes for each element of a weight, with its gradient and optimizer states. Raises
    BadInput if every layout needs more than `most_bytes`."""
    search = _Search(renamed(graph), mesh, machine, objective, of_weight, most_bytes)
    search.go({}, search.names)
    if search.best is None:
        least = best_layout(graph, mesh, machine, objective="bytes", of_weight=of_weight)
        needed = f"at least {least.bytes:,.0f}, the least of any layout on {dict(mesh)}"
        raise BadInput("most_bytes", got=f"{most_bytes:,.0f}", needed=needed, fix="give the mesh more ranks")
    made = program(graph, mesh, search.best)
    return Best(search.best, made.seconds(machine), made.bytes(of_weight=of_weight), search.tried)


@dataclass(frozen=True)
class _Table:
    """Costs of one term: seconds of an operator or of a tensor's resharding, or the number of a tensor's elements on a rank. names: the
    dims on which the term depends. costs: (choice of axes for these dims, cost) for all legal choices. times: number of equal terms.
    found: cached results of `least`; the key has the axis of each name (None: not chosen yet)."""

    names: tuple[str, ...]
    costs: tuple[tuple[Choice, float], ...]
    times: int = 1
    found: dict[tuple[str | None, ...], float] = field(default_factory=dict, compare=False)

    def least(self, decided: Choice) -> float:
        """Return the least cost among the choices that have the `decided` axes; infinite without such a choice."""
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
    """Branch and bound, depth first: `go` gives an axis to one dim name after another, and stores the cheapest layout in `best`."""

    def __init__(self, graph: Graph, mesh: Sizes, machine: Machine, objective: Objective, of_weight: float, most_bytes: float) -> None:
        self.graph, self.objective, self.of_weight, self.most_bytes = graph, objective, of_weight, most_bytes
        self.times, self.sizes = _times(graph, mesh, machine), _sizes(graph, mesh)
        self.axes = {name: axes for name, axes in _axes(graph, mesh).items() if axes}
        self.names = sorted(self.axes, key=lambda name: (-sum(t.spread for t in self.times if name in t.names), name))
        self.best: dict[str, str] | None = None
        self.cost: tuple[float, ...] = (inf, inf, inf)
        self.tried = 0

    def go(self, decided: Choice, left: list[str]) -> None:
        """Search all layouts with the axes `decided`. left: names of the dims that have no axis yet."""
        self.tried += 1
        seconds = sum(table.least(decided) for table in self.times)
        if seconds == inf:
            return
        held = self._bytes(decided)
        pair = (seconds, held) if self.objective == "seconds" else (held, seconds)
        # rounded, so that the order of float sums does not decide between layouts with equal costs
        cost = (*(float(f"{n:.12e}") for n in pair), sum(map(bool, decided.values())))
        if held > self.most_bytes or cost >= self.cost:
            return
        if not left:
            self.best, self.cost = {name: axis for name, axis in sorted(decided.items()) if axis}, cost
            return
        for axis in (*self.axes[left[0]], NONE):
            self.go(decided | {left[0]: axis}, left[1:])

    def _bytes(self, decided: Choice) -> float:
        """Return a lower bound of a rank's bytes over all layouts with the `decided` axes."""
        least = {id(table): table.least(decided) for table in self.sizes.values()}
        held = {name: least[id(table)] for name, table in self.sizes.items()}
        weights = sum(held.pop(name) for name in self.graph.parameters)
        return self.of_weight * weights + self.graph.itemsize * peak(self.graph, held)


def _axes(graph: Graph, mesh: Sizes) -> dict[str, list[str]]:
    """Return a dict: name of a dim -> mesh axes that may split it, because they divide the sizes of all dims with this name."""
    found: dict[str, list[str]] = {}
    for dim in graph.dims.values():
        found[dim.name] = [axis for axis in found.get(dim.name, mesh) if dim.size % mesh[axis] == 0]
    return found


def _choices(graph: Graph, mesh: Sizes, together: Iterable[str]) -> Iterator[Choice]:
    """Yield all legal choices of axes for some dims. together: strings of these dims' letters; dims in one string need different axes."""
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
    """Return the table of a term's costs. together: see `_choices`. cost: returns the term's cost, given the axes of the dims that are
    split. times: number of equal terms."""
    costs = tuple((choice, cost({name: axis for name, axis in choice.items() if axis})) for choice in _choices(graph, mesh, together))
    return _Table(tuple(costs[0][0]), costs, times)


def _times(graph: Graph, mesh: Sizes, machine: Machine) -> list[_Table]:
    """Return cost tables of a step's seconds: for the work of each distinct operator, and for the resharding of each distinct tensor."""
    readers = {name: tuple(op for op in graph.operators if name in op.inputs) for name in tensors(graph)}
    alike: dict[object, tuple[str, tuple[Operator, ...], int]] = {}
    for name, read in (*((op.name, (op,)) for op in graph.operators), *((name, read) for name, read in readers.items() if read)):
        own = read[0].name == name
        places = [tuple(i for i, n in enumerate(op.inputs) if n == name) for op in read]
        forms = frozenset((op.rule, op.flops, op.whole, op.statistics, where) for op, where in zip(read, places, strict=True))
        key = (own, graph.letters(name), name in indices(graph), forms)
        alike[key] = (name, read, alike[key][2] + 1) if key in alike else (name, read, 1)
    return [
        _table(graph, mesh, [graph.letters(name), *(op.factors for op in read)], _seconds(graph, mesh, machine, name, read), times)
        for name, read, times in alike.values()
    ]


def _seconds(graph: Graph, mesh: Sizes, machine: Machine, tensor: str, ops: tuple[Operator, ...]) -> Callable[[Choice], float]:
    """Return a function: layout -> seconds. ops: either only the operator that makes `tensor`, for the seconds of its work and the
    all-reduces of its result; or all operators that read `tensor`, for the seconds of resharding it and its gradient."""
    constant = indices(graph)

    def seconds(layout: Choice) -> float:
        of = by_letter(graph, layout)
        work = tuple(work_of(op, cuts(of, op), constant) for op in ops)
        around = {tensor, *(name for op in ops for name in (*op.inputs, op.name))}
        made = Program(graph, mesh, {name: Sharding(needed(of, graph.letters(name))) for name in around}, work)
        if ops[0].name == tensor:
            moved = [move for move in made.communication if move.why != "enter"]
            return flops(work[0], mesh) / machine.flops + sum(machine.seconds(move.step) for move in moved)
        return sum(machine.seconds(move.step) for move in made.communication if move.why == "enter" and move.tensor == tensor)

    return seconds


def _sizes(graph: Graph, mesh: Sizes) -> dict[str, _Table]:
    """Return a dict: tensor -> table. The table maps a choice of mesh axes to the number of the tensor's elements on a rank. Tensors with
    equal letters share a table."""
    found: dict[str, _Table] = {}
    for name in tensors(graph):
        letters = graph.letters(name)

        def elements(choice: Choice, name: str = name, letters: str = letters) -> float:
            return size(graph, name, Sharding(needed(by_letter(graph, choice), letters)), mesh)

        if letters not in found:
            found[letters] = _table(graph, mesh, [letters], elements)
    return {name: found[graph.letters(name)] for name in tensors(graph)}
