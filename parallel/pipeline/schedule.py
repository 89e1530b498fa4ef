"""A pipeline schedule as a value: the actions of each rank, in order.

    rank 0   0F0 0F1 0B0 0B1 0U@1          Action(op, stage, microbatch, version), written stage-op-micro-batch@version
    rank 1   1F0 1B0 1F1 1B1 1U@1

The order within a rank is the schedule's choice. The actions that an action waits for follow from one rule (ActionGraph in check.py). From
it the simulator gives each action a time, and check.py refuses orders with a deadlock before any process starts. `receives` and `sends`
are the messages between ranks that the rule needs.
"""

from __future__ import annotations

from collections import defaultdict
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
    S = "S"  # sum of a stage's gradients over the ranks that hold a replica of it
    U = "U"  # update of a stage's weights

    __hash__ = str.__hash__  # written in C, so faster than Enum.__hash__: dictionaries of actions are read often


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
OF_A_BATCH = -1  # micro-batch number of S and U, which belong to a whole batch


class Action(NamedTuple):
    """One action of a rank. version: of the weights, which F, B, I and W read (0: initial weights) and which S and U make (from 1)."""

    op: Op
    stage: int
    microbatch: int = OF_A_BATCH
    version: int = 0

    def __str__(self) -> str:
        at = "" if self.microbatch == OF_A_BATCH else str(self.microbatch)
        return f"{self.stage}{self.op}{at}" + (f"@{self.version}" if self.version else "")


class Node(NamedTuple):
    """A position in a schedule: the `at`-th action of `rank`."""

    rank: int
    at: int


class Message(NamedTuple):
    """A message between ranks: the output of F, or the input gradient of B or I, of one micro-batch."""

    op: Op
    stage: int
    microbatch: int
    source: int
    target: int


class Span(NamedTuple):
    """An action with its start and end: in seconds of time.perf_counter if measured, in any unit if simulated.

    A simulated S that overlaps with other actions has the times of its messages.
    """

    action: Action
    start: float
    end: float


class Watcher:
    """Callbacks around a rank's actions in training, which do nothing here. Work in `begin` and `after` fills the waits for messages."""

    def begin(self) -> None:
        """Called once, before the rank waits for the first action's messages."""

    def before(self, action: Action) -> None:
        """Called before the rank waits for the action's messages."""

    def after(self, at: int, took: Span) -> None:
        """Called after action number `at` of the rank and its sends, before the rank waits for the next action's messages."""


@dataclass(frozen=True)
class Schedule:
    """Orders of actions, one for each rank, and the ranks of each stage.

    homes: for each stage the ranks that hold it: one rank, or several if it has replicas that train different micro-batches.
    microbatches: number of micro-batches in the whole schedule; an update sums the gradients of `microbatches_per_update` of them.
    pairs: nodes of each F that runs as one block with the next action, a B. The block starts when both can start, and sends both
    results at its end.
    """

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

    @cached_property
    def _compute(self) -> dict[tuple[Op, int, int], Node]:
        return {(a.op, a.stage, a.microbatch): node for node, a in self.nodes() if a.op in COMPUTE}

    @cached_property
    def _of_batch(self) -> dict[tuple[Op, int, int, int], Node]:
        return {(a.op, a.stage, a.version, node.rank): node for node, a in self.nodes() if a.op not in COMPUTE}

    def find(self, op: Op, stage: int, microbatch: int) -> Node | None:
        """Return the node of a micro-batch's F, B, I or W on a stage; None if no rank executes it."""
        return self._compute.get((op, stage, microbatch))

    def backward(self, stage: int, microbatch: int) -> Node | None:
        """Return the node that computes a stage's input gradient: its B or its I."""
        return self.find(Op.B, stage, microbatch) or self.find(Op.I, stage, microbatch)

    def input_maker(self, node: Node) -> Node | None:
        """Return the node whose result F, B or I takes from another stage; None for the first F, the last B or I, and other actions."""
        op, stage, microbatch, _ = self.action(node)
        if op is Op.F:
            return self.find(Op.F, stage - 1, microbatch)
        return self.backward(stage + 1, microbatch) if op in (Op.B, Op.I) else None

    def replicas(self, node: Node) -> tuple[Node, ...]:
        """Return the S nodes of the same stage and batch as this S or U, one for each rank that holds the stage."""
        _, stage, _, version = self.action(node)
        found = (self._of_batch.get((Op.S, stage, version, home)) for home in self.homes[stage])
        return tuple(n for n in found if n is not None)

    def sends(self, node: Node) -> tuple[Message, ...]:
        """Return the messages sent when the action ends: its result, if another rank needs it; both results at the end of a pair."""
        if node in self.pairs:
            return ()
        block = (Node(node.rank, node.at - 1), node)
        return tuple(message for n in (block if block[0] in self.pairs else block[1:]) for message in self._message(n))

    def receives(self, node: Node) -> tuple[Message, ...]:
        """Return the messages that must arrive before the action starts."""
        if Node(node.rank, node.at - 1) in self.pairs:
            return ()
        block = (node, _after(node)) if node in self.pairs else (node,)
        sources = map(self.input_maker, block)
        return tuple(message for source in sources if source is not None and source.rank != node.rank for message in self._message(source))

    def _message(self, node: Node) -> tuple[Message, ...]:
        op, stage, microbatch, _ = self.action(node)
        if op is Op.F:
            reader = self.find(Op.F, stage + 1, microbatch)
        else:
            reader = self.backward(stage - 1, microbatch) if op in (Op.B, Op.I) else None
        return () if reader is None or reader.rank == node.rank else (Message(op, stage, microbatch, node.rank, reader.rank),)

    def messages(self) -> dict[tuple[int, int], tuple[Message, ...]]:
        """Return the messages of each pair of ranks (source, target), in the order in which the source sends them."""
        found: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for node, _ in self.nodes():
            for message in self.sends(node):
                found[message.source, message.target].append(message)
        return {pair: tuple(messages) for pair, messages in found.items()}

    def repeated(self, batches: int) -> Schedule:
        """Return the schedule with its orders `batches` times in a row; numbers of micro-batches and versions count on."""
        if batches == 1:
            return self
        orders = tuple(
            tuple(_shifted(a, n * self.microbatches, n * self.num_updates) for n in range(batches) for a in order) for order in self.orders
        )
        pairs = frozenset(Node(n.rank, n.at + k * len(self.orders[n.rank])) for n in self.pairs for k in range(batches))
        return replace(self, microbatches=batches * self.microbatches, orders=orders, pairs=pairs)


def _after(node: Node) -> Node:
    return Node(node.rank, node.at + 1)


def _shifted(action: Action, microbatches: int, versions: int) -> Action:
    op, stage, at, version = action
    return Action(op, stage, at if at == OF_A_BATCH else at + microbatches, version + versions)


def flushed(name: str, homes: Sequence[Sequence[int]], microbatches: int, orders: Sequence[Sequence[Action]]) -> Schedule:
    """Make the schedule of one batch from each rank's other actions: an update of each of the rank's stages is added at the end."""
    placed = tuple(tuple(ranks) for ranks in homes)
    return Schedule(name, placed, microbatches, microbatches, tuple((*order, *updates(order)) for order in orders))


def updates(order: Sequence[Action]) -> list[Action]:
    """Return a U for each stage of a rank, in the order in which the stages' gradients are complete."""
    return [Action(Op.U, stage, version=1) for _, stage in sorted(stage_complete_at(order).items())]


def stage_complete_at(order: Sequence[Action]) -> dict[int, int]:
    """Return (index in a rank's order) -> (stage whose gradients of the batch are complete after that action)."""
    last = {action.stage: at for at, action in enumerate(order) if action.op in (Op.B, Op.W)}
    return {at: stage for stage, at in last.items()}


def one_stage_a_rank(ranks: int) -> list[tuple[int]]:
    return [(rank,) for rank in range(ranks)]


def looped(ranks: int, chunks: int) -> list[tuple[int]]:
    """Return the homes of stages placed in a loop: rank r holds stages r, r + ranks, r + 2 ranks, ..."""
    return [(stage % ranks,) for stage in range(ranks * chunks)]


def folded(ranks: int) -> list[tuple[int]]:
    """Return the homes of stages placed as a V: rank r holds stages r and 2 ranks - 1 - r."""
    return [(min(stage, 2 * ranks - 1 - stage),) for stage in range(2 * ranks)]
