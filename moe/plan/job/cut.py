"""Cuts layers into contiguous stages by cost, so that the slowest stage, which decides the speed of the pipeline, is as fast as possible.

    costs 1 1 1 1 1 3, three stages -> (2, 3, 1): the cost of the last layer includes the head

Among cuts with equally slow slowest stages it takes the smallest sum of squares, so that no stage is slower than necessary. If several
remain, it takes the one with fewer layers on earlier stages, which keep more micro-batches in flight.

The planner tries two cuts (`layer_lists`): by work, the multiplications of a token, so that the slowest stage is as fast as possible; and
by parameters, so that the largest stage is as small as possible, if it then has at most 95 % of the parameters. Head and embedding count as
separate units, so a stage may consist of one of them: (12, 12, 0) are three stages, of which the last has only the head. With a large
vocabulary, this cut is faster (by work), or the only one that fits (by parameters).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf

from moe.plan.job import counts
from moe.plan.job.network import Network, Plan
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.grids import LINES

_EPSILON = 1e-12  # smaller relative differences are rounding errors
EMPTIER = 0.95  # the cut by parameters is tried if its largest stage has at most this fraction of the parameters in the cut by work


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Number of layers of each stage, in order. costs: cost of each layer. Raises BadInput for more stages than layers."""
    if not 1 <= stages <= len(costs):
        fix = Set("it", max(1, min(stages, len(costs))))
        raise BadInput("stages", got=stages, needed=f"1 to {len(costs)}, one a layer at most", fix=fix)
    ends = [0.0, *accumulate(costs)]
    return _least_squares(ends, stages, limit=_least_largest(ends, stages))


def empty_rank(sizes: Sequence[int], homes: Sequence[Sequence[int]]) -> int | None:
    """First rank without weights, which means without layers, embedding and head; None if every rank has weights.

    sizes: number of layers of each stage. homes: for each stage, the ranks that hold it.
    """
    held = {rank for stage, ranks in enumerate(homes) if sizes[stage] or stage in (0, len(sizes) - 1) for rank in ranks}
    return next((rank for rank in sorted({rank for ranks in homes for rank in ranks}) if rank not in held), None)


def _least_largest(ends: Sequence[float], stages: int) -> float:
    """Smallest possible cost of the slowest stage. ends: cumulative costs of the layers, from 0.

    It is the smallest sum of neighbouring layers with which `stages` stages suffice.
    """
    count = len(ends) - 1
    sums = sorted({ends[b] - ends[a] for a in range(count) for b in range(a + 1, count + 1)})
    return sums[bisect_left(sums, True, key=lambda most: _needed(ends, most * (1 + _EPSILON)) <= stages)]


def _needed(ends: Sequence[float], most: float) -> int:
    """Number of stages needed if each is filled up to cost `most`; the number of layers plus one if a layer alone exceeds it."""
    at, found, count = 0, 0, len(ends) - 1
    while at < count:
        further = bisect_right(ends, ends[at] + most, lo=at) - 1
        if further == at:
            return count + 1
        at, found = further, found + 1
    return found


def _least_squares(ends: Sequence[float], stages: int, *, limit: float) -> tuple[int, ...]:
    """Number of layers of each stage: of all cuts with stage costs up to `limit`, the cut with the least sum of squared costs."""
    count = len(ends) - 1
    # best[n]: layers n and later cut into the stages handled so far, the last ones: (least sum of squared costs, layers of the first one)
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


def layer_lists(network: Network, plan: Plan, stages: int, most: int = 2) -> tuple[tuple[int, ...], ...]:
    """At most `most` cuts (numbers of layers of each stage) that are worth trying, the cut by work first; none for too few layers."""
    if stages > network.layers or most < 1:
        return ()
    if most == 1:
        return (_by_work(network, stages),)
    tensor = "1d" if plan.tensor in LINES or plan.tensor == "sliced" else plan.tensor  # these kinds cut matrices equally
    return _lists(network, stages, plan.tp, tensor, plan.depth, plan.ep, plan.etp)


@lru_cache(maxsize=5_000)
def _lists(network: Network, stages: int, tp: int, tensor: str, depth: int, ep: int, etp: int) -> tuple[tuple[int, ...], ...]:
    by_work, plan = _by_work(network, stages), Plan(tp=tp, tensor=tensor, depth=depth, ep=ep, etp=etp)  # type: ignore[arg-type]
    first, last = (counts.ends(network, plan, first=begins, last=not begins).total for begins in (True, False))
    of_kind = {index in network.sparse_layers: index for index in range(network.layers)}  # kind (True: with experts) -> a layer
    total = {kind: counts.layer(network, plan, index).total for kind, index in of_kind.items()}
    held = [total[index in network.sparse_layers] for index in range(network.layers)]
    sizes = cut([first, *held, last], stages)
    by_parameters = (sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1)
    if _fullest(held, first, last, by_parameters) > EMPTIER * _fullest(held, first, last, by_work):
        return (by_work,)
    return by_work, by_parameters


@lru_cache(maxsize=1_000)
def _by_work(network: Network, stages: int) -> tuple[int, ...]:
    head = network.width * network.vocab
    end = head + network.ahead * (operations(replace(network, experts=None), 0) + 2 * network.width**2 + head)
    sizes = cut([*(operations(network, index) for index in range(network.layers)), end], stages)
    return (*sizes[:-1], sizes[-1] - 1)


def operations(network: Network, index: int) -> float:
    """Multiplications for one token in a layer's forward pass: by the active matrices, and for half of attention's (query, key) pairs."""
    n, e = network, network.experts
    active = n if e is None else replace(n, experts=replace(e, count=e.choices))
    return counts.layer(active, Plan(), index).total + n.heads * n.channels * n.length


def _fullest(held: list[float], first: float, last: float, sizes: tuple[int, ...]) -> float:
    """Parameters of the largest stage. held: parameters of each layer. first, last: of embedding, head. sizes: layers in each stage."""
    of_stage = [sum(held[a:b]) for a, b in pairwise((0, *accumulate(sizes)))]
    of_stage[0] += first
    of_stage[-1] += last
    return max(of_stage)
