"""Builds a rank's order from a pattern of operations: the micro-batches of each stage are counted automatically."""

from __future__ import annotations

from collections import deque

from parallel.pipeline.schedule import Action, Op


class Counted:
    """Collects one rank's order. `weights` runs the deferred weight gradients, in the order in which their I deferred them."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._next: dict[tuple[bool, int], int] = {}
        self._owed: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self._add(Op.F, stage)

    def backward(self, stage: int) -> None:
        self._add(Op.B, stage)

    def input(self, stage: int) -> None:
        self._owed.append(Action(Op.W, stage, self._add(Op.I, stage)))

    def weights(self, stage: int | None = None) -> None:
        """One deferred weight gradient, if there is any: the oldest, or the oldest of a stage."""
        for at, owed in enumerate(self._owed):
            if stage is None or stage == owed.stage:
                del self._owed[at]
                self.order.append(owed)
                return

    def count(self, stage: int) -> int:
        """Number of forwards of a stage so far."""
        return self._next.get((True, stage), 0)

    def _add(self, op: Op, stage: int) -> int:
        """Append the next of a stage; returns its micro-batch."""
        key = (op is Op.F, stage)
        microbatch = self._next.get(key, 0)
        self._next[key] = microbatch + 1
        self.order.append(Action(op, stage, microbatch))
        return microbatch
