"""GSPMD: the user annotates the shardings of a few tensors, and operators propagate them to all other tensors.

    annotations   {"w1": "_, columns", "w2": "columns, _"}   for two weights of a feed-forward network: gives Megatron-LM's f and g
    propagate     an operator's factors (the letters of its einsum rule) carry mesh axes from tensor to tensor, forward and backward
    program       each operator's work is cut; data that a rank's part of the work lacks is communicated (partition.py)

An annotation has one word for each dim: `_` any sharding, `.` whole, `rows` or `rows+columns` exactly these axes, `rows?` these axes and
perhaps more. `| columns` at the end excludes axes; `1:` at the start is a priority (0 goes first). Propagation never changes the
annotated axes.

Propagation runs in rounds. In each round, every operator proposes, from the same state, to extend its tensors' dims by the longest prefix
of a factor's axes on which all its tensors agree. First only element-wise operators propose, then all; first without, then with axes
that two factors of an operator both want. If proposals for a tensor exclude each other, the one that moves fewer bytes is kept, and the
conflict is recorded. So the result does not depend on the order of operators. It ends, because each round but the last extends a dim.

Sources: GSPMD (arXiv 2105.04663), section 3.5; the priorities of Shardy's propagation (openxla/shardy).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal, NamedTuple

from parallel.annotations.graph import Graph, Operator
from parallel.annotations.partition import Conflict, Cuts, Program, Work, indices, shape, tensors, work_of
from parallel.annotations.resharding import Axes, Sharding, Sizes, check_axes, num_parts, reshard, sent
from parallel.errors import BadInput, did_you_mean


class Annotation(NamedTuple):
    """A parsed annotation. dims: axes of each dim. open: for each dim, True if propagation may add axes. never: axes that are excluded."""

    dims: tuple[Axes, ...]
    open: tuple[bool, ...]
    never: frozenset[str] = frozenset()
    priority: int = 0


@dataclass(frozen=True)
class Propagated:
    """Sharding of every tensor, and the conflicts between proposals."""

    mesh: Sizes
    shardings: Mapping[str, Sharding]
    conflicts: tuple[Conflict, ...]


Strength = Literal["agreed", "contended"]


def annotation(text: str, *, tensor: str, shape: tuple[int, ...], mesh: Sizes) -> Annotation:
    """Parse an annotation. Raises BadInput for unknown or repeated axes, a wrong number of dims, and axes that do not divide a dim."""
    head, colon, rest = text.partition(":")
    if colon and not head.strip().isdecimal():
        fix = f'write "0:{rest}", or leave it out with its colon'
        raise BadInput(f"annotation of {tensor}", got=f"a priority {head!r}", needed="a whole number from 0, 0 going first", fix=fix)
    words, _, never = (rest if colon else text).partition("|")
    dims = [word.strip() for word in words.split(",")] if words.strip() else []
    if len(dims) != len(shape):
        fix = ", ".join("_" for _ in shape)
        raise BadInput(
            f"annotation of {tensor}", got=f"{len(dims)} dims", needed=f"one word for each of {len(shape)}", fix=f'begin with "{fix}"'
        )
    axes = tuple(() if word in ("_", ".") else tuple(word.rstrip("?").split("+")) for word in dims)
    found = Annotation(
        axes,
        tuple(word == "_" or word.endswith("?") for word in dims),
        frozenset(never.replace("+", " ").split()),
        int(head) if colon else 0,
    )
    _check(found, tensor, shape, mesh)
    return found


def _check(found: Annotation, tensor: str, shape: tuple[int, ...], mesh: Sizes) -> None:
    what, used = f"annotation of {tensor}", [axis for axes in found.dims for axis in axes]
    check_axes((*used, *found.never), mesh, what=what)
    for axis in (*used, *found.never):
        if used.count(axis) + (axis in found.never) > 1:
            raise BadInput(
                what, got=f"{axis} more than once", needed="each axis once in a tensor: it cuts one dim", fix=f"leave {axis} at one place"
            )
    for dim, (size, axes) in enumerate(zip(shape, found.dims, strict=True)):
        if size % num_parts(axes, mesh):
            raise BadInput(
                what,
                got=f"{'+'.join(axes)} ({num_parts(axes, mesh)} ranks) on dim {dim} of size {size}",
                needed="equal parts",
                fix=f"set the size to {-(-size // num_parts(axes, mesh)) * num_parts(axes, mesh)}, or write _ there",
            )


def propagate(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Propagated:
    """Propagate annotations to all tensors. annotations: tensor -> text. Raises BadInput for unknown tensors and wrong annotations."""
    there = tensors(graph)
    for name in annotations:
        if name not in there:
            near = did_you_mean(name, there) or there[0]
            raise BadInput("annotations", got=f"a tensor {name!r}", needed="a tensor of the graph", fix=f"annotate {near}")
    said = {name: annotation(text, tensor=name, shape=shape(graph, name), mesh=mesh) for name, text in annotations.items()}
    state = _State.of(graph, mesh, said)
    plain = [op for op in graph.operators if not op.summed and not op.whole]
    levels: tuple[tuple[Sequence[Operator], Strength], ...] = (
        (plain, "agreed"),
        (graph.operators, "agreed"),
        (graph.operators, "contended"),
    )
    for priority in sorted({a.priority for a in said.values()} | {0}):
        for chosen, strength in levels:
            changed = set(there)
            while changed:  # operators without a changed tensor are left out: they would repeat their proposals
                changed = state.round([op for op in chosen if changed.intersection((*op.inputs, op.name))], strength, priority)
    return Propagated(mesh, {name: Sharding(dims) for name, dims in state.dims.items()}, tuple(state.conflicts))


class Proposal(NamedTuple):
    """Proposal of an operator to shard this dim of a tensor over these axes."""

    operator: str
    dim: int
    axes: Axes


@dataclass
class _State:
    """State of the propagation. dims: tensor -> current axes of each dim. said: tensor -> its annotation (if it has none, an open one)."""

    graph: Graph
    mesh: Sizes
    dims: dict[str, tuple[Axes, ...]]
    said: Mapping[str, Annotation]
    conflicts: list[Conflict]

    @staticmethod
    def of(graph: Graph, mesh: Sizes, said: Mapping[str, Annotation]) -> _State:
        free = {name: len(graph.letters(name)) for name in tensors(graph)}
        known = {name: said.get(name, Annotation(((),) * rank, (True,) * rank)) for name, rank in free.items()}
        return _State(graph, mesh, {name: a.dims for name, a in known.items()}, known, [])

    def round(self, operators: Iterable[Operator], strength: Strength, priority: int) -> set[str]:
        """Run one round: collect all proposals from the same state, then apply them. Returns the tensors that have changed."""
        proposed: dict[str, set[Proposal]] = {}
        for op in operators:
            for tensor, proposal in self._proposals(op, strength, priority):
                proposed.setdefault(tensor, set()).add(proposal)
        self.dims |= {tensor: self._kept(tensor, proposed[tensor]) for tensor in sorted(proposed)}
        return set(proposed)

    def _proposals(self, op: Operator, strength: Strength, priority: int) -> Iterator[tuple[str, Proposal]]:
        heard = [
            (name, letters, dict(zip(letters, self.dims[name], strict=True)))
            for name, letters in zip((*op.inputs, op.name), (*op.terms, op.output), strict=True)
            if self.said[name].priority <= priority
        ]
        agreed = {f: agreement([of[f] for _, _, of in heard if f in of]) for f in op.factors if f not in op.whole}
        if strength == "agreed":
            agreed = _uncontended(agreed, [of for _, _, of in heard])
        for name, letters, _ in heard:
            for dim, letter in enumerate(letters):
                if (more := self._allowed(name, dim, agreed.get(letter, ()))) is not None:
                    yield name, Proposal(op.name, dim, more)

    def _allowed(self, tensor: str, dim: int, wanted: Axes) -> Axes | None:
        """Longest prefix of the wanted axes with which this dim may be sharded; None if it adds no axis to the current ones."""
        held, said = self.dims[tensor], self.said[tensor]
        taken = {axis for d, axes in enumerate(held) if d != dim for axis in axes} | said.never
        axes = next((wanted[:n] for n, axis in enumerate(wanted) if axis in taken), wanted)
        fits = said.open[dim] and len(axes) > len(held[dim]) and axes[: len(held[dim])] == held[dim]
        return axes if fits else None

    def _kept(self, tensor: str, proposals: Collection[Proposal]) -> tuple[Axes, ...]:
        """Axes of each dim after a maximal set of compatible proposals; of several such sets, the one that moves the fewest bytes."""
        held = self.dims[tensor]
        options = [sorted({held[d], *(p.axes for p in proposals if p.dim == d)}) for d in range(len(held))]
        together = [dims for dims in product(*options) if _each_once(dims)]
        largest = [dims for dims in together if not any(_extends(more, dims) for more in together)]
        if len(largest) == 1:
            return largest[0]
        ranked = sorted((self._moved(tensor, dims, proposals), str(Sharding(dims)), dims) for dims in largest)
        (kept_bytes, kept, dims), (instead_bytes, instead, _) = ranked[:2]
        self.conflicts.append(Conflict(tensor, kept, instead, kept_bytes, instead_bytes))
        return dims

    def _moved(self, tensor: str, dims: tuple[Axes, ...], proposals: Collection[Proposal]) -> float:
        """Bytes that a rank sends if `dims` shard the tensor and each proposing operator reshards it to its own proposal and back."""
        held, moved = Sharding(dims), 0.0
        for operator in sorted({p.operator for p in proposals}):
            asked = [*self.dims[tensor]]
            for p in sorted(p for p in proposals if p.operator == operator):
                asked[p.dim] = p.axes
            if _each_once(asked):  # an operator whose proposals contradict each other is left out
                moved += self._between(tensor, held, Sharding(tuple(asked))) + self._between(tensor, Sharding(tuple(asked)), held)
        return moved

    def _between(self, tensor: str, held: Sharding, wanted: Sharding) -> float:
        return sent(reshard(held, wanted, shape(self.graph, tensor), self.mesh, itemsize=self.graph.itemsize))


def agreement(found: Sequence[Axes]) -> Axes:
    """Longest list of axes that is compatible with all lists in `found`: each of them begins with it, or is a prefix of it."""
    longest = max(found, key=len, default=())
    return next((longest[:n] for n in range(len(longest), 0, -1) if all(_same_start(longest[:n], axes) for axes in found)), ())


def _same_start(a: Axes, b: Axes) -> bool:
    short = min(len(a), len(b))
    return a[:short] == b[:short]


def _uncontended(agreed: Mapping[str, Axes], heard: Sequence[Mapping[str, Axes]]) -> dict[str, Axes]:
    """Return letter of a dim -> its mesh axes in `agreed`, cut before the first axis that shards a dim with another letter in some tensor.

    agreed: letter -> axes on which the operator's tensors agree. heard: for each tensor of the operator, letter -> its axes.
    """
    asked = _askers(heard)
    return {f: next((axes[:n] for n, axis in enumerate(axes) if asked.get(axis, set()) - {f}), axes) for f, axes in agreed.items()}


def _askers(heard: Iterable[Mapping[str, Axes]]) -> dict[str, set[str]]:
    """Return axis -> letters of the dims that it shards in some tensor of an operator. heard: for each tensor, letter -> axes."""
    found: dict[str, set[str]] = {}
    for of in heard:
        for factor, axes in of.items():
            for axis in axes:
                found.setdefault(axis, set()).add(factor)
    return found


def _each_once(dims: Sequence[Axes]) -> bool:
    used = [axis for axes in dims for axis in axes]
    return len(used) == len(set(used))


def _extends(more: tuple[Axes, ...], dims: tuple[Axes, ...]) -> bool:
    return more != dims and all(a[: len(b)] == b for a, b in zip(more, dims, strict=True))


# --- how each operator's work is cut over axes ----------------------------------------------------------------------


def program(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Program:
    """Propagate annotations, then choose how each operator's work is cut. Raises BadInput as `propagate` does.

    Every axis that cuts one of the operator's tensors also cuts the work along one of its factors, if possible. Of several choices, the one
    that moves the fewest bytes is taken, and the next best is recorded as a conflict.
    """
    found = propagate(graph, mesh, annotations)
    conflicts, work, constant = [*found.conflicts], [], indices(graph)
    for op in graph.operators:
        ranked = sorted(
            (len(_unused(op, cuts, found)), _moved(graph, mesh, made, found.shardings), _text(cuts), made)
            for cuts in _possible(graph, op, found)
            for made in [work_of(op, cuts, constant)]
        )
        work.append(ranked[0][3])
        if len(ranked) > 1 and ranked[1][0] == ranked[0][0]:
            conflicts.append(Conflict(op.name, ranked[0][2], ranked[1][2], ranked[0][1], ranked[1][1]))
    return Program(graph, mesh, found.shardings, tuple(work), tuple(conflicts))


def _heard(op: Operator, found: Propagated) -> list[dict[str, Axes]]:
    named = zip((*op.inputs, op.name), (*op.terms, op.output), strict=True)
    return [dict(zip(letters, found.shardings[name].dims, strict=True)) for name, letters in named]


def _possible(graph: Graph, op: Operator, found: Propagated) -> Iterator[Cuts]:
    """Yield all cuts of an operator's work. Each mesh axis cuts one of the dims that it shards, or none; axes of one dim in every order."""
    asked = {axis: sorted(factors - set(op.whole)) for axis, factors in sorted(_askers(_heard(op, found)).items())}
    seen: set[str] = set()
    for chosen in product(*[(*factors, "") for factors in asked.values()]):
        of = {f: tuple(axis for axis, factor in zip(asked, chosen, strict=True) if factor == f) for f in set(chosen) - {""}}
        if any(graph.dims[f].size % num_parts(axes, found.mesh) for f, axes in of.items()):
            continue
        for orders in product(*[permutations(of[f]) for f in sorted(of)]):
            cuts = dict(zip(sorted(of), orders, strict=True))
            if _text(cuts) not in seen:
                seen.add(_text(cuts))
                yield cuts


def _unused(op: Operator, cuts: Cuts, found: Propagated) -> set[str]:
    """Axes that cut tensors of the operator but not its work. Ranks along these axes do the same work."""
    return set(_askers(_heard(op, found))) - {axis for axes in cuts.values() for axis in axes}


def _moved(graph: Graph, mesh: Sizes, work: Work, shardings: Mapping[str, Sharding]) -> float:
    """Bytes that a rank sends for the operator, forward and backward."""
    return Program(graph, mesh, shardings, (work,)).sent


def _text(cuts: Cuts) -> str:
    return " ".join(f"{letter}:{'+'.join(axes)}" for letter, axes in sorted(cuts.items())) or "nothing cut"
