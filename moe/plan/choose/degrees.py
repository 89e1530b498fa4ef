"""Finds the sets of degrees (pp, tp, sp, dp, ep) that can have the fastest plan: the first of two search rounds (planned.py).

Like the ranking (choose.py), the search is a best-first branch and bound. Each plan has a lower bound of its step time. The plan with the
smallest bound takes its next step:

    ideal time, without bubbles -> bound of the fastest schedule -> fits? -> bound with its recompute -> tighter bound -> add its set

So sets are added in the order of their bounds. Once a set is added, its other plans are skipped. Once there are enough sets, the search
ends at the first bound above the exact seconds of the fastest plan so far.

Of the settings other than degrees, plans have only a few values (FIRST). A plan is judged with its fastest schedule, but its memory with
1F1B; the other schedules of `Space` need at least as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import NamedTuple

from moe.plan.choose.candidates import Degrees, Space, degrees_of
from moe.plan.choose.choose import Held, Ranking, Refusals, Refused, too_little_memory
from moe.plan.choose.legal import advice, refusal
from moe.plan.job.cut import layer_lists
from moe.plan.job.network import Network, Plan, Recomputed
from moe.plan.time.pipeline_time import How

SMALL = 32  # largest number of devices for which micro-batches above FIRST.largest_microbatch are tried as well
FIRST = Space(
    engines=("zero1", "fsdp"),
    tensors=("sliced", "1d", "2d", "3d"),
    sequences=("ring",),
    schedules=(("1f1b", 1),),
    lists=1,
    etp=(1,),
    largest_microbatch=4,
)


class Found(NamedTuple):
    """Sets of degrees, the most promising first. counts: a Ranking without ranked plans, for its numbers: plans that were tried, that fit,
    and that were refused."""

    degrees: tuple[Degrees, ...]
    counts: Ranking


def fastest_degrees(
    network: Network,
    plans: Iterable[Plan],
    *,
    held: Held,
    ideal: Callable[[Plan], float],
    seconds: Mapping[How, Callable[[Plan], float]],
    schedules: Sequence[tuple[str, int]],
    devices_per_node: int,
    count: int,
    recompute: Sequence[Recomputed] = ("none", "selective", "full"),
) -> Found:
    """Return the sets of degrees that can have the fastest plan. Returns at least `count` sets, or all that have a plan that fits, if these
    are fewer. Sets that have only plans that are not recommended come last.

    plans: with schedule 1F1B. ideal: returns a lower bound of a step's seconds with any schedule. seconds: functions that return a step's
    exact seconds (`simulated`) or a lower bound (`alone`, and the tighter `least`). schedules: (name, stages on each rank). recompute:
    kinds in order of preference; the last needs the least memory. held: computes the memory of plans.
    """

    @cache
    def scheduled(plan: Plan) -> list[Plan]:
        every = (plan.but(schedule=name, chunks=chunks) for name, chunks in schedules) if plan.pp > 1 else (plan,)
        cuts = ((one, layer_lists(network, one, one.pp * one.chunks, 1)) for one in every)
        made = (one.but(stage_layers=cut[0]) if one.pp > 1 else one for one, cut in cuts if cut)
        return [one for one in made if refusal(network, one) is None]

    def least(how: How, plan: Plan) -> float:
        return min((seconds[how](one) for one in scheduled(plan)), default=inf)

    refused, legal, fitting = Refusals(), list[Plan](), 0
    for plan in plans:
        if (reason := refusal(network, plan)) is None:
            legal.append(plan.but(recompute=recompute[0]))
        else:
            refused.add(Refused(reason, 1, plan))
    # (whether not recommended, lower bound of a training step's seconds, number of bounds computed after `ideal`, index in `legal`)
    waiting = [(_against(plan, devices_per_node), ideal(plan), 0, number) for number, plan in enumerate(legal)]
    heapify(waiting)
    found: dict[Degrees, None] = {}
    fastest = inf
    while waiting:
        against, value, step, number = waiting[0]
        plan = legal[number]
        if len(found) >= count and (against or value > fastest):
            break
        if degrees_of(plan) in found:
            heappop(waiting)
        elif step == 0:
            heapreplace(waiting, (against, least("alone", plan), 1, number))
        elif step == 1:
            fits, size = held.first_that_fits(plan, recompute)
            if size > held.limit_bytes:
                refused.add(too_little_memory(fits, size - held.limit_bytes))
                heappop(waiting)
            else:
                fitting, legal[number] = fitting + 1, fits
                heapreplace(waiting, (against, least("alone", fits), 2, number))
        elif step == 2:
            heapreplace(waiting, (against, least("least", plan), 3, number))
        else:
            found[degrees_of(plan)] = None
            if value < fastest and not against:
                exact = (seconds["simulated"](one) for one in scheduled(plan) if held.held_bytes(one) <= held.limit_bytes)
                fastest = min(fastest, *exact, inf)
    tried = fitting + sum(one.count for one in refused.values())
    return Found(tuple(found), Ranking(tried, fitting, (), refused.sorted()))


def _against(plan: Plan, devices_per_node: int) -> bool:
    return advice(plan, devices_per_node=devices_per_node) is not None
