"""Heuristic zero-bubble orders for unequal stages, one stage a rank (arXiv 2401.10241, section 3.1). They have four options (late, waiting,
always, skip), each on or off; `search` tries all 16 combinations. F: forward pass; I, W: gradients of inputs, of weights.

warm-up    F until memory is full or the input of the first I arrives
               late: one more F, even if it delays the first I
               waiting: the estimated end of an F includes its wait for the previous rank's result
steady     one F and one I in turn. W fills a wait if it fits, and runs before F if memory is full
               always: W also fills a wait that is shorter than W. Off: only if this rank's idle time would otherwise become the largest
               skip: a rank that is two F ahead of the next rank postpones its F if this does not increase the largest idle time
end        the remaining W. On rank 0 they start as soon as all F are done, because no rank waits for its I
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

from parallel.pipeline.schedule import Action, Op


class Alternating:
    """Builds the orders of all ranks for one setting of the options late, waiting, skip and always. The top of this file says what
    each option changes in warm-up or steady phase.
    times: for each rank, F (forward pass), I or W (gradients of inputs, of weights) -> its duration. sent: transfer time of a message.
    memory: largest number of micro-batches between their F and W on a rank; None: no limit."""

    def __init__(
        self,
        times: Sequence[dict[Op, float]],
        microbatches: int,
        *,
        sent: float = 0,
        memory: float | None = None,
        late: bool = False,
        waiting: bool = False,
        skip: bool = False,
        always: bool = True,
    ) -> None:
        self.times, self.microbatches, self.sent = times, microbatches, sent
        self.memory = microbatches if memory is None else min(microbatches, floor(memory + 1e-9))
        self.late, self.waiting, self.skip, self.always = late, waiting, skip, always
        self.ranks, self.last = range(len(times)), len(times) - 1
        self.done: list[list[Action]] = [[] for _ in times]
        self.counts = {op: [0] * len(times) for op in (Op.F, Op.I, Op.W)}  # op -> for each rank: number of its actions so far
        self.free, self.waited = [0.0] * len(times), [0.0] * len(times)  # for each rank: time at which it is free; idle time so far
        self.ended: dict[Action, float] = {}

    def orders(self) -> list[list[Action]]:
        """Return the order of each rank, without weight updates (U)."""
        self._warm_up()
        for _ in range(1, self.microbatches):
            for rank in self._ranks_with_forward():
                while self.counts[Op.F][rank] - self.counts[Op.W][rank] >= self.memory:
                    self._do(Op.W, rank)
                self._fill(rank, self._arrival(Op.F, rank))
                self._do(Op.F, rank)
            for rank in reversed(self.ranks):
                self._fill(rank, self._arrival(Op.I, rank))
                while rank == 0 and self.counts[Op.F][0] == self.microbatches and self._has_pending(0):
                    self._do(Op.W, 0)  # no rank waits for rank 0's I, so W delays nothing
                self._do(Op.I, rank)
        for rank in self.ranks:
            while self.counts[Op.W][rank] < self.microbatches:
                self._do(Op.W, rank)
        return self.done

    def _warm_up(self) -> None:
        for rank in self.ranks:
            self._do(Op.F, rank)
        ends = self._forward_ends()
        more, due = [0] * len(self.times), self.free[self.last] + self.times[self.last][Op.I]
        for rank in reversed(self.ranks[:-1]):
            while 1 + more[rank] < self.memory:
                if ends[rank][more[rank]] >= due + self.sent if self.late else ends[rank][1 + more[rank]] > due + self.sent:
                    break
                more[rank] += 1
            due = max(ends[rank][more[rank]], due + self.sent) + self.times[rank][Op.I]
        # a rank gets fewer additional F than the previous rank, or none. If that rank starts all micro-batches here: at most as many
        for rank in self.ranks[1:]:
            ahead = more[rank - 1]
            more[rank] = min(more[rank], ahead if 1 + ahead == self.microbatches else max(0, ahead - 1))
        for rank in self.ranks:
            for _ in range(more[rank]):
                self._do(Op.F, rank)
        for rank in reversed(self.ranks):
            self._do(Op.I, rank)

    def _forward_ends(self) -> list[list[float]]:
        """Return for each rank the estimated end times of its first forward passes (F), as many as memory allows. Each F starts when the
        rank's previous F ends or, if `waiting`, when its input has arrived, if that is later."""
        ends: list[list[float]] = []
        for rank in self.ranks:
            now, of = self.free[rank], [self.free[rank]]
            for j in range(1, self.memory):
                arrival = ends[rank - 1][j] + self.sent if self.waiting and rank else 0.0
                now = max(now, arrival) + self.times[rank][Op.F]
                of.append(now)
            ends.append(of)
        return ends

    def _ranks_with_forward(self) -> list[int]:
        """Return the ranks that run their next F in this round, in ascending order. If a rank skips its F, so do all previous ranks."""
        found: list[int] = []
        for rank in reversed(self.ranks):
            begun = self.counts[Op.F]
            if begun[rank] < self.microbatches:
                if self.skip and self._may_skip(rank):
                    break
                found.append(rank)
        return found[::-1]

    def _may_skip(self, rank: int) -> bool:
        begun = self.counts[Op.F]
        if rank == self.last or begun[rank] < begun[rank + 1] + 2:
            return False
        following = self.times[rank + 1]
        gap = self.free[rank + 1] + following[Op.F] + following[Op.I] + self.sent - self.free[rank]
        full = max(0, begun[rank] - self.counts[Op.W][rank] + 1 - self.memory)  # number of W that must run first to free memory for F
        took = self.times[rank][Op.F] + full * self.times[rank][Op.W]
        return gap < took and gap <= max(self.waited) - self.waited[rank]

    def _fill(self, rank: int, arrival: float) -> None:
        """Run the pending weight gradients W of a rank that end by the time `arrival`. If time is left before `arrival`, run one more W,
        which ends later, if `always` or if the rank's idle time would otherwise become the largest."""
        took = self.times[rank][Op.W]
        while self._has_pending(rank) and self.free[rank] + took <= arrival:
            self._do(Op.W, rank)
        gap = arrival - self.free[rank]
        if gap > 0 and self._has_pending(rank) and (self.always or gap > max(self.waited) - self.waited[rank]):
            self._do(Op.W, rank)

    def _has_pending(self, rank: int) -> bool:
        return self.counts[Op.W][rank] < self.counts[Op.I][rank]

    def _arrival(self, op: Op, rank: int) -> float:
        """Return the time at which the input of the rank's next `op` arrives from another rank; 0 if it needs no input from one. op: F
        (forward pass) or I (gradients of inputs)."""
        before = rank - 1 if op is Op.F else rank + 1
        if not 0 <= before <= self.last:
            return 0.0
        return self.ended[Action(op, before, self.counts[op][rank])] + self.sent

    def _do(self, op: Op, rank: int) -> None:
        action = Action(op, rank, self.counts[op][rank])
        start = self.free[rank] if op is Op.W else max(self.free[rank], self._arrival(op, rank))
        if self.done[rank]:
            self.waited[rank] += start - self.free[rank]
        self.free[rank] = self.ended[action] = start + self.times[rank][op]
        self.counts[op][rank] += 1
        self.done[rank].append(action)
