"""The zero-bubble paper's automatic order, written from its text [2401.10241, section 3.1]. Searched orders are compared with it.

    warm-up     as many F as memory allows before the first B arrives; if a wait shorter than F remains, perhaps one F more      `one_more`
    then        one F and one B in turn on every rank
    W           into a wait of at least its length; into a shorter one if the rank's waits would otherwise become the longest of
                all ranks, or always                                                                                        `any_wait`
                and before the next F if memory is full
    skip        a rank that is more than one F ahead of the next rank omits its F, if its longest wait stays the same            `skip`
    last        the remaining W

B is the gradient of the input alone, W the gradient of the weights. The three names on the right are yes-or-no choices. The paper tries
all eight combinations and keeps the shortest order. Nothing is shared with parallel/pipeline: times are added up when actions are placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

Order = list[tuple[str, int]]  # actions of one rank: ("F", 0), ("B", 0), ("W", 0), ...


def auto(
    forward: Sequence[float], inputs: Sequence[float], weights: Sequence[float], microbatches: int, *, sent: float, memory: int
) -> tuple[float, list[Order]]:
    """Return (seconds from first start to last end, actions of each rank) of the shortest of the eight orders, with one stage on each rank.
    `sent`: seconds of a message. `memory`: number of micro-batches that a rank may keep from F to W."""
    tries = (_Growing(forward, inputs, weights, microbatches, sent, memory, *choice).grown() for choice in product((False, True), repeat=3))
    return min(tries, key=lambda found: found[0])


class _Growing:
    def __init__(
        self, forward: Sequence[float], inputs: Sequence[float], weights: Sequence[float], microbatches: int, sent: float, memory: int,
        one_more: bool, any_wait: bool, skip: bool,
    ) -> None:  # fmt: skip
        self.length = {"F": forward, "B": inputs, "W": weights}
        self.p, self.m, self.sent, self.memory = len(forward), microbatches, sent, memory
        self.one_more, self.any_wait, self.skip = one_more, any_wait, skip
        self.orders: list[Order] = [[] for _ in forward]
        self.ends: list[dict[tuple[str, int], float]] = [{} for _ in forward]
        self.clock, self.waits = [0.0] * self.p, [0.0] * self.p

    def grown(self) -> tuple[float, list[Order]]:
        for rank, count in enumerate(self._warm_up()):
            for _ in range(count):
                self._place("F", rank)
        while any(self._done("B", rank) < self.m for rank in range(self.p)):
            for rank in reversed(range(self.p)):
                self._fill(rank, "B")
                self._place("B", rank)
            for rank in self._forward_ranks():
                while self._done("F", rank) - self._done("W", rank) == self.memory:
                    self._place("W", rank)
                self._fill(rank, "F")
                self._place("F", rank)
        for rank in range(self.p):
            while self._done("W", rank) < self.m:
                self._place("W", rank)
        return max(self.clock), self.orders

    def _warm_up(self) -> list[int]:
        """Return the number of forward passes of each rank before its first backward pass."""
        forward, most = self.length["F"], min(self.m, self.memory)
        ends: list[list[float]] = []  # [rank][micro-batch]: end of the forward pass if ranks ran only forward passes
        for rank in range(self.p):
            ends.append([])
            for j in range(most):
                ready = ends[rank - 1][j] + self.sent if rank else 0.0
                ends[rank].append(max(ready, ends[rank][-1] if j else 0.0) + forward[rank])
        counts, first = [1] * self.p, ends[-1][0] + self.length["B"][-1]
        for rank in reversed(range(self.p - 1)):
            arrives = first + self.sent
            while counts[rank] < most and (
                ends[rank][counts[rank]] <= arrives or (self.one_more and ends[rank][counts[rank] - 1] < arrives)
            ):
                counts[rank] += 1
            first = max(arrives, ends[rank][counts[rank] - 1]) + self.length["B"][rank]
        for rank in range(1, self.p):  # at most one less than the previous rank, unless that rank has run all its forward passes
            if counts[rank - 1] < self.m:
                counts[rank] = max(1, min(counts[rank], counts[rank - 1] - 1))
        return counts

    def _done(self, kind: str, rank: int) -> int:
        return sum(of == kind for of, _ in self.orders[rank])

    def _arrives(self, kind: str, rank: int, microbatch: int) -> float:
        source = rank - 1 if kind == "F" else rank + 1
        if kind == "W" or not 0 <= source < self.p:
            return 0.0
        return self.ends[source][kind, microbatch] + self.sent

    def _place(self, kind: str, rank: int) -> None:
        microbatch = self._done(kind, rank)
        start = max(self.clock[rank], self._arrives(kind, rank, microbatch))
        if self.orders[rank]:
            self.waits[rank] += start - self.clock[rank]
        self.clock[rank] = self.ends[rank][kind, microbatch] = start + self.length[kind][rank]
        self.orders[rank].append((kind, microbatch))

    def _fill(self, rank: int, kind: str) -> None:
        """Place W actions into the rank's wait before its next action of this kind."""
        arrives = self._arrives(kind, rank, self._done(kind, rank))
        while (gap := arrives - self.clock[rank]) > 0 and self._done("W", rank) < self._done("B", rank):
            if gap < self.length["W"][rank] and not (self.any_wait or self.waits[rank] + gap > max(self.waits)):
                return
            self._place("W", rank)

    def _forward_ranks(self) -> list[int]:
        """Return the ranks that run a forward pass in this turn: the ranks with passes left, after the last rank that skips its pass."""
        found = []
        for rank in reversed(range(self.p)):
            if self._done("F", rank) < self.m:
                if self.skip and rank < self.p - 1 and self._without_wait(rank):
                    break
                found.append(rank)
        return found[::-1]

    def _without_wait(self, rank: int) -> bool:
        """Return whether to wait for the next backward pass is shorter than the next forward pass, and no rank's waits become the longest.
        Only if the next rank is at least two forward passes behind."""
        after = rank + 1
        if self._done("F", rank) - self._done("F", after) < 2:
            return False
        gap = self.clock[after] + self.length["F"][after] + self.length["B"][after] + self.sent - self.clock[rank]
        full = self._done("F", rank) - self._done("W", rank) == self.memory  # if so, W runs before F to free memory
        took = self.length["F"][rank] + (self.length["W"][rank] if full else 0.0)
        return gap < took and self.waits[rank] + gap <= max(self.waits)
