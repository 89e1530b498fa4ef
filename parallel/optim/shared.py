"""Base classes of the project's optimizers, the last operation of an update, and the distribution of work on whole matrices over the ranks
that hold copies or shards of them. One rank, the owner, does the work on a matrix.

    copies    every rank has the matrix                      the owner works   --all-gather-->   all ranks have the result
    shards    --all-to-all-->  the whole matrix              the owner works   --all-to-all-->   each rank has its shard of the result

A matrix that is sharded over several axes (FSDP and tensor parallelism, for example) is joined axis by axis, and its result is sharded in
the reverse order. All ranks compute the owners from the shapes alone. Many matrices are sent together, in rounds. While a round is
computed, the next rounds are on their way to their owners, and the results of the rounds before are on their way back.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from parallel.data.whole import Whole
from parallel.mesh.collectives import StartedRows, finish_rows, start_all_to_all, start_gather
from parallel.mesh.mesh import Axis

Group = dict[str, Any]  # a parameter group of torch.optim


class PerWeight(torch.optim.Optimizer):
    """Optimizer that updates each weight separately. update: (weight, its optimizer states, its parameter group) -> None, in place."""

    def __init__(self, groups: list[Group], update: Callable[[Tensor, dict[str, Tensor], Group], None]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, self.state[weight], group)


class AdamWExcept(torch.optim.AdamW):
    """torch's AdamW, except for weights that the subclass updates itself (`update_itself`)."""

    def update_itself(self, weight: nn.Parameter, group: Group) -> bool:
        """Return True if the subclass updates this weight, in this method or in its `step`; False: AdamW updates it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        updated: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                grad = weight.grad
                if grad is not None and self.update_itself(weight, group):
                    updated.append((weight, grad))
                    weight.grad = None  # so that AdamW skips it
        super().step()
        for weight, grad in updated:
            weight.grad = grad


def decay_and_subtract(weight: Tensor, step: Tensor, *, lr: float, decay: float) -> None:
    """Set `weight` to weight - lr * decay * weight - step, in place. `step` (fp32) is rounded to the weight's dtype."""
    if decay:
        weight.mul_(1 - lr * decay)
    weight.sub_(step.to(weight.dtype))


# K matrices of one parameter, R rows, C columns

_ROUND_ELEMENTS = 32 * 2**20  # minimum number of elements in a round, over all ranks: 128 MiB of fp32
Work = Callable[[int, Tensor], Tensor]  # (Stack.number, whole matrices [K, R, C] of this stack) -> results [K, R, C]
Cost = Callable[[tuple[int, int]], float]  # shape of a matrix -> cost of the work on it, in any unit
# The steps of a round: each ends when a collective has started. Returns this rank's shard of the results, one tensor for each stack.
Steps = Generator[None, None, list[Tensor]]


@dataclass(frozen=True)
class Stack:
    """A parameter as a stack of `count` (K) matrices. shape: [R, C] of this rank's shard of each matrix (of the whole matrix, if it is
    not sharded). number: identifies the parameter for the caller. dtype: of the results. whole: the axes of ranks with copies or other
    shards."""

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
        """Return the axis of the ranks with copies, if there is one, followed by the axes over which the matrices are sharded."""
        return *((self.whole.copies,) if self.whole.copies else ()), *(cut.axis for cut in self.whole.cuts)


def shared(stacks: Iterable[Stack], part: Callable[[int], Tensor], work: Work, *, cost: Cost) -> Iterator[tuple[int, Tensor]]:
    """Yield (number, this rank's shard [K, R, C] of the results) for each stack, in any order. Collective: stacks are equal on all ranks.
    part: number -> this rank's shard of the matrices, [K, R, C], in the dtype that `work` takes; called once for each stack.
    work: computes the results of whole matrices; called only on their owner. cost: shape of a matrix -> cost of the work on it."""
    groups: dict[tuple[object, ...], list[Stack]] = {}  # stacks with copies or shards on the same ranks
    for stack in stacks:
        key = stack.dtype, stack.whole.copies is None, *((axis.name, axis.ranks) for axis in stack.axes)
        groups.setdefault(key, []).append(stack)
    for group in groups.values():
        yield from _in_rounds(sorted(group, key=lambda stack: -cost(stack.matrix)), part, work, cost)


def assigned(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner (a rank) of each matrix. costs: cost of each matrix, descending; each is assigned to the rank with the least cost so
    far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    owners = []
    for cost in costs:
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + cost, rank))
        owners.append(rank)
    return owners


@dataclass(frozen=True)
class _Matrices:
    """The matrices of a stack on the way to their owners: they are sent over one axis after another. tensor: this rank's shards of the K
    matrices, [K, R, C]. owners: for each matrix, the owner's index on the next axis, and on each axis after that one."""

    stack: Stack
    tensor: Tensor
    owners: list[tuple[int, ...]]

    def of(self, index: int) -> list[int]:
        """Return the numbers (0 to K - 1) of the matrices whose owners have this index on the next axis. They are sent to the rank with
        this index."""
        return [k for k, owner in enumerate(self.owners) if owner[0] == index]

    def shape_of(self, index: int) -> tuple[int, ...]:
        """Return the shape of `tensor[self.of(index)]`."""
        return len(self.of(index)), *self.tensor.shape[1:]

    def sent(self, index: int, tensor: Tensor) -> _Matrices:
        """Return the matrices `of(index)`, to be sent over the axes after the next. tensor: their shards, joined over the next axis."""
        return replace(self, tensor=tensor, owners=[self.owners[k][1:] for k in self.of(index)])


def _in_rounds(stacks: list[Stack], part: Callable[[int], Tensor], work: Work, cost: Cost) -> Iterator[tuple[int, Tensor]]:
    sizes = [axis.size for axis in stacks[0].axes]
    ranks = math.prod(sizes)
    indices = list(itertools.product(*map(range, sizes)))  # for each rank, its index on each axis
    owners = iter([indices[owner] for owner in assigned([cost(s.matrix) for s in stacks for _ in range(s.count)], ranks)])
    under_way: list[tuple[list[Stack], Steps]] = []  # the newest round first, so that it starts to send before an older round computes
    for stacks_of_round in _rounds(stacks, ranks):
        batch = [_Matrices(stack, part(stack.number), [next(owners) for _ in range(stack.count)]) for stack in stacks_of_round]
        under_way.insert(0, (stacks_of_round, _to_owners_and_back(0, batch, work)))
        yield from _one_step(under_way)
    while under_way:
        yield from _one_step(under_way)


def _one_step(rounds: list[tuple[list[Stack], Steps]]) -> Iterator[tuple[int, Tensor]]:
    """Resume each round's generator once, so that it sends or computes until its next `yield`. rounds: the newest first. If the last round,
    the oldest, ends, remove it and yield (number of the stack, result) for each of its stacks."""
    for stacks, steps in rounds[:]:
        try:
            next(steps)
        except StopIteration as end:
            rounds.pop()
            yield from zip((stack.number for stack in stacks), end.value, strict=True)


def _rounds(stacks: list[Stack], ranks: int) -> Iterator[list[Stack]]:
    """Yield the stacks of each round. Each round but the last has at least as many matrices as ranks, and at least _ROUND_ELEMENTS
    elements. On a single rank, each stack is a round."""
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


def _to_owners_and_back(level: int, batch: list[_Matrices], work: Work) -> Steps:
    """Send a round's matrices to their owners over the axes with index `level` and higher, do the work, and send the results back."""
    stack = batch[0].stack
    if level == len(stack.axes):
        return [work(m.stack.number, m.tensor) if len(m.tensor) else m.tensor.to(m.stack.dtype) for m in batch]
    over = _over_copies if level == 0 and stack.whole.copies is not None else _over_shards
    return (yield from over(level, batch, work))


def _over_copies(level: int, batch: list[_Matrices], work: Work) -> Steps:
    axis = batch[0].stack.axes[level]
    results = yield from _to_owners_and_back(level + 1, [m.sent(axis.index, m.tensor[m.of(axis.index)]) for m in batch], work)
    shapes = [[m.shape_of(rank) for m in batch] for rank in range(axis.size)]
    mine = results[0].new_zeros(max(sum(map(math.prod, row)) for row in shapes))  # padded to the same length on all ranks
    flat = torch.cat([tensor.flatten() for tensor in results])
    mine[: len(flat)] = flat
    started = start_gather(mine, axis)
    yield
    rows = started.wait().view(axis.size, -1)
    return _joined(batch, [_cut(row, shape) for row, shape in zip(rows, shapes, strict=True)])


def _over_shards(level: int, batch: list[_Matrices], work: Work) -> Steps:
    whole, axis = batch[0].stack.whole, batch[0].stack.axes[level]
    ranks, cuts = range(axis.size), [m.stack.whole.cuts[level - (whole.copies is not None)] for m in batch]
    come = [[cut.part_shape(m.shape_of(axis.index), rank) for m, cut in zip(batch, cuts, strict=True)] for rank in ranks]
    started = _start([[m.tensor[m.of(rank)] for m in batch] for rank in ranks], come, axis)
    yield
    parts = _arrived(started, come)
    matrices = [torch.cat([parts[rank][n] for rank in ranks], cut.dim) for n, cut in enumerate(cuts)]
    own = [m.sent(axis.index, tensor) for m, tensor in zip(batch, matrices, strict=True)]
    results = yield from _to_owners_and_back(level + 1, own, work)
    back = [[m.shape_of(rank) for m in batch] for rank in ranks]
    started = _start([[x.narrow(cut.dim, *cut.run(rank)) for x, cut in zip(results, cuts, strict=True)] for rank in ranks], back, axis)
    yield
    return _joined(batch, _arrived(started, back))


def _start(sent: list[list[Tensor]], come: list[list[tuple[int, ...]]], axis: Axis) -> StartedRows:
    """Start an all-to-all of lists of tensors. sent: for each rank, the tensors to it. come: for each rank, shapes of the tensors from
    it."""
    flats = [torch.cat([tensor.flatten() for tensor in row]) for row in sent]
    receive = [sum(map(math.prod, row)) for row in come]
    return start_all_to_all(torch.cat(flats), axis, send=[len(flat) for flat in flats], receive=receive)


def _arrived(started: StartedRows, come: list[list[tuple[int, ...]]]) -> list[list[Tensor]]:
    """Wait for an all-to-all that `_start` started. Return for each rank the tensors from it."""
    flats = finish_rows(started).split(started.receive)
    return [_cut(flat, shapes) for flat, shapes in zip(flats, come, strict=True)]


def _cut(flat: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Split a flat tensor into tensors of these shapes, one after another. Padding at its end is ignored."""
    sizes = [math.prod(shape) for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat[: sum(sizes)].split(sizes), shapes, strict=True)]


def _joined(batch: list[_Matrices], from_ranks: list[list[Tensor]]) -> list[Tensor]:
    """Return one tensor for each stack, with the results of all its matrices, in their order. from_ranks: for each rank, its results for
    each stack."""
    joined = []
    for n, m in enumerate(batch):
        out = from_ranks[0][n].new_empty(m.tensor.shape)
        for rank, results in enumerate(from_ranks):
            out[m.of(rank)] = results[n]
        joined.append(out)
    return joined
