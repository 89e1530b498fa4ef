"""A pipeline schedule as a value: the actions of each rank, in order. ActionGraph in check.py says which actions an action waits for.

rank 0   0F0 0F1 0B0 0B1 0U@1          Action(op, stage, microbatch, version), written stage-op-micro-batch@version
rank 1   1F0 1B0 1F1 1B1 1U@1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Op(StrEnum):
    F = "F"  # forward pass
    B = "B"  # whole backward pass: gradients of the input and of the weights
    I = "I"  # input gradient only, which the previous stage waits for  # noqa: E741
    W = "W"  # weight gradient only, which only the update waits for
    S = "S"  # all-reduce of a stage's gradients over the ranks that hold a replica of the stage
    U = "U"  # optimizer update of a stage's weights

    __hash__ = str.__hash__  # written in C, so faster than Enum.__hash__: dictionaries of actions are read often


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
OF_A_BATCH = -1  # micro-batch number of S and U, which belong to a whole batch


class Action(NamedTuple):
    """One action of a rank. version: the version of the weights (0: initial weights) that F, B or I reads, whose gradient W computes,
    that U makes, or for whose update S sums the gradients."""

    op: Op
    stage: int
    microbatch: int = OF_A_BATCH
    version: int = 0

    def __str__(self) -> str:
        at = "" if self.microbatch == OF_A_BATCH else str(self.microbatch)
        return f"{self.stage}{self.op}{at}" + (f"@{self.version}" if self.version else "")


class Node(NamedTuple):
    """A position in a schedule: action number `at` (from 0) of `rank`."""

    rank: int
    at: int


class Message(NamedTuple):
    """A point-to-point message from rank `source` to rank `target`: the output of a forward pass F, or the input gradient that a backward
    pass B or I computed. stage, microbatch: of this pass."""

    op: Op
    stage: int
    microbatch: int
    source: int
    target: int


class Span(NamedTuple):
    """An action with its start and end time: in seconds of time.perf_counter if measured, in any unit if simulated."""

    action: Action
    start: float
    end: float


class Watcher:
    """Base class of callbacks that the runtime calls around a rank's actions. A callback that a subclass does not define does nothing."""

    def begin(self) -> None:
        """Called once, before the rank waits for the messages of its first action."""

    def before(self, action: Action) -> None:
        """Called before the rank waits for the messages that `action` receives."""

    def after(self, at: int, took: Span) -> None:
        """Called when action number `at` of the rank has ended and its sends have started. took: the action with its measured times."""


@dataclass(frozen=True)
class Schedule:
    """The order of actions of each rank (`orders`), and the ranks that hold each stage (`homes`).

    homes: for each stage one rank, or several ranks if the stage has replicas, which train different micro-batches.
    microbatches: number in all batches of the schedule together. microbatches_per_update: number of micro-batches whose gradients one
    update (U) applies. pairs: position of each F that runs as one block with the next action, a B. The block waits for both inputs, and
    sends both results at its end."""

    name: str
    homes: tuple[tuple[int, ...], ...]
    microbatches: int
    microbatches_per_update: int
    orders: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Node] = frozenset()

    @property
    def num_ranks(self) -> int:
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    @property
    def num_updates(self) -> int:
        return self.microbatches // self.microbatches_per_update

    @property
    def splits_backward(self) -> bool:
        """True if the backward pass is split into gradients of inputs (I) and of weights (W)."""
        return any(action.op is Op.I for order in self.orders for action in order)

    @cached_property
    def _stages(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s for s, homes in enumerate(self.homes) if rank in homes) for rank in range(self.num_ranks))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self._stages[rank]

    def nodes(self) -> Iterator[tuple[Node, Action]]:
        for rank, order in enumerate(self.orders):
            for index, action in enumerate(order):
                yield Node(rank, index), action

    def action(self, node: Node) -> Action:
        return self.orders[node.rank][node.at]

    def repeated(self, batches: int) -> Schedule:
        """Return a schedule of `batches` batches: each rank's order is repeated, with consecutive micro-batch and version numbers."""
        if batches == 1:
            return self

        def shifted(action: Action, n: int) -> Action:
            op, stage, at, version = action
            return Action(op, stage, at if at == OF_A_BATCH else at + n * self.microbatches, version + n * self.num_updates)

        orders = tuple(tuple(shifted(a, n) for n in range(batches) for a in order) for order in self.orders)
        pairs = frozenset(Node(n.rank, n.at + k * len(self.orders[n.rank])) for n in self.pairs for k in range(batches))
        return replace(self, microbatches=batches * self.microbatches, orders=orders, pairs=pairs)


def flushed(name: str, homes: Sequence[Sequence[int]], microbatches: int, orders: Sequence[Sequence[Action]]) -> Schedule:
    """Return the schedule of one batch after which the pipeline is empty. homes: for each stage its ranks. orders: each rank's actions;
    updates (U) are appended."""
    placed = tuple(tuple(ranks) for ranks in homes)
    return Schedule(name, placed, microbatches, microbatches, tuple((*order, *updates(order)) for order in orders))


def updates(order: Sequence[Action]) -> list[Action]:
    """Return an update (U) for each stage in a rank's order, sorted by the time at which the stage's gradients are complete."""
    return [Action(Op.U, stage, version=1) for _, stage in sorted(stage_complete_at(order).items())]


def stage_complete_at(order: Sequence[Action]) -> dict[int, int]:
    """Return a dict: index of an action in a rank's order -> stage. The action is the stage's last B or W; when it ends, the stage's weight
    gradients are complete."""
    last = {action.stage: at for at, action in enumerate(order) if action.op in (Op.B, Op.W)}
    return {at: stage for stage, at in last.items()}


def one_stage_a_rank(ranks: int) -> list[tuple[int]]:
    return [(rank,) for rank in range(ranks)]


def looped(ranks: int, chunks: int) -> list[tuple[int]]:
    """Return the rank of each stage in a looped placement: rank r holds `chunks` stages, r, r + ranks, r + 2 ranks, ..."""
    return [(stage % ranks,) for stage in range(ranks * chunks)]


def folded(ranks: int) -> list[tuple[int]]:
    """Return the rank of each stage in a V-shaped placement: rank r holds stages r and `2 * ranks - 1 - r`."""
    return [(min(stage, 2 * ranks - 1 - stage),) for stage in range(2 * ranks)]
