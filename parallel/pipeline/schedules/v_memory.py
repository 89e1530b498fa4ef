"""V-Half and V-Min [2405.15362]: zero-bubble schedules on a V, with half or a third of 1F1B's activations.

A building block gives the time slots of one micro-batch on rank r of p. It repeats every 6 slots, because a rank runs six actions for a
micro-batch: forward pass F, gradients of inputs I and of weights W for its two stages (chunk 0 on the way down the ranks, chunk 1 up).

              F down     F up           I up                I down
    V-Half    2 r        3 p - 2 - r    3 p - 1 + g + 2 r    6 p - 2 + g - r     g = 3 for an even p, else 0
    V-Min     r          2 p - 1 - r    2 p + g + r          4 p - 1 + g - r     g = 2 if 3 divides p, else 0

W takes the free slots; the gap g prevents two actions in one slot. All ranks keep the same number of micro-batches until W: (p + 2) // 2 in
V-Half and (p + 4) // 3 in V-Min, while 1F1B's first rank keeps p. With F = I = W and m >= p micro-batches, a rank is busy for 6 m slots of
a step. It is idle for 3 p - 4 (3 p - 5 for an even p) in V-Half, and for at most 4 p - 5 (4 p - 7 if 3 divides p) in V-Min. The paper's
bubbles are p / (2 m) and 2 p / (3 m).
"""

from __future__ import annotations

from typing import NamedTuple

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, folded

EVERY = 6  # time slots from the start of one micro-batch to the start of the next


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Build V-Half. Every rank keeps about half of the activations that 1F1B's first rank keeps. The bubble is about half of 1F1B's."""
    gap = 0 if ranks % 2 else 3
    blocks = [_Block((2 * r, 3 * ranks - 2 - r), (6 * ranks - 2 + gap - r, 3 * ranks - 1 + gap + 2 * r)) for r in range(ranks)]
    return _fastest("v_half", blocks, microbatches, limit=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Build V-Min. Every rank keeps about a third of the activations that 1F1B's first rank keeps. The bubble is about 2/3 of 1F1B's."""
    gap = 0 if ranks % 3 else 2
    blocks = [_Block((r, 2 * ranks - 1 - r), (4 * ranks - 1 + gap - r, 2 * ranks + gap + r)) for r in range(ranks)]
    return _fastest("v_min", blocks, microbatches, limit=2 * ((ranks + 4) // 3))


class _Block(NamedTuple):
    """Building block on one rank: time slots of micro-batch 0. forward: slots of the forward passes (F) of chunks 0 and 1. input: slots of
    the backward passes for inputs (I) of chunks 0 and 1."""

    forward: tuple[int, int]
    input: tuple[int, int]

    def slot(self, op: Op, chunk: int, microbatch: int) -> int:
        return (self.forward if op is Op.F else self.input)[chunk] + EVERY * microbatch

    def in_flight(self, slot: int, microbatches: int) -> int:
        """Return the number of micro-batches in flight at `slot`, over both chunks: forward passes (F) that begin in earlier slots, minus
        gradients of inputs (I) that begin in earlier slots."""
        started, ended = (sum(min(microbatches, max(0, -((first - slot) // EVERY))) for first in slots) for slots in self)
        return started - ended


def _fastest(name: str, blocks: list[_Block], microbatches: int, *, limit: int) -> Schedule:
    """Return the faster of two schedules. The first keeps the building block's order of forward passes; in the second, a rank that would
    wait may run a forward pass early. limit: see _Builder."""
    tries = [_Builder(blocks, microbatches, limit, early=early) for early in (False, True)]
    best = min(tries, key=lambda tried: tried.run())
    return flushed(name, folded(len(blocks)), microbatches, best.orders)


class _Rank:
    """Progress of one rank in _Builder. next: F (forward pass) or I (gradients of inputs) -> next micro-batch of chunks 0 and 1. kept:
    number of micro-batches between F and W (gradients of weights), summed over both chunks."""

    def __init__(self, stages: tuple[int, int], block: _Block) -> None:
        self.stages, self.block = stages, block
        self.next = {Op.F: [0, 0], Op.I: [0, 0]}
        self.pending: list[Action] = []  # weight gradients (W) that may run: the input gradients (I) of their micro-batches have run
        self.kept = 0


class _Builder:
    """Builds the orders of all ranks tick by tick: in each tick a rank runs the ready action with the earliest slot, or else pending
    gradients of weights (W). limit: largest number of micro-batches between forward pass (F) and W on a rank, summed over both chunks.
    early: a rank that would wait may run a forward pass before its slot."""

    def __init__(self, blocks: list[_Block], microbatches: int, limit: int, *, early: bool) -> None:
        self.microbatches, self.limit, self.early = microbatches, limit, early
        self.last = 2 * len(blocks) - 1
        self.ranks = [_Rank((r, self.last - r), block) for r, block in enumerate(blocks)]
        self.orders: list[list[Action]] = [[] for _ in blocks]
        self.ended: dict[tuple[Op, int, int], int] = {}  # (op, stage, micro-batch) -> tick in which its result can be read

    def run(self) -> int:
        """Fill `orders`. Return the number of ticks."""
        left, tick = 6 * self.microbatches * len(self.ranks), 0
        while left:
            for rank, order in zip(self.ranks, self.orders, strict=True):
                action = self._chosen(rank, tick)
                if action is not None:
                    order.append(action)
                    left -= 1
            tick += 1
        return tick

    def _chosen(self, rank: _Rank, tick: int) -> Action | None:
        """Return a rank's action in this tick and record it as done; None if the rank must wait. In each tick, some rank has an action."""
        found = [
            (rank.block.slot(op, chunk, microbatch), op, chunk, microbatch)
            for op in (Op.F, Op.I)
            for chunk, microbatch in enumerate(rank.next[op])
            if microbatch < self.microbatches and self._ready(op, rank.stages[chunk], microbatch, tick)
            if op is Op.I or self._room(rank, chunk, microbatch)
        ]
        if not found:
            rank.kept -= bool(rank.pending)
            return rank.pending.pop(0) if rank.pending else None
        _, op, chunk, microbatch = min(found)
        action = Action(op, rank.stages[chunk], microbatch)
        self.ended[action[:3]] = tick + 1
        rank.next[op][chunk] += 1
        if op is Op.F:
            rank.kept += 1
        else:
            rank.pending.append(action._replace(op=Op.W))
        return action

    def _ready(self, op: Op, stage: int, microbatch: int, tick: int) -> bool:
        if op is Op.F:
            return stage == 0 or self.ended.get((Op.F, stage - 1, microbatch), tick + 1) <= tick
        after = (Op.F, stage, microbatch) if stage == self.last else (Op.I, stage + 1, microbatch)
        return self.ended.get(after, tick + 1) <= tick

    def _room(self, rank: _Rank, chunk: int, microbatch: int) -> bool:
        """Return whether this forward pass (F) may run: if memory is free for it, and all F of the other chunk with earlier slots have run.
        With `early` it may also overtake such F, if no W is pending and the overtaken F will still fit into memory."""
        if rank.kept >= self.limit:
            return False
        slot, other = rank.block.slot(Op.F, chunk, microbatch), 1 - chunk
        overtaken = range(rank.next[Op.F][other], self.microbatches)
        for late in overtaken:
            late_slot = rank.block.slot(Op.F, other, late)
            if late_slot > slot:
                break
            if not self.early or (rank.pending and any(rank.next[Op.I])):
                return False
            overtaking = sum(rank.block.slot(Op.F, chunk, n) >= late_slot for n in range(microbatch + 1))
            if rank.block.in_flight(late_slot, self.microbatches) + overtaking + 1 > self.limit:
                return False
        return True
