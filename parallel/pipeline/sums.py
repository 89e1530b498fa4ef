"""When a stage's gradients are whole, and sums over replicas of the pipeline that begin then, beside the rank's other actions.

    rank 0 of interleaved, two chunks    ... 4B2 4B3 | 0B0 0B1 0B2 0B3 |
                                                     ^ stage 4 is summed from here on, stage 0 from the end

A rank of one stage has nothing left to do by then: what it sums is beside other ranks' actions alone. What several stages hold (replicas,
a tied embedding) is summed over those first, so it waits for the end. The order of actions alone says when a sum starts, so ranks that sum
together start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from parallel.pipeline.schedule import Action, Op, Schedule

if TYPE_CHECKING:
    from parallel.pipeline.runtime import Took  # which needs torch


def whole_at(order: Sequence[Action]) -> dict[int, int]:
    """Places in a rank's order after which a stage has all its gradients of the batch -> that stage."""
    last = {action.stage: at for at, action in enumerate(order) if action.op in (Op.B, Op.W)}
    return {at: stage for stage, at in last.items()}


class SumsBeside:
    """The Watcher that starts each stage's sum. `names`: of each stage's parameters that no other stage holds; `start` begins the sum of
    some, of none as well: then it puts in place what has arrived."""

    def __init__(
        self, schedule: Schedule, rank: int, names: Mapping[int, Sequence[str]], *, start: Callable[[Sequence[str]], None]
    ) -> None:
        self.stage_at, self.names, self.start = whole_at(schedule.orders[rank]), names, start

    def begin(self) -> None: ...

    def before(self, action: Action) -> None: ...

    def after(self, at: int, took: Took) -> None:
        self.start(self.names.get(self.stage_at[at], ()) if at in self.stage_at else ())
