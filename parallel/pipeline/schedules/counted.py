"""Builds a rank's order from a pattern of operations: the micro-batches of each stage are counted automatically."""

from __future__ import annotations

from collections import Counter, deque

from parallel.pipeline.schedule import Action, Op


class Counted:
    """Collects one rank's order. `weights` runs the deferred weight gradients, in the order in which their I deferred them."""

    def __init__(self) -> None:
        self.order: list[Action] = []
        self._next: Counter[tuple[bool, int]] = Counter()
        self._owed: deque[Action] = deque()

    def forward(self, stage: int) -> None:
        self._add(Op.F, stage)

    def backward(self, stage: int) -> None:
        self._add(Op.B, stage)

    def input(self, stage: int) -> None:
        self._owed.append(self._add(Op.I, stage)._replace(op=Op.W))

    def weights(self, stage: int | None = None) -> None:
        """One deferred weight gradient, if there is any: the oldest, or the oldest of a stage."""
        owed = next((w for w in self._owed if stage in (None, w.stage)), None)
        if owed is not None:
            self._owed.remove(owed)
            self.order.append(owed)

    def count(self, stage: int) -> int:
        """Number of forwards of a stage so far."""
        return self._next[True, stage]

    def _add(self, op: Op, stage: int) -> Action:
        key = (op is Op.F, stage)
        action = Action(op, stage, self._next[key])
        self._next[key] += 1
        self.order.append(action)
        return action
