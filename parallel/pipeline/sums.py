"""Starts the data-parallel sum of a stage's gradients as soon as they are complete, so that it overlaps with the rank's other actions.

    rank 0 of interleaved, two chunks    ... 4B2 4B3 | 0B0 0B1 0B2 0B3 |
                                                     ^ the sum of stage 4 starts here, the sum of stage 0 at the end

A rank with a single stage has no actions left at that point, so its sum overlaps only with other ranks' actions. Parameters that several
stages hold (replicas, a tied embedding) are first summed over these stages, so their sum starts after the last action. Only the order of
actions decides when a sum starts, so all ranks that take part start it at the same point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from parallel.pipeline.schedule import Action, Op, Schedule, Span, Watcher


def whole_at(order: Sequence[Action]) -> dict[int, int]:
    """Return (index in a rank's order) -> (stage whose gradients of the batch are complete after that action)."""
    last = {action.stage: at for at, action in enumerate(order) if action.op in (Op.B, Op.W)}
    return {at: stage for stage, at in last.items()}


class OverlappedSums(Watcher):
    """Watcher that starts each stage's sum.

    names: stage -> names of the parameters that no other stage holds. start: called after each action with the names of the parameters
    whose gradients are now complete (often none): it starts their sums, and stores the results of sums that have ended.
    """

    def __init__(
        self, schedule: Schedule, rank: int, names: Mapping[int, Sequence[str]], *, start: Callable[[Sequence[str]], None]
    ) -> None:
        self.stage_at, self.names, self.start = whole_at(schedule.orders[rank]), names, start

    def after(self, at: int, took: Span) -> None:
        self.start(self.names.get(self.stage_at[at], ()) if at in self.stage_at else ())
