"""Distributes work on whole matrices over the ranks that hold copies or parts of them: one rank, the owner, does each matrix.

    copies    every rank has the matrix                      the owner works   --all-gather-->   all ranks have the result
    parts     --all-to-all-->  the whole matrix              the owner works   --all-to-all-->   each rank has its part of the result

A matrix that is cut over several axes (by FSDP and tensor parallelism, for example) is joined axis by axis, and its result is cut in the
reverse order. All ranks compute the owners from the shapes alone: in order of decreasing cost, each matrix goes to the rank with the least
work so far. Many matrices are sent together, in rounds. A round's results are gathered while the next round is computed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from parallel.data.whole import Whole
from parallel.mesh.collectives import all_to_all, start_gather
from parallel.mesh.mesh import Axis

# K matrices of one parameter, R rows, C columns

_ROUND_ELEMENTS = 32 * 2**20  # elements of a round, all ranks together: 128 MiB of fp32
Work = Callable[[int, Tensor], Tensor]  # (number of a Stack, whole matrices [K, R, C]) -> results [K, R, C]
Cost = Callable[[tuple[int, int]], float]  # shape of a matrix -> cost of the work on it, in any unit
Arrive = Callable[[], list[Tensor]]  # waits for the results, and returns this rank's part for each stack of a batch


@dataclass(frozen=True)
class Stack:
    """A parameter: a stack of `count` (K) matrices, of each of which this rank has a part of `shape` [R, C], perhaps the whole.

    number: chosen by the caller, one for each parameter. dtype: of the results. whole: which ranks have copies or the other parts.
    """

    number: int
    count: int
    shape: tuple[int, int]
    dtype: torch.dtype
    whole: Whole

    @property
    def matrix(self) -> tuple[int, int]:
        """Return the shape of a whole matrix."""
        sizes = {-2: self.shape[0], -1: self.shape[1]} | {cut.dim: cut.size for cut in self.whole.cuts}
        return sizes[-2], sizes[-1]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axis of the ranks with copies, if any, then the axes over which the matrices are cut."""
        return *((self.whole.copies,) if self.whole.copies else ()), *(cut.axis for cut in self.whole.cuts)


def shared(stacks: Iterable[Stack], part: Callable[[int], Tensor], work: Work, *, cost: Cost) -> Iterator[tuple[int, Tensor]]:
    """Yield (number, this rank's part [K, R, C] of the results) for each stack, in any order. Collective: stacks are equal on all ranks.

    part: number -> this rank's part of the matrices, [K, R, C], in the dtype that `work` takes; called once for each stack. work: computes
    the results of whole matrices, on their owner. cost: of this work.
    """
    alike: dict[tuple[object, ...], list[Stack]] = {}  # stacks with copies or parts on the same ranks
    for stack in stacks:
        key = stack.dtype, stack.whole.copies is None, *((axis.name, axis.ranks) for axis in stack.axes)
        alike.setdefault(key, []).append(stack)
    for held in alike.values():
        yield from _in_rounds(sorted(held, key=lambda stack: -cost(stack.matrix)), part, work, cost)


def assigned(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank for each piece of work: in the given order (decreasing cost), each goes to the rank with the least work so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = []
    for cost in costs:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost, rank))
        owners.append(rank)
    return owners


@dataclass(frozen=True)
class _Held:
    """Matrices on the way to their owners: they are sent over one axis after the other.

    tensor: this rank's part of them, [K, R, C]. places: for each of the K matrices, the owner's indices on the axes over which it has not
    been sent yet.
    """

    stack: Stack
    tensor: Tensor
    places: list[tuple[int, ...]]

    def of(self, place: int) -> list[int]:
        """Return the numbers k of the matrices whose owner has index `place` on the next axis."""
        return [k for k, places in enumerate(self.places) if places[0] == place]

    def there(self, place: int, tensor: Tensor) -> _Held:
        """Return those of the matrices whose owner has index `place`, after they are sent over the next axis: `tensor`."""
        return replace(self, tensor=tensor, places=[self.places[k][1:] for k in self.of(place)])


def _in_rounds(stacks: list[Stack], part: Callable[[int], Tensor], work: Work, cost: Cost) -> Iterator[tuple[int, Tensor]]:
    sizes = [axis.size for axis in stacks[0].axes]
    ranks = math.prod(sizes)
    indices = list(itertools.product(*map(range, sizes)))  # of each rank, on each axis
    places = iter([indices[owner] for owner in assigned([cost(s.matrix) for s in stacks for _ in range(s.count)], ranks)])
    before: Iterator[tuple[int, Tensor]] = iter(())
    for some in _rounds(stacks, ranks):
        batch = [_Held(stack, part(stack.number), [next(places) for _ in range(stack.count)]) for stack in some]
        arrive = _through(0, batch, work)
        yield from before
        before = _arrived(some, arrive)
    yield from before


def _arrived(stacks: list[Stack], arrive: Arrive) -> Iterator[tuple[int, Tensor]]:
    yield from zip((stack.number for stack in stacks), arrive(), strict=True)


def _rounds(stacks: list[Stack], ranks: int) -> Iterator[list[Stack]]:
    """Yield the stacks in rounds. A round has at least one matrix for each rank (except the last round), and many if they are small."""
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


def _through(level: int, batch: list[_Held], work: Work) -> Arrive:
    """Send a batch, with one entry for each stack of a round, over the stacks' axes from number `level` on, to its owners and back."""
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
    mine = found[0].new_zeros(max(sum(map(math.prod, row)) for row in shapes))  # equally long on all ranks, padded by at most a matrix
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
    go = [[(len(held.of(place)), *held.tensor.shape[1:]) for held in batch] for place in places]  # shapes of the parts for each rank
    come = [  # shapes of the parts from each rank, of the matrices that this rank joins
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
    """Exchange tensors over the axis. sent: for each rank, the tensors for it. Returns, for each rank, those from it, of shapes `come`."""
    flats = [torch.cat([tensor.flatten() for tensor in row]) for row in sent]
    receive = [sum(map(math.prod, row)) for row in come]
    arrived = all_to_all(torch.cat(flats), axis, send=[len(flat) for flat in flats], receive=receive)
    return [_cut(flat, shapes) for flat, shapes in zip(arrived.split(receive), come, strict=True)]


def _cut(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Split the beginning of a flat tensor into tensors of these shapes, one after another."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def _joined(batch: list[_Held], of_places: list[list[Tensor]]) -> list[Tensor]:
    """Return one tensor for each stack of a batch, with its matrices in order. of_places: for each rank, its tensors of these stacks."""
    joined = []
    for n, held in enumerate(batch):
        out = of_places[0][n].new_empty(held.tensor.shape)
        for place, found in enumerate(of_places):
            out[held.of(place)] = found[n]
        joined.append(out)
    return joined
