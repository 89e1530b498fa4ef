"""Cuts layers into contiguous pipeline stages such that the stage with the largest cost, which limits the speed, is as small as possible.

    costs 1 1 1 1 1 3, three stages -> (2, 3, 1): the cost of the last layer includes the head

Among cuts with the same largest cost, the cut with the least sum of squared costs is taken. Among these, it is the cut with fewer layers on
early stages, because early stages keep more micro-batches in flight.

The planner tries two cuts (`layer_lists`). The cut by work minimizes the multiplications of the slowest stage. The cut by parameters
minimizes the parameters of the largest stage. It is tried only if it makes that stage at least 5 % smaller than the cut by work does. The
cut by parameters treats head and embedding like layers, so a stage may have no layers: in (12, 12, 0), the last stage has only the head.
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

_EPSILON = 1e-12  # costs that differ by less than this fraction count as equal
EMPTIER = 0.95  # the cut by parameters is tried if its largest stage is at most this fraction of the largest stage in the cut by work


def cut(costs: Sequence[float], stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, in order. costs: cost of each layer. Raises BadInput for more stages than layers."""
    if not 1 <= stages <= len(costs):
        fix = Set("it", max(1, min(stages, len(costs))))
        raise BadInput("stages", got=stages, needed=f"1 to {len(costs)}, at most one for each layer", fix=fix)
    ends = [0.0, *accumulate(costs)]
    return _least_squares(ends, stages, limit=_least_largest(ends, stages))


def empty_rank(sizes: Sequence[int], homes: Sequence[Sequence[int]], *, ends: bool = True) -> int | None:
    """Return the first rank that has no layer, embedding or head; with `ends` false, the first that has no layer. None if there is no such
    rank. sizes: number of layers of each stage. homes: for each stage, the ranks that hold it."""
    if min(sizes) > 0:
        return None
    held = {rank for stage, ranks in enumerate(homes) if sizes[stage] or ends and stage in (0, len(sizes) - 1) for rank in ranks}
    return next((rank for rank in sorted({rank for ranks in homes for rank in ranks}) if rank not in held), None)


def _least_largest(ends: Sequence[float], stages: int) -> float:
    """Return the smallest cost C such that the layers can be cut into `stages` stages of cost C at most. ends: cumulative costs, from 0."""
    count = len(ends) - 1
    sums = sorted({ends[b] - ends[a] for a in range(count) for b in range(a + 1, count + 1)})
    return sums[bisect_left(sums, True, key=lambda most: _needed(ends, most * (1 + _EPSILON)) <= stages)]


def _needed(ends: Sequence[float], most: float) -> int:
    """Return the least number of stages that each cost at most `most`. If a single layer costs more, return the number of layers + 1. ends:
    as for `_least_largest`."""
    at, found, count = 0, 0, len(ends) - 1
    while at < count:
        further = bisect_right(ends, ends[at] + most, lo=at) - 1
        if further == at:
            return count + 1
        at, found = further, found + 1
    return found


def _least_squares(ends: Sequence[float], stages: int, *, limit: float) -> tuple[int, ...]:
    """Return the number of layers of each stage. Among all cuts in which no stage costs more than `limit`, it is the cut with the least sum
    of squared costs. ends: as for `_least_largest`."""
    count = len(ends) - 1
    # best[n]: the best cut of layers n and above into `left` stages: (sum of squared costs, number of layers of its first stage)
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
    """Return at most `most` cuts into stages for the planner to try. A cut is a tuple of numbers of layers, one for each stage. The first
    cut balances the stages' work, the second their parameters."""
    if stages > network.depth or most < 1:
        return ()
    if most == 1:
        return (_by_work(network, stages),)
    tensor = "1d" if plan.tensor in LINES or plan.tensor == "sliced" else plan.tensor  # `sliced` divides matrices among ranks as `1d` does
    return _lists(network, stages, plan.tp, tensor, plan.depth, plan.ep, plan.etp)


@lru_cache(maxsize=5_000)
def _lists(network: Network, stages: int, tp: int, tensor: str, depth: int, ep: int, etp: int) -> tuple[tuple[int, ...], ...]:
    by_work, plan = _by_work(network, stages), Plan(tp=tp, tensor=tensor, depth=depth, ep=ep, etp=etp)  # type: ignore[arg-type]
    first, last = (counts.ends(network, plan, first=begins, last=not begins).total for begins in (True, False))
    kinds = [(index < network.before, index in network.with_experts) for index in range(network.depth)]
    # (in encoder, with experts) -> one layer of this kind, as (stack, index in the stack)
    of_kind = dict(zip(kinds, map(network.at, range(network.depth)), strict=True))
    total = {kind: counts.layer(run, plan, number).total for kind, (run, number) in of_kind.items()}
    held = [total[kind] for kind in kinds]
    sizes = cut([first, *held, last], stages)
    by_parameters = (sizes[0] - 1, *sizes[1:-1], sizes[-1] - 1)
    if _fullest(held, first, last, by_parameters) > EMPTIER * _fullest(held, first, last, by_work):
        return (by_work,)
    return by_work, by_parameters


@lru_cache(maxsize=1_000)
def _by_work(network: Network, stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage in the cut by work. In it, the head counts as one more layer of the last stage."""
    head = network.width * network.vocab
    end = head + network.ahead * (operations(replace(network, experts=None), 0) + 2 * network.width**2 + head)
    layers = (network.at(index) for index in range(network.depth))
    sizes = cut([*(run.length / network.length * operations(run, number) for run, number in layers), end], stages)
    return (*sizes[:-1], sizes[-1] - 1)


def operations(network: Network, index: int) -> float:
    """Number of multiplications in a layer's forward pass for one token: one for each parameter that the token uses, plus those of causal
    attention. index: index of the layer in the stack `network`."""
    n, e = network, network.experts
    active = n if e is None else replace(n, experts=replace(e, count=e.choices))
    return counts.layer(active, Plan(), index).total + n.heads * n.channels * n.length


def _fullest(held: list[float], first: float, last: float, sizes: tuple[int, ...]) -> float:
    """Number of parameters of the largest stage. held: parameters of each layer. first, last: parameters of the embedding and of the head.
    sizes: number of layers of each stage."""
    of_stage = [sum(held[a:b]) for a, b in pairwise((0, *accumulate(sizes)))]
    of_stage[0] += first
    of_stage[-1] += last
    return max(of_stage)
