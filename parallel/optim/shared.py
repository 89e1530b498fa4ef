"""Work on whole matrices, shared out among the ranks that would all do the same: each matrix is one rank's, and the others get its result.

    copies    every rank has the matrix       its rank works    --all-gather-->  all have the result
    a cut     parts  --all-to-all-->  the matrix, on its rank   --all-to-all-->  each has its part of the result

A matrix that is cut over several axes (by FSDP and tensor parallelism, say) is put together axis by axis, and its result goes back the
same way. Whose a matrix is follows from shapes alone, so no rank has to be told: the longest first, each to the rank with the least so
far. Matrices travel many at a time, in rounds; a round's results are gathered while the next round is computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.data.whole import Whole
from parallel.mesh.collectives import all_to_all, start_gather
from parallel.mesh.mesh import Axis

# K matrices of one parameter, R rows, C columns

_ROUND_ELEMENTS = 32 * 2**20  # of all ranks together: 128 MiB of fp32
Work = Callable[[int, Tensor], Tensor]  # (number of a parameter, whole matrices [K, R, C]) -> as many of that shape
Cost = Callable[[tuple[int, int]], float]  # of the work on one matrix of this shape
Arrive = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Stack:
    """What this rank holds of a parameter's matrices: K of them, `shape` [R, C]. Results have `dtype`; `number` is the parameter's."""

    number: int
    count: int
    shape: tuple[int, int]
    dtype: torch.dtype
    whole: Whole

    @property
    def matrix(self) -> tuple[int, int]:
        """The shape of a whole one."""
        sizes = {-2: self.shape[0], -1: self.shape[1]} | {cut.dim: cut.size for cut in self.whole.cuts}
        return sizes[-2], sizes[-1]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The ranks that share out the matrices: those with copies, then those with parts."""
        return *((self.whole.copies,) if self.whole.copies else ()), *(cut.axis for cut in self.whole.cuts)


def shared(stacks: Iterable[Stack], part: Callable[[int], Tensor], work: Work, *, cost: Cost) -> Iterator[tuple[int, Tensor]]:
    """(number, this rank's part [K, R, C] of the results) of each stack, in some order. Collective: all ranks have the same stacks.

    `part(number)`: what this rank holds of the matrices [K, R, C], in the dtype that `work` takes; asked once.
    """
    alike: dict[tuple[object, ...], list[Stack]] = {}  # shared out among the same ranks
    for stack in stacks:
        key = stack.dtype, stack.whole.copies is None, *((axis.name, axis.ranks) for axis in stack.axes)
        alike.setdefault(key, []).append(stack)
    for held in alike.values():
        yield from _in_rounds(sorted(held, key=lambda stack: -cost(stack.matrix)), part, work, cost)


def assigned(costs: Sequence[float], ranks: int) -> list[int]:
    """Whose each piece of work is: in this order, longest first, to the rank with the least so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = []
    for cost in costs:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost, rank))
        owners.append(rank)
    return owners


@dataclass(frozen=True)
class _Held:
    """Matrices on their way to who works on them: `places`, of each of the K, on the axes that it has still to cross."""

    stack: Stack
    tensor: Tensor
    places: list[tuple[int, ...]]

    def of(self, place: int) -> list[int]:
        """Which of them are of that place on the next axis."""
        return [k for k, places in enumerate(self.places) if places[0] == place]

    def there(self, place: int, tensor: Tensor) -> _Held:
        """Those, in this form, behind that axis."""
        return replace(self, tensor=tensor, places=[self.places[k][1:] for k in self.of(place)])


def _in_rounds(stacks: list[Stack], part: Callable[[int], Tensor], work: Work, cost: Cost) -> Iterator[tuple[int, Tensor]]:
    sizes = [axis.size for axis in stacks[0].axes]
    ranks = math.prod(sizes)
    places = iter([_place(owner, sizes) for owner in assigned([cost(s.matrix) for s in stacks for _ in range(s.count)], ranks)])
    before: Iterator[tuple[int, Tensor]] = iter(())
    for some in _rounds(stacks, ranks):
        batch = [_Held(stack, part(stack.number), [next(places) for _ in range(stack.count)]) for stack in some]
        arrive = _through(0, batch, work)
        yield from before
        before = _arrived(some, arrive)
    yield from before


def _arrived(stacks: list[Stack], arrive: Arrive) -> Iterator[tuple[int, Tensor]]:
    for stack, found in zip(stacks, arrive(), strict=True):
        yield stack.number, found


def _rounds(stacks: list[Stack], ranks: int) -> Iterator[list[Stack]]:
    """Some at a time: at least one matrix for each rank, so that none waits, and many where they are small."""
    some: list[Stack] = []
    matrices = elements = 0
    for stack in stacks:
        some.append(stack)
        matrices += stack.count
        elements += stack.count * math.prod(stack.matrix)
        if matrices >= ranks and (elements >= _ROUND_ELEMENTS or ranks == 1):
            yield some
            some, matrices, elements = [], 0, 0
    if some:
        yield some


def _place(owner: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """A rank's number as its place on each axis."""
    places = []
    for size in reversed(sizes):
        owner, place = divmod(owner, size)
        places.append(place)
    return tuple(reversed(places))


def _through(level: int, batch: list[_Held], work: Work) -> Arrive:
    """The results for what this rank holds of a batch, from this axis on."""
    stack = batch[0].stack
    if level == len(stack.axes):
        done = [work(h.stack.number, h.tensor) if len(h.tensor) else h.tensor.to(h.stack.dtype) for h in batch]
        return lambda: done
    if level == 0 and stack.whole.copies is not None:
        return _by_copies(stack.whole.copies, batch, work)
    return _by_parts(level, batch, work)


def _by_copies(axis: Axis, batch: list[_Held], work: Work) -> Arrive:
    found = _through(1, [held.there(axis.index, held.tensor[held.of(axis.index)]) for held in batch], work)()
    shapes = [[(len(held.of(place)), *held.tensor.shape[1:]) for held in batch] for place in range(axis.size)]
    mine = found[0].new_zeros(max(sum(map(math.prod, row)) for row in shapes))  # as long on every rank: loads are even within a matrix
    flat = torch.cat([tensor.flatten() for tensor in found])
    mine[: len(flat)] = flat
    started = start_gather(mine, axis)

    def arrive() -> list[Tensor]:
        rows = started.wait().view(axis.size, -1)
        return _joined(batch, [_cut(row, shape) for row, shape in zip(rows, shapes, strict=True)])

    return arrive


def _by_parts(level: int, batch: list[_Held], work: Work) -> Arrive:
    whole, axis = batch[0].stack.whole, batch[0].stack.axes[level]
    nth, places = level - (whole.copies is not None), range(axis.size)
    cuts = [held.stack.whole.cuts[nth] for held in batch]
    go = [[(len(held.of(place)), *held.tensor.shape[1:]) for held in batch] for place in places]  # my parts of a place's matrices
    come = [  # a place's parts of my matrices
        [cut.part_shape((len(held.of(axis.index)), *held.tensor.shape[1:]), place) for held, cut in zip(batch, cuts, strict=True)]
        for place in places
    ]
    parts = _exchanged([[held.tensor[held.of(place)] for held in batch] for place in places], come, axis)
    matrices = [torch.cat([parts[place][n] for place in places], cut.dim) for n, cut in enumerate(cuts)]
    found = _through(level + 1, [held.there(axis.index, tensor) for held, tensor in zip(batch, matrices, strict=True)], work)()
    back = [[tensor.narrow(cut.dim, *cut.run(place)) for tensor, cut in zip(found, cuts, strict=True)] for place in places]
    joined = _joined(batch, _exchanged(back, go, axis))
    return lambda: joined


def _exchanged(sent: list[list[Tensor]], come: list[list[tuple[int, ...]]], axis: Axis) -> list[list[Tensor]]:
    """For each place of the axis tensors for it, and those of these shapes that come from it."""
    flats = [torch.cat([tensor.flatten() for tensor in row]) for row in sent]
    receive = [sum(map(math.prod, row)) for row in come]
    arrived = all_to_all(torch.cat(flats), axis, send=[len(flat) for flat in flats], receive=receive)
    return [_cut(flat, shapes) for flat, shapes in zip(arrived.split(receive), come, strict=True)]


def _cut(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The tensors of these shapes that lie in its beginning, one after another."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def _joined(batch: list[_Held], of_places: list[list[Tensor]]) -> list[Tensor]:
    """What came from each place, in the order of the matrices."""
    joined = []
    for n, held in enumerate(batch):
        out = of_places[0][n].new_empty(held.tensor.shape)
        for place, found in enumerate(of_places):
            out[held.of(place)] = found[n]
        joined.append(out)
    return joined
