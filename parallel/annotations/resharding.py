"""Sharding of a tensor over a mesh, and the cheapest collectives that change one sharding into another (Dijkstra's algorithm).

    Sharding((("rows",), ()))            dim 0 is sharded over the mesh axis `rows`, dim 1 is whole
    Sharding(((), ()), ("columns",))     both dims are whole, and each rank along `columns` has a partial sum

    step             effect for one mesh axis                         bytes that a rank sends; n ranks, S bytes held before the step
    slice            shards a dim over the axis                       0
    all_gather       makes a dim whole                                (n - 1) S
    all_to_all       shards another dim over the axis                 (n - 1) / n S
    reduce_scatter   adds partial sums, shards a dim over the axis    (n - 1) / n S
    all_reduce       adds partial sums                                2 (n - 1) / n S

Of several axes that shard a dim, only the last (minor) one can be added or removed, because the shards of the other axes are not
contiguous. Sources: GSPMD (arXiv 2105.04663), sections 3.5 and 4.5; bytes are counted for ring collectives (Thakur et al. 2005).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from math import prod
from typing import Literal

from parallel.errors import BadInput, did_you_mean

Axes = tuple[str, ...]
Sizes = Mapping[str, int]  # axis of a mesh -> size, in order: the last axis varies fastest from rank to rank
Kind = Literal["slice", "all_gather", "all_to_all", "reduce_scatter", "all_reduce"]
# number of times that a rank sends n - 1 shards in a step (table above)
_TIMES_SENT = {"slice": 0, "all_gather": 1, "all_to_all": 1, "reduce_scatter": 1, "all_reduce": 2}


@dataclass(frozen=True)
class Sharding:
    """Sharding of a tensor. dims: for each dim the mesh axes that shard it, major first. partial: axes whose ranks have partial sums."""

    dims: tuple[Axes, ...]
    partial: Axes = ()

    @property
    def axes(self) -> frozenset[str]:
        """Return all mesh axes that shard a dim or are partial."""
        return frozenset(axis for axes in self.dims for axis in axes) | frozenset(self.partial)

    def local(self, shape: tuple[int, ...], mesh: Sizes) -> tuple[int, ...]:
        """Return the shape of a rank's shard. shape: of the whole tensor."""
        return tuple(size // num_parts(axes, mesh) for size, axes in zip(shape, self.dims, strict=True))

    def __str__(self) -> str:
        cut = ", ".join("+".join(axes) or "_" for axes in self.dims)
        return f"[{cut}]" + (f" partial sums over {'+'.join(self.partial)}" if self.partial else "")


@dataclass(frozen=True)
class Step:
    """One collective or slice over one mesh axis. sent: bytes that a rank sends.
    source: dim that is sharded over the axis before the step and not after; None if there is none, as for an all_reduce. target: dim that
    is sharded over it after the step and not before; None if there is none."""

    kind: Kind
    axis: str
    source: int | None
    target: int | None
    sent: float

    def __str__(self) -> str:
        places = [f"dim {self.source}" if self.source is not None else "", f"to dim {self.target}" if self.target is not None else ""]
        return " ".join([self.kind, "over", self.axis, *(p for p in places if p)])


def num_parts(axes: Axes, mesh: Sizes) -> int:
    """Return the number of shards of a dim that is sharded over these axes."""
    return prod(mesh[axis] for axis in axes)


def check_axes(axes: Iterable[str], mesh: Sizes, *, what: str) -> None:
    """Raise BadInput if the mesh lacks one of the axes, or if a size in the mesh is not a positive integer. what: name of the input that
    has the axes, for the message."""
    for axis, size in mesh.items():
        if not isinstance(size, int) or size < 1:
            raise BadInput(f"mesh axis {axis}", got=size, needed="a whole number of ranks from 1", fix=f"set {axis} to 1, or leave it out")
    for axis in axes:
        if axis not in mesh:
            near = did_you_mean(axis, mesh) or next(iter(mesh), None)
            there = f"an axis of the mesh: {', '.join(mesh)}" if mesh else "no axis: the mesh has none"
            fix = f"use {near}" if near else f"leave {axis} out, or add it to the mesh"
            raise BadInput(what, got=f"axis {axis!r}", needed=there, fix=fix)


def sent_by(kind: Kind, ranks: int, held: float) -> float:
    """Return the bytes that a rank sends in a resharding step `kind` over an axis of `ranks` ranks. held: bytes of the rank's tensor before
    this step."""
    return held * (ranks - 1) * _TIMES_SENT[kind] / (1 if kind == "all_gather" else ranks)


def reshard(held: Sharding, wanted: Sharding, shape: tuple[int, ...], mesh: Sizes, *, itemsize: int = 4) -> tuple[Step, ...]:
    """Return the steps from the sharding `held` to `wanted` that send the fewest bytes; of equal solutions, the one with the fewest steps.
    An axis that is partial in `wanted` must be partial in `held` too, because no step makes partial sums. itemsize: bytes of an element."""
    assert set(wanted.partial) <= set(held.partial), f"{wanted} is partial over axes over which {held} is not"
    return _cheapest(held, wanted, shape, tuple(mesh.items()), itemsize)


def sent(steps: tuple[Step, ...]) -> float:
    """Return the bytes that a rank sends in all of these steps."""
    return sum(step.sent for step in steps)


@lru_cache(maxsize=65536)
def _cheapest(
    held: Sharding, wanted: Sharding, shape: tuple[int, ...], mesh: tuple[tuple[str, int], ...], itemsize: int
) -> tuple[Step, ...]:
    if held == wanted:
        return ()
    sizes, numbers = dict(mesh), count()
    ahead: list[tuple[float, int, int, Sharding, tuple[Step, ...]]] = [(0.0, 0, next(numbers), held, ())]
    done: set[Sharding] = set()
    usable = wanted.axes | held.axes
    while ahead:
        cost, length, _, now, steps = heapq.heappop(ahead)
        if now == wanted:
            return steps
        if now in done:
            continue
        done.add(now)
        for step, after in _moves(now, shape, sizes, usable, itemsize):
            if after not in done:
                heapq.heappush(ahead, (cost + step.sent, length + 1, next(numbers), after, (*steps, step)))
    raise AssertionError(f"no steps from {held} to {wanted}")


def _moves(now: Sharding, shape: tuple[int, ...], mesh: Sizes, usable: frozenset[str], itemsize: int) -> Iterator[tuple[Step, Sharding]]:
    """Yield (step, sharding after it) for each possible step from the sharding `now`. usable: axes that a step of kind "slice"
    may use."""
    bytes_held = prod(now.local(shape, mesh)) * itemsize

    def step(kind: Kind, axis: str, source: int | None, target: int | None) -> tuple[Step, Sharding]:
        dims = [*now.dims]
        if source is not None:
            dims[source] = dims[source][:-1]
        if target is not None:
            dims[target] = (*dims[target], axis)
        after = Sharding(tuple(dims), tuple(a for a in now.partial if a != axis))
        return Step(kind, axis, source, target, sent_by(kind, mesh[axis], bytes_held)), after

    def room(axis: str) -> list[int]:
        return [d for d, axes in enumerate(now.dims) if shape[d] % (num_parts(axes, mesh) * mesh[axis]) == 0]

    for axis in now.partial:
        yield step("all_reduce", axis, None, None)
        yield from (step("reduce_scatter", axis, None, d) for d in room(axis))
    for axis in sorted(usable - now.axes):
        yield from (step("slice", axis, None, d) for d in room(axis))
    for source, axes in enumerate(now.dims):
        if axes:
            yield step("all_gather", axes[-1], source, None)
            yield from (step("all_to_all", axes[-1], source, d) for d in room(axes[-1]) if d != source)
