"""GSPMD: the user annotates the shardings of a few tensors, and operators propagate them to all other tensors.

    annotations   {"w1": "_, columns", "w2": "columns, _"}   two weights of a feed-forward network, cut as in Megatron-LM
    propagate     dims with the same letter in an operator's einsum rule get the same mesh axes, from inputs to output and back
    program       each operator's work is cut over ranks; a rank receives the data that its work needs (partition.py)

An annotation has one word for each dim: `_` allows any sharding, `.` means not sharded, `rows` or `rows+columns` means exactly these mesh
axes, and `rows?` means at least these axes. `| columns` at the end keeps the axis `columns` out of all dims. `1:` at the start is a
priority: annotations with priority 0 are propagated first. Propagation never changes the annotated axes.

Propagation runs in rounds. In each round, every operator sees the same shardings. For each letter, an operator finds the longest list of
axes that no sharding of its tensors excludes. It proposes to shard every dim with this letter over these axes. At first only element-wise
operators propose, then all operators. An axis that already shards another letter of the operator is proposed only in the last rounds. If
proposals for a tensor exclude each other, the one that needs fewer bytes of communication is kept, and the conflict is recorded. The result
therefore does not depend on the order of operators. Propagation ends, because each round except the last extends the sharding of a dim.

Sources: GSPMD (arXiv 2105.04663), section 3.5; the priorities of Shardy's propagation (openxla/shardy).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations, product
from typing import NamedTuple

from parallel.annotations.graph import Graph, Operator
from parallel.annotations.partition import Conflict, Cuts, Program, indices, shape, tensors, work_of
from parallel.annotations.resharding import Axes, Sharding, Sizes, check_axes, num_parts, reshard, sent
from parallel.errors import BadInput, counted, did_you_mean

ByLetter = Mapping[str, Axes]  # sharding of one tensor: letter of a dim in an operator's rule -> mesh axes that shard this dim


class Annotation(NamedTuple):
    """A parsed annotation. dims: mesh axes of each dim. open: for each dim, True if propagation may add axes. never: excluded axes."""

    dims: tuple[Axes, ...]
    open: tuple[bool, ...]
    never: frozenset[str] = frozenset()
    priority: int = 0


@dataclass(frozen=True)
class Propagated:
    """Result of the propagation: the sharding of every tensor, and the conflicts between proposals."""

    mesh: Sizes
    shardings: Mapping[str, Sharding]
    conflicts: tuple[Conflict, ...]


def annotation(text: str, *, tensor: str, shape: tuple[int, ...], mesh: Sizes) -> Annotation:
    """Parse an annotation. Raises BadInput for unknown or repeated axes, a wrong number of dims, and axes that do not divide a dim. tensor:
    name of the tensor, for messages. shape: sizes of its dims."""
    head, colon, rest = text.partition(":")
    if colon and not head.strip().isdecimal():
        fix = f'write "0:{rest}", or remove the priority and its colon'
        raise BadInput(f"annotation of {tensor}", got=f"a priority {head!r}", needed="a whole number from 0 (applied first)", fix=fix)
    words, _, never = (rest if colon else text).partition("|")
    dims = [word.strip() for word in words.split(",")] if words.strip() else []
    if len(dims) != len(shape):
        needed, fix = f"one word for each of {counted(len(shape), 'dim')}", f'begin with "{", ".join("_" for _ in shape)}"'
        raise BadInput(f"annotation of {tensor}", got=counted(len(dims), "word"), needed=needed, fix=fix)
    axes = tuple(() if word in ("_", ".") else tuple(word.rstrip("?").split("+")) for word in dims)
    open_ = tuple(word == "_" or word.endswith("?") for word in dims)
    found = Annotation(axes, open_, frozenset(never.replace("+", " ").split()), int(head) if colon else 0)
    _check(found, tensor, shape, mesh)
    return found


def _check(found: Annotation, tensor: str, shape: tuple[int, ...], mesh: Sizes) -> None:
    what, used = f"annotation of {tensor}", [axis for axes in found.dims for axis in axes]
    check_axes((*used, *found.never), mesh, what=what)
    for axis in (*used, *found.never):
        if used.count(axis) + (axis in found.never) > 1:
            needed = "each mesh axis at most once in a tensor, because it can cut only one dim"
            raise BadInput(what, got=f"{axis} more than once", needed=needed, fix=f"keep {axis} at one place only")
    for dim, (size, axes) in enumerate(zip(shape, found.dims, strict=True)):
        if size % (ranks := num_parts(axes, mesh)):
            got = f"{'+'.join(axes)} ({counted(ranks, 'rank')}) on dim {dim} of size {size}"
            needed, fix = f"a size that {ranks} divides", f"set the size to {-(-size // ranks) * ranks}, or write _ there"
            raise BadInput(what, got=got, needed=needed, fix=fix)


def propagate(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Propagated:
    """Propagate annotations to all tensors. annotations: tensor -> text. Raises BadInput for unknown tensors and wrong annotations."""
    names = tensors(graph)
    for name in annotations:
        if name not in names:
            near = did_you_mean(name, names) or names[0]
            raise BadInput("annotations", got=f"a tensor {name!r}", needed="a tensor of the graph", fix=f"annotate {near}")
    texts = {name: annotations.get(name, ", ".join("_" * len(graph.letters(name)))) for name in names}
    parsed = {name: annotation(text, tensor=name, shape=shape(graph, name), mesh=mesh) for name, text in texts.items()}
    state = _State(graph, mesh, {name: one.dims for name, one in parsed.items()}, parsed, [])
    plain = [op for op in graph.operators if not op.summed and not op.whole]
    for priority in sorted({one.priority for one in parsed.values()} | {0}):
        for chosen, contended in ((plain, False), (graph.operators, False), (graph.operators, True)):
            changed = set(names)
            while changed:  # operators whose tensors have not changed are skipped: they would repeat their proposals
                changed = state.round([op for op in chosen if changed.intersection((*op.inputs, op.name))], priority, contended=contended)
    return Propagated(mesh, {name: Sharding(dims) for name, dims in state.dims.items()}, tuple(state.conflicts))


class Proposal(NamedTuple):
    """An operator's proposal to shard dim `dim` of a tensor over the mesh axes `axes`."""

    operator: str
    dim: int
    axes: Axes


@dataclass
class _State:
    """State of the propagation. dims: tensor -> mesh axes of each dim. annotations: tensor -> its annotation, which is `_` for each dim if
    the user gave none."""

    graph: Graph
    mesh: Sizes
    dims: dict[str, tuple[Axes, ...]]
    annotations: Mapping[str, Annotation]
    conflicts: list[Conflict]

    def round(self, operators: Iterable[Operator], priority: int, *, contended: bool) -> set[str]:
        """Let every operator propose from the shardings at the start of the round, then apply all proposals. Returns the names of the
        changed tensors. priority: annotations with a larger number are not read yet. contended: whether an axis that already shards another
        letter of the operator may be proposed."""
        proposed: dict[str, set[Proposal]] = {}
        for op in operators:
            for tensor, proposal in self._proposals(op, priority, contended=contended):
                proposed.setdefault(tensor, set()).add(proposal)
        self.dims |= {tensor: self._kept(tensor, proposed[tensor]) for tensor in sorted(proposed)}
        return set(proposed)

    def _proposals(self, op: Operator, priority: int, *, contended: bool) -> Iterator[tuple[str, Proposal]]:
        """Yield (tensor, proposal) for all proposals of an operator. priority, contended: as in `round`."""
        read = [(name, letters) for name, letters in _terms(op) if self.annotations[name].priority <= priority]
        shardings = [dict(zip(letters, self.dims[name], strict=True)) for name, letters in read]
        agreed: ByLetter = {a: agreement([one[a] for one in shardings if a in one]) for a in op.factors if a not in op.whole}
        if not contended:
            agreed = _uncontended(agreed, shardings)
        for name, letters in read:
            for dim, letter in enumerate(letters):
                if (more := self._allowed(name, dim, agreed.get(letter, ()))) is not None:
                    yield name, Proposal(op.name, dim, more)

    def _allowed(self, tensor: str, dim: int, wanted: Axes) -> Axes | None:
        """Return the longest prefix of `wanted` over which this dim may be sharded; None if this adds no axis to the dim."""
        held, given = self.dims[tensor], self.annotations[tensor]
        taken = {axis for d, axes in enumerate(held) if d != dim for axis in axes} | given.never
        axes = next((wanted[:n] for n, axis in enumerate(wanted) if axis in taken), wanted)
        fits = given.open[dim] and len(axes) > len(held[dim]) and axes[: len(held[dim])] == held[dim]
        return axes if fits else None

    def _kept(self, tensor: str, proposals: Collection[Proposal]) -> tuple[Axes, ...]:
        """Return the axes of each dim after a maximal set of compatible proposals is applied. Of several such sets, take the one with the
        fewest sent bytes."""
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
        """Return the bytes that a rank sends if every proposing operator reshards the tensor from `dims` to its own proposal and back."""
        held, moved = Sharding(dims), 0.0
        for operator in sorted({p.operator for p in proposals}):
            asked = [*self.dims[tensor]]
            for p in sorted(p for p in proposals if p.operator == operator):
                asked[p.dim] = p.axes
            if _each_once(asked):  # an operator that proposes one axis for two dims is not counted
                for pair in ((held, Sharding(tuple(asked))), (Sharding(tuple(asked)), held)):
                    moved += sent(reshard(*pair, shape(self.graph, tensor), self.mesh, itemsize=self.graph.itemsize))
        return moved


def agreement(found: Sequence[Axes]) -> Axes:
    """Return the longest list of axes that agrees with each list in `found`. Two lists agree if one of them begins with the other."""
    longest = max(found, key=len, default=())
    prefixes = (longest[:n] for n in range(len(longest), 0, -1))
    return next((prefix for prefix in prefixes if all(prefix[: len(axes)] == axes[: len(prefix)] for axes in found)), ())


def _terms(op: Operator) -> Iterator[tuple[str, str]]:
    """Yield (name, letters of its dims) of each input of an operator and of its output."""
    return zip((*op.inputs, op.name), (*op.terms, op.output), strict=True)


def _uncontended(agreed: ByLetter, shardings: Sequence[ByLetter]) -> ByLetter:
    """Return `agreed` without contended axes. A letter names a dim; `agreed` maps each letter to the mesh axes that are to shard this dim.
    Each list of axes is cut before its first axis that shards a dim with another letter in any of `shardings`."""
    letters = _letters_of_axes(shardings)
    return {a: next((axes[:n] for n, axis in enumerate(axes) if letters.get(axis, set()) - {a}), axes) for a, axes in agreed.items()}


def _letters_of_axes(shardings: Iterable[ByLetter]) -> dict[str, set[str]]:
    """Return a dict: mesh axis -> letters of the dims that it shards in any of these tensors."""
    found: dict[str, set[str]] = {}
    for one in shardings:
        for letter, axes in one.items():
            for axis in axes:
                found.setdefault(axis, set()).add(letter)
    return found


def _each_once(dims: Sequence[Axes]) -> bool:
    used = [axis for axes in dims for axis in axes]
    return len(used) == len(set(used))


def _extends(more: tuple[Axes, ...], dims: tuple[Axes, ...]) -> bool:
    return more != dims and all(a[: len(b)] == b for a, b in zip(more, dims, strict=True))


def program(graph: Graph, mesh: Sizes, annotations: Mapping[str, str]) -> Program:
    """Propagate annotations, then choose how each operator's work is cut. Raises BadInput for unknown tensors and wrong annotations.

    Every axis that cuts one of the operator's tensors also cuts its work along a dim, if possible. Of several choices, the one that sends
    the fewest bytes is taken, and the next best is recorded as a conflict.
    """
    found = propagate(graph, mesh, annotations)
    conflicts, work, constant = [*found.conflicts], [], indices(graph)
    for op in graph.operators:
        letters = _letters_of_axes(dict(zip(term, found.shardings[name].dims, strict=True)) for name, term in _terms(op))
        ranked = sorted(
            (len(letters) - sum(map(len, cuts.values())), Program(graph, mesh, found.shardings, (made,)).sent, _text(cuts), made)
            for cuts in _possible(graph, mesh, {axis: sorted(some - set(op.whole)) for axis, some in sorted(letters.items())})
            for made in [work_of(op, cuts, constant)]
        )
        work.append(ranked[0][3])
        if len(ranked) > 1 and ranked[1][0] == ranked[0][0]:
            conflicts.append(Conflict(op.name, ranked[0][2], ranked[1][2], ranked[0][1], ranked[1][1]))
    return Program(graph, mesh, found.shardings, tuple(work), tuple(conflicts))


def _possible(graph: Graph, mesh: Sizes, letters_of: Mapping[str, Sequence[str]]) -> Iterator[Cuts]:
    """Yield all cuts of an operator's work: each mesh axis cuts one of its letters or none. letters_of: mesh axis -> letters that it may
    cut. If several axes cut one letter, all their orders are yielded."""
    seen: set[str] = set()
    for chosen in product(*[(*letters, "") for letters in letters_of.values()]):
        of = {a: tuple(axis for axis, letter in zip(letters_of, chosen, strict=True) if letter == a) for a in set(chosen) - {""}}
        if any(graph.dims[a].size % num_parts(axes, mesh) for a, axes in of.items()):
            continue
        for orders in product(*[permutations(of[a]) for a in sorted(of)]):
            cuts = dict(zip(sorted(of), orders, strict=True))
            if _text(cuts) not in seen:
                seen.add(_text(cuts))
                yield cuts


def _text(cuts: Cuts) -> str:
    return " ".join(f"{letter}:{'+'.join(axes)}" for letter, axes in sorted(cuts.items())) or "nothing cut"
