"""Builds a rank's order from a pattern of operations. Micro-batches are numbered automatically: each operation takes the stage's next."""

from __future__ import annotations

from collections import deque

from parallel.pipeline.schedule import Action, Op


class Counted:
    """Collects one rank's order: F, B, I and W of stages, in the order of the calls. W run in the order of their I."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._forwards: dict[int, int] = {}
        self._backwards: dict[int, int] = {}
        self._pending: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self._add(Op.F, stage, self._forwards)

    def backward(self, stage: int) -> None:
        self._add(Op.B, stage, self._backwards)

    def input(self, stage: int) -> None:
        self._pending.append(Action(Op.W, stage, self._add(Op.I, stage, self._backwards)))

    def weights(self, stage: int | None = None) -> bool:
        """Append the W of the oldest I that has none yet, of any stage or of the given one. Returns False if there is none."""
        for at, pending in enumerate(self._pending):
            if stage is None or stage == pending.stage:
                del self._pending[at]
                self.order.append(pending)
                return True
        return False

    def count(self, stage: int) -> int:
        """Number of forward passes of a stage so far."""
        return self._forwards.get(stage, 0)

    def _add(self, op: Op, stage: int, counts: dict[int, int]) -> int:
        """Append the operation for the stage's next micro-batch, and return that micro-batch."""
        microbatch = counts.get(stage, 0)
        counts[stage] = microbatch + 1
        self.order.append(Action(op, stage, microbatch))
        return microbatch
