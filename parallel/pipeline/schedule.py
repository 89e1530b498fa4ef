"""A pipeline schedule as a value: the actions of each rank, in order.

    rank 0   0F0 0F1 0B0 0B1 0U@1          Action(op, stage, microbatch, version), written stage-op-micro-batch@version
    rank 1   1F0 1B0 1F1 1B1 1U@1

The order within a rank is the schedule's choice. What an action waits for is not: `needs` is the only rule. From it the simulator
gives each action a time, the runtime derives what to receive and to send, and `check` executes the orders without times, so that
an order with a deadlock is refused before a process starts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.fixes import Set


class Op(StrEnum):
    F = "F"  # forward
    B = "B"  # backward, whole: gradient of the input and of the weights
    I = "I"  # backward of the input alone, which the stage before waits for  # noqa: E741
    W = "W"  # backward of the weights alone, which only the update waits for
    S = "S"  # sum of a stage's gradients over the ranks that hold a replica of it
    U = "U"  # update of a stage's weights

    __hash__ = str.__hash__  # enum's own is written in Python, and tables of actions are asked often


COMPUTE = (Op.F, Op.B, Op.I, Op.W)
OF_A_BATCH = -1  # the micro-batch number of S and U, which belong to a whole batch


class Action(NamedTuple):
    """One action of a rank.

    `version` counts updates. For F, B, I and W it is the version of the weights that they read (0: the first); for S and U it is the
    version that the update makes.
    """

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


@dataclass(frozen=True)
class Schedule:
    """The orders of actions, one per rank, and the ranks of each stage.

    homes: for each stage the ranks that hold it: one, or several if it has replicas that see different micro-batches.
    microbatches: their number in all orders together; an update sums `microbatches_per_update` of them.
    pairs: positions of an F that runs as one block with the B after it: both start when both can, and both results leave at the end.
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
    def _held(self) -> dict[int, tuple[int, ...]]:
        held: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for stage, homes in enumerate(self.homes):
            for rank in homes:
                held[rank] += (stage,)
        return held

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self._held.get(rank, ())

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

    @cached_property
    def _last_gradients(self) -> dict[tuple[int, int, int], list[Node]]:
        """(rank, stage, version) -> the B and W whose gradients the update to that version sums."""
        found: dict[tuple[int, int, int], list[Node]] = defaultdict(list)
        for node, a in self.nodes():
            if a.op in (Op.B, Op.W):
                found[node.rank, a.stage, a.microbatch // self.microbatches_per_update + 1].append(node)
        return found

    def find(self, op: Op, stage: int, microbatch: int) -> Node | None:
        """The node of F, B, I or W of a micro-batch; None if no rank does it."""
        return self._compute.get((op, stage, microbatch))

    def backward(self, stage: int, microbatch: int) -> Node | None:
        """The node that makes a stage's input gradient, by B or by I."""
        return self.find(Op.B, stage, microbatch) or self.find(Op.I, stage, microbatch)

    def needs(self, node: Node) -> tuple[Node, ...]:
        """The actions that must end before this one starts, beside the one before it on its rank.

        F: F of the previous stage. B and I: their own F, and the input gradient of the next stage. W: its I. S: every gradient of
        the batch on this rank. U: the same, or S on all replicas if the stage has any. F, B and I of a version above 0: the update
        that made it. Needed actions that no rank does are left out; `check` refuses such a schedule.
        """
        needs = self._own_needs(node)
        if node in self.pairs:
            needs += tuple(need for need in self._own_needs(_after(node)) if need != node)
        return tuple(_after(need) if need in self.pairs and need.rank != node.rank else need for need in needs)

    def _own_needs(self, node: Node) -> tuple[Node, ...]:
        op, stage, microbatch, version = self.action(node)
        if op is Op.S or (op is Op.U and len(self.homes[stage]) == 1):
            return tuple(self._last_gradients[node.rank, stage, version])
        if op is Op.U:
            return self.replicas(node)
        found = list(self._made_by(node))
        if op is Op.W:
            found.append(self.find(Op.I, stage, microbatch))
        elif op is not Op.F:
            found.append(self.find(Op.F, stage, microbatch))
        if version and op is not Op.W:
            found.append(self._of_batch.get((Op.U, stage, version, node.rank)))
        return tuple(n for n in found if n is not None)

    def _made_by(self, node: Node) -> tuple[Node | None, ...]:
        """The nodes that make the tensor which F, B or I takes from another stage."""
        op, stage, microbatch, _ = self.action(node)
        if op is Op.F and stage > 0:
            return (self.find(Op.F, stage - 1, microbatch),)
        if op in (Op.B, Op.I) and stage + 1 < self.num_stages:
            return (self.backward(stage + 1, microbatch),)
        return ()

    def replicas(self, node: Node) -> tuple[Node, ...]:
        """S of the same stage and batch as this S or U, on every rank that holds the stage."""
        _, stage, _, version = self.action(node)
        found = (self._of_batch.get((Op.S, stage, version, home)) for home in self.homes[stage])
        return tuple(n for n in found if n is not None)

    def sends(self, node: Node) -> tuple[Message, ...]:
        """Messages that leave the rank when the action ends: its result, if another rank needs it. A pair sends both at its end."""
        if node in self.pairs:
            return ()
        block = (Node(node.rank, node.at - 1), node)
        return tuple(message for n in (block if block[0] in self.pairs else block[1:]) for message in self._message(n))

    def receives(self, node: Node) -> tuple[Message, ...]:
        """Messages that must have arrived before the action starts: `sends` from the receiver's side."""
        if Node(node.rank, node.at - 1) in self.pairs:
            return ()
        block = (node, _after(node)) if node in self.pairs else (node,)
        sources = (source for n in block for source in self._made_by(n) if source is not None and source.rank != node.rank)
        return tuple(message for source in sources for message in self._message(source))

    def _message(self, node: Node) -> tuple[Message, ...]:
        op, stage, microbatch, _ = self.action(node)
        if op is Op.F and stage + 1 < self.num_stages:
            reader = self.find(Op.F, stage + 1, microbatch)
        elif op in (Op.B, Op.I) and stage > 0:
            reader = self.backward(stage - 1, microbatch)
        else:
            return ()
        if reader is None or reader.rank == node.rank:
            return ()
        return (Message(op, stage, microbatch, node.rank, reader.rank),)

    def messages(self) -> dict[tuple[int, int], tuple[Message, ...]]:
        """(source, target) -> messages in the order in which the source sends them, so that the target can post receives early."""
        found: dict[tuple[int, int], list[Message]] = defaultdict(list)
        for node, _ in self.nodes():
            for message in self.sends(node):
                found[message.source, message.target].append(message)
        return {pair: tuple(messages) for pair, messages in found.items()}

    def repeated(self, batches: int) -> Schedule:
        """The same orders `batches` times over, with micro-batches and versions counted on: a run without draining in between."""
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
    """A schedule of one batch from its compute actions. Each rank ends with an update of each of its stages."""
    placed = tuple(tuple(ranks) for ranks in homes)
    return Schedule(name, placed, microbatches, microbatches, tuple((*order, *updates(order)) for order in orders))


def updates(order: Sequence[Action]) -> list[Action]:
    """U for every stage of a rank, in the order in which the stages' gradients are complete."""
    stages = dict.fromkeys(action.stage for action in reversed(order) if action.op in (Op.B, Op.W))
    return [Action(Op.U, stage, version=1) for stage in reversed(stages)]


def one_stage_a_rank(ranks: int) -> list[tuple[int]]:
    return [(rank,) for rank in range(ranks)]


def looped(ranks: int, chunks: int) -> list[tuple[int]]:
    """Stage s on rank s mod ranks: rank r holds r, r + ranks, ..."""
    return [(stage % ranks,) for stage in range(ranks * chunks)]


def folded(ranks: int) -> list[tuple[int]]:
    """A V: rank r holds stages r and 2 ranks - 1 - r."""
    return [(min(stage, 2 * ranks - 1 - stage),) for stage in range(2 * ranks)]


def at_least(what: str, got: int, needed: int, why: str = "") -> None:
    if got < needed:
        raise BadInput(what, got=got, needed=f"at least {needed}{why}", fix=Set("it", needed))
