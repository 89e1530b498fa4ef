"""Lists all plans for training a network on a given number of ranks, and finds the degrees that can have the fastest. A plan has degrees of
parallelism, a data-parallel engine, a pipeline schedule, a kind of tensor parallelism and of sequence parallelism, and a micro-batch size.

    ranks = pp x tp x sp x dp;  ep x etp divides dp x sp x tp;  global batch = dp x micro-batch x micro-batches

A Space lists the values that are tried for each setting. legal.py then refuses the plans that cannot run.

`fastest_degrees` finds sets of degrees (pp, tp, sp, dp, ep): the first of two search rounds (planned.py). Like the ranking (choose.py),
it is a best-first branch and bound. Each plan has a lower bound of its step time. The plan with the smallest bound takes its next step:

    ideal time, without bubbles -> bound of the fastest schedule -> fits? -> bound with its recompute -> tighter bound -> add its set

So sets are added in the order of their bounds. Once a set is added, its other plans are skipped. Once there are enough sets, the search
ends at the first bound above the exact seconds of the fastest plan so far.

Of the settings other than degrees, plans have only a few values (FIRST). A plan is judged with its fastest schedule, but its memory with
1F1B; the other schedules of `Space` need at least as much.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import product
from math import inf
from typing import NamedTuple

from moe.plan.choose.choose import Held, Ranking, Refusals, Refused, too_little_memory
from moe.plan.choose.legal import advice, refusal
from moe.plan.job.cut import layer_lists
from moe.plan.job.network import Network, Plan, Recomputed
from moe.plan.time.pipeline_time import How
from parallel.data.kinds import ENGINES, PLAIN
from parallel.mesh.grids import grid
from parallel.mesh.mesh import divisors
from parallel.sequence.kinds import DEFAULT, SEQUENCES


@dataclass(frozen=True)
class Space:
    """Values that are tried for each setting of a plan. tensors, sequences: kinds of tensor and sequence parallelism.

    schedules: (name, stages on each rank). lists: largest number of different partitions of the layers into stages that are tried for each
    schedule (moe/plan/job/cut.py). largest_microbatch: upper limit of the sequences of a micro-batch; None: all divisors of a replica's
    batch are tried.
    """

    engines: tuple[str, ...] = ("ddp", "zero1", "zero2", "fsdp")
    tensors: tuple[str, ...] = ("sliced", "1d", "2d", "2.5d", "3d")
    sequences: tuple[str, ...] = ("ring", "ulysses")
    schedules: tuple[tuple[str, int], ...] = (("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb_h1", 1), ("zb_v", 2))
    lists: int = 2
    largest_tp: int = 64
    largest_sp: int = 64
    largest_pp: int = 128
    largest_microbatch: int | None = None
    etp: tuple[int, ...] = (1, 2)


def degrees(network: Network, *, world: int, space: Space) -> Iterator[tuple[int, int, int, int]]:
    """Yield all (pp, tp, sp, dp) whose product is `world`, within the limits of `space`."""
    for pp in (n for n in divisors(world) if n <= min(space.largest_pp, network.depth)):
        for tp in (n for n in divisors(world // pp) if n <= space.largest_tp):
            for sp in (n for n in divisors(world // pp // tp) if n <= space.largest_sp):
                yield pp, tp, sp, world // pp // tp // sp


class Degrees(NamedTuple):
    """Degrees of parallelism of a plan, without etp."""

    pp: int
    tp: int
    sp: int
    dp: int
    ep: int


def degrees_of(plan: Plan) -> Degrees:
    return Degrees(plan.pp, plan.tp, plan.sp, plan.dp, plan.ep)


def degree_choices(network: Network, *, world: int, global_batch: int, space: Space) -> Iterator[Degrees]:
    """Yield all degrees of parallelism of `world` ranks such that dp divides the global batch and ep divides the number of experts."""
    for pp, tp, sp, dp in degrees(network, world=world, space=space):
        if global_batch % dp == 0:
            yield from dict.fromkeys(Degrees(pp, tp, sp, dp, ep) for ep, _ in _experts(network, dp * sp * tp, space))


def candidates(
    network: Network, *, world: int, global_batch: int, base: Plan, space: Space, only: Collection[Degrees] | None = None
) -> Iterator[Plan]:
    """Yield plans for `world` ranks, including plans that cannot run. `base`: plan with the settings that `space` does not vary (precision,
    tiles). only: if given, only plans with these degrees of parallelism."""
    for pp, tp, sp, dp in degrees(network, world=world, space=space):
        if global_batch % dp:
            continue
        limit = space.largest_microbatch
        sizes = [n for n in divisors(global_batch // dp) if limit is None or n <= limit]
        experts = [one for one in _experts(network, dp * sp * tp, space) if only is None or Degrees(pp, tp, sp, dp, one[0]) in only]
        if not experts:
            continue
        schedules = space.schedules if pp > 1 else (("1f1b", 1),)
        for size, (ep, etp), (tensor, depth), sequence, (schedule, chunks) in product(
            sizes, experts, _tensors(tp, space), space.sequences if sp > 1 else (DEFAULT,), schedules
        ):
            made = base.but(
                dp=dp, tp=tp, sp=sp, pp=pp, ep=ep, etp=etp, tensor=tensor, depth=depth, sequence=sequence,
                order=SEQUENCES[sequence].orders[0],
                schedule=schedule, chunks=chunks, stage_layers=None,
                microbatch=size, microbatches=global_batch // dp // size,
            )  # fmt: skip
            lists = layer_lists(network, made, pp * chunks, space.lists) if pp > 1 else ()
            for layers, engine in product(lists or (None,), space.engines if dp * sp > 1 else (PLAIN,)):
                reshard = base.reshard or "reshard" not in ENGINES[engine].keys  # only FSDP can keep gathered weights
                yield made.but(engine=engine, reshard=reshard, stage_layers=layers)


def _tensors(tp: int, space: Space) -> list[tuple[str, int]]:
    """Return (kind, depth) for all kinds of tensor parallelism that are possible with `tp` ranks. depth: number of 2D grids that form a
    2.5D grid; 1 for other kinds."""
    if tp == 1:
        return [("1d", 1)]
    found = ((kind, depth) for kind in space.tensors for depth in (divisors(tp)[1:] if kind == "2.5d" else [1]))
    return [(kind, depth) for kind, depth in found if grid(kind, tp, depth)]


def _experts(network: Network, stage: int, space: Space) -> Iterator[tuple[int, int]]:
    """Yield all (ep, etp) such that ep divides the number of experts, and ep x etp divides `stage`. stage: number of ranks of a pipeline
    stage."""
    if network.experts is None:
        yield 1, 1
        return
    for etp in (n for n in space.etp if stage % n == 0):
        for ep in divisors(stage // etp):
            if network.experts.count % ep == 0:
                yield ep, etp


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
