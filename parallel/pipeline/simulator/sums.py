"""Time that a step waits for data-parallel sums of gradients, by a simulated Timeline.

Each rank's sums run one after another, each starting when its stage's gradients are complete. Only the part after the last action of all
ranks is exposed. Sums use a link but no compute, so they do not slow actions down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from parallel.pipeline.simulator.simulate import Timeline
from parallel.pipeline.sums import whole_at

Begin = Literal["stage", "rank"]  # a sum starts when its stage's gradients are complete, or after all of the rank's actions


def exposed(timeline: Timeline, seconds: Callable[[int, int], float], *, begin: Begin = "stage") -> float:
    """Time from the end of the last action to the end of the last sum. seconds: (rank, stage) -> time of the stage's sum."""
    end = max(span.end for spans in timeline.spans for span in spans)
    last = end
    for rank, spans in enumerate(timeline.spans):
        order = timeline.schedule.orders[rank]
        ends = {span.action: span.end for span in spans}
        free = max(ends.values(), default=0.0) if begin == "rank" else 0.0
        for at, stage in sorted(whole_at(order).items()):
            free = max(free, ends[order[at]]) + seconds(rank, stage)
        last = max(last, free)
    return last - end
