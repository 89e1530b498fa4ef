"""Cuts layers into contiguous stages by cost, so that the slowest stage, which sets a pipeline's pace, is as fast as possible.

    costs 1 1 1 1 1 3, three stages -> (2, 3, 1): the last layer has the head with it

Among cuts with the same slowest stage it takes the smallest sum of squares, so that no stage is slower than necessary. Among those it
takes the one with fewer units on earlier stages, which keep more micro-batches in flight.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import inf

from parallel.errors import BadInput
from parallel.fixes import Set

_EPSILON = 1e-12  # relative: smaller differences are rounding errors


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of units (layers) of each stage, in order. Raises BadInput for more stages than units."""
    if not 1 <= stages <= len(costs):
        fix = Set("it", max(1, min(stages, len(costs))))
        raise BadInput("stages", got=stages, needed=f"1 to {len(costs)}, one a layer at most", fix=fix)
    ends = [0.0, *accumulate(costs)]
    return _least_squares(ends, stages, limit=_least_largest(ends, stages))


def empty_rank(sizes: Sequence[int], homes: Sequence[Sequence[int]]) -> int | None:
    """The first rank with neither a layer nor the first or last stage, which would hold no weights. `homes`: of each stage its ranks."""
    held = {rank for stage, ranks in enumerate(homes) if sizes[stage] or stage in (0, len(sizes) - 1) for rank in ranks}
    return next((rank for rank in sorted({rank for ranks in homes for rank in ranks}) if rank not in held), None)


def _least_largest(ends: Sequence[float], stages: int) -> float:
    """The smallest cost of a slowest stage: of the sums of neighbouring units, sorted, the first within which the units go into stages."""
    count = len(ends) - 1
    sums = sorted({ends[b] - ends[a] for a in range(count) for b in range(a + 1, count + 1)})
    return sums[bisect_left(sums, True, key=lambda most: _needed(ends, most * (1 + _EPSILON)) <= stages)]


def _needed(ends: Sequence[float], most: float) -> int:
    """How many stages units need, each filled up to `most`; more than there are units if one of them exceeds it."""
    at, found, count = 0, 0, len(ends) - 1
    while at < count:
        further = bisect_right(ends, ends[at] + most, lo=at) - 1
        if further == at:
            return count + 1
        at, found = further, found + 1
    return found


def _least_squares(ends: Sequence[float], stages: int, *, limit: float) -> tuple[int, ...]:
    """The cut into stages of at most `limit` that minimises the sum of squares."""
    count = len(ends) - 1
    # best[n]: the units from n on, cut into the stages handled so far (last ones first): (value, size of the first of these stages)
    best: list[tuple[float, int]] = [(inf, 0)] * count + [(0.0, 0)]
    sizes: list[list[tuple[float, int]]] = []
    for left in range(stages):
        found = [(inf, 0)] * (count + 1)
        for start in range(count - left):
            for size in range(1, count - left - start + 1):
                cost = ends[start + size] - ends[start]
                if cost > limit * (1 + _EPSILON):
                    break
                value = cost**2 + best[start + size][0]
                if value < found[start][0] * (1 - _EPSILON):
                    found[start] = (value, size)
        best = found
        sizes.append(found)
    counts, start = [], 0
    for found in reversed(sizes):
        counts.append(found[start][1])
        start += counts[-1]
    return tuple(counts)
