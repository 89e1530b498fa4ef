"""How long a step waits for sums of gradients over replicas of the pipeline, on the simulator's clock.

    exposed(timeline, seconds)      a rank's sums go one after another, each when its stage's gradients are whole; what is left of the last
                                    one when all ranks have done their actions

Sums take a link and no core: they do not slow actions down.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from parallel.pipeline.simulator.simulate import Timeline
from parallel.pipeline.sums import whole_at

Begin = Literal["stage", "rank"]  # when a stage's gradients are whole, or after all of the rank's actions


def exposed(timeline: Timeline, seconds: Callable[[int, int], float], *, begin: Begin = "stage") -> float:
    """Time from the last action's end to the last sum's. `seconds(rank, stage)`: of the sum of one stage's gradients, in the timeline's
    unit."""
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
