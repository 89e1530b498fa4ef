"""V-Half and V-Min [2405.15362]: zero-bubble schedules on a V, with half or a third of 1F1B's activations.

The number of micro-batches in flight is a micro-batch's lifetime divided by the interval between starts. Here one starts every 6 slots,
because a rank runs six operations for it (F, I and W of its two stages). The building block gives its slots on rank r, and repeats every
6 slots:

              F down     F up           I up                I down
    V-Half    2 r        3 p - 2 - r    3 p - 1 + g + 2 r    6 p - 2 + g - r     g = 3 for an even p, else 0
    V-Min     r          2 p - 1 - r    2 p + g + r          4 p - 1 + g - r     g = 2 where 3 divides p, else 0

On a V, a rank that waits long for one of its stages waits little for the other. So all ranks keep equally many micro-batches until W,
(p + 2) // 2 in V-Half and (p + 4) // 3 in V-Min, while 1F1B's first rank keeps p. The gap g prevents two actions in one slot; W takes
the free slots.

The order is made from the block tick by tick: a rank takes the ready action with the earliest slot, within the memory that the block
needs, or W if none is ready. Two orders are tried, and the shorter one is taken: in one, forward passes keep the block's order; in the
other, they may start earlier in waits if the passes that they overtake still fit. With F = I = W and m >= p, idle slots are 3 p - 4
(3 p - 5 for an even p) of 6 m in V-Half, and at most 4 p - 5 (4 p - 7 if 3 divides p) in V-Min: the paper's p / 2 m and 2 p / 3 m.
"""

from __future__ import annotations

from typing import NamedTuple

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, folded

EVERY = 6  # slots between the starts of two micro-batches


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Build V-Half: half of 1F1B's activations on every rank, and about half of its bubble."""
    gap = 0 if ranks % 2 else 3
    blocks = [_Block((2 * r, 3 * ranks - 2 - r), (6 * ranks - 2 + gap - r, 3 * ranks - 1 + gap + 2 * r)) for r in range(ranks)]
    return _squeezed("v_half", blocks, microbatches, kept=2 * ((ranks + 2) // 2))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Build V-Min: a third of 1F1B's activations on every rank, and about two thirds of its bubble."""
    gap = 0 if ranks % 3 else 2
    blocks = [_Block((r, 2 * ranks - 1 - r), (4 * ranks - 1 + gap - r, 2 * ranks + gap + r)) for r in range(ranks)]
    return _squeezed("v_min", blocks, microbatches, kept=2 * ((ranks + 4) // 3))


class _Block(NamedTuple):
    """Slots of micro-batch 0 on one rank. forward, input: those of F and of I, each (of chunk 0, down; of chunk 1, up)."""

    forward: tuple[int, int]
    input: tuple[int, int]

    def slot(self, op: Op, chunk: int, microbatch: int) -> int:
        return (self.forward if op is Op.F else self.input)[chunk] + EVERY * microbatch

    def kept_before(self, slot: int, microbatches: int) -> int:
        """Return the number of F less that of I before a slot: the number of chunks kept then, if all their W are done."""
        begun, ended = (sum(min(microbatches, max(0, -((first - slot) // EVERY))) for first in way) for way in self)
        return begun - ended


def _squeezed(name: str, blocks: list[_Block], microbatches: int, *, kept: int) -> Schedule:
    tries = [_Clock(blocks, microbatches, kept, ahead=ahead) for ahead in (False, True)]
    best = min(tries, key=lambda tried: tried.run())
    return flushed(name, folded(len(blocks)), microbatches, best.orders)


class _Rank:
    """Progress of one rank. next: F or I -> next micro-batch of chunks 0 and 1. pending: W to do. kept: number of chunks in memory."""

    def __init__(self, stages: tuple[int, int], block: _Block) -> None:
        self.stages, self.block = stages, block
        self.next = {Op.F: [0, 0], Op.I: [0, 0]}
        self.pending: list[Action] = []
        self.kept = 0


class _Clock:
    """Makes all orders tick by tick: in a tick, a rank does one action or waits. kept: most chunks in a rank's memory. ahead: F may leave
    the block's order during waits."""

    def __init__(self, blocks: list[_Block], microbatches: int, kept: int, *, ahead: bool) -> None:
        self.microbatches, self.limit, self.ahead = microbatches, kept, ahead
        self.last = 2 * len(blocks) - 1
        self.ranks = [_Rank((r, self.last - r), block) for r, block in enumerate(blocks)]
        self.orders: list[list[Action]] = [[] for _ in blocks]
        self.ended: dict[tuple[Op, int, int], int] = {}

    def run(self) -> int:
        """Fill `orders`. Returns the number of ticks."""
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
        """Return a rank's action in this tick, and record it as done; None if the rank must wait.

        The ranks never all wait: the remaining action with the earliest slot of all is ready, and fits once its rank's W are done.
        """
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
        """Return True if a forward pass may run now: it fits into memory, and so will those of the other chunk that have earlier slots."""
        if rank.kept >= self.limit:
            return False
        slot, other = rank.block.slot(Op.F, chunk, microbatch), 1 - chunk
        overtaken = range(rank.next[Op.F][other], self.microbatches)
        for late in overtaken:
            its = rank.block.slot(Op.F, other, late)
            if its > slot:
                break
            if not self.ahead or (rank.pending and any(rank.next[Op.I])):
                return False
            early = microbatch + 1 - sum(rank.block.slot(Op.F, chunk, n) < its for n in range(microbatch + 1))
            if rank.block.kept_before(its, self.microbatches) + early + 1 > self.limit:
                return False
        return True
