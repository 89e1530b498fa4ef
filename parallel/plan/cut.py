"""Cuts layers into contiguous stages by cost, so that the slowest stage, which sets a pipeline's pace, is as fast as possible.

    costs 1 1 1 1 1 3, three stages -> (2, 3, 1): the last layer has the head with it

Among cuts with the same slowest stage it takes the smallest sum of squares, so that no stage is slower than necessary. Among those it
takes the one with fewer units on earlier stages, which keep more micro-batches in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf

from parallel.errors import BadInput

_EPSILON = 1e-12  # relative: smaller differences are rounding errors


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """The number of units (layers) of each stage, in order. Raises BadInput for more stages than units."""
    if not 1 <= stages <= len(costs):
        fix = f"set stages to {max(1, min(stages, len(costs)))}"
        raise BadInput("stages", got=stages, needed=f"1 to {len(costs)}, one a layer at most", fix=fix)
    ends = [0.0, *accumulate(costs)]
    slowest = _best(ends, stages, limit=inf)
    return _best(ends, stages, limit=max(ends[b] - ends[a] for a, b in zip(_places(slowest), _places(slowest)[1:], strict=False)))


def empty_rank(sizes: Sequence[int], homes: Sequence[Sequence[int]]) -> int | None:
    """The first rank with neither a layer nor the first or last stage, which would hold no weights. `homes`: of each stage its ranks."""
    held = {rank for stage, ranks in enumerate(homes) if sizes[stage] or stage in (0, len(sizes) - 1) for rank in ranks}
    return next((rank for rank in sorted({rank for ranks in homes for rank in ranks}) if rank not in held), None)


def _places(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts)]


def _best(ends: Sequence[float], stages: int, *, limit: float) -> tuple[int, ...]:
    """The cut that minimises the largest stage; with a limit, the one that minimises the sum of squares of stages within the limit."""
    count = len(ends) - 1
    # best[n]: the units from n on, cut into the stages handled so far (last ones first): (value, size of the first of these stages)
    best: list[tuple[float, int]] = [(inf, 0)] * count + [(0.0, 0)]
    sizes: list[list[tuple[float, int]]] = []
    for left in range(stages):
        found = [(inf, 0)] * (count + 1)
        for start in range(count - left):
            for size in range(1, count - left - start + 1):
                cost = ends[start + size] - ends[start]
                rest = best[start + size][0]
                value = max(cost, rest) if limit == inf else cost**2 + rest
                if cost <= limit * (1 + _EPSILON) and value < found[start][0] * (1 - _EPSILON):
                    found[start] = (value, size)
        best = found
        sizes.append(found)
    counts, start = [], 0
    for found in reversed(sizes):
        counts.append(found[start][1])
        start += counts[-1]
    return tuple(counts)
