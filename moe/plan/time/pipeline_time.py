"""Predicts the seconds of a pipeline from each rank's time for one micro-batch.

closed form   if the schedule has one (`seconds` in the catalog), such as sum t + (m - 1) max t for 1F1B
otherwise     the project's simulator; a long step is simulated for a few rounds of micro-batches, because all later rounds take
              the same time
least         a lower bound for every order of actions, quick enough to rule out plans without simulation. It is the maximum of the time
              of one micro-batch through all stages and, for each rank, the time before its first forward pass + the time of its actions
              + the time from its last input gradient to the end
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

from moe.plan.job.in_flight import made, possible, steady
from moe.plan.job.network import Plan
from parallel.pipeline.schedule import COMPUTE, Action, Op, folded, stage_complete_at
from parallel.pipeline.schedules import closed_form, kind_of, placed
from parallel.pipeline.schedules.kind import PassTimes, Placed
from parallel.pipeline.simulator.simulate import costs, makespan

MOST_WEIGHTS = 0.99  # largest fraction of the backward pass's time that weight gradients may take, so that input gradients take some time
Times = Sequence[float]  # seconds of one micro-batch on each rank or stage
Apart = tuple[Times, Times]  # (forward, backward) seconds of one micro-batch on each stage
Rounded = tuple[float, ...]  # times of the stages in rounding units (`unit` in pipeline_time)
How = Literal["simulated", "least", "alone"]  # simulated: exact; least, alone: a lower bound; only `step_time` (cost.py) tells them apart


def crossings(plan: Plan) -> int:
    """Number of messages for which a rank waits in one micro-batch's forward pass. It waits for the same number in the backward pass."""
    return 0 if plan.pp == 1 else plan.chunks


def homes_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Return for each stage the ranks that hold it."""
    return homes_at(placed(plan.schedule), plan.pp, plan.chunks)


@lru_cache(maxsize=1_000)
def homes_at(where: Placed, p: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return for each stage the ranks that hold it. where: placement of the stages on the `p` ranks."""
    if where == "both_ways":
        return tuple(tuple(sorted({stage, p - 1 - stage})) for stage in range(p))
    return tuple(folded(p)) if where == "v" else tuple((stage % p,) for stage in range(p * chunks))


def pipeline_time(
    plan: Plan, forward: Times, backward: Times, weights: Times, sent: float = 0.0, *, stages: Apart | None = None, how: How = "simulated"
) -> float:
    """Seconds from the first forward pass to the last backward pass of a step.

    forward, backward: seconds of one micro-batch on each rank. weights: seconds of weight gradients, which are part of `backward`.
    sent: seconds of a message between stages. stages: (forward, backward) seconds of each stage; None: a rank's stages take equal times.
    how: for schedules without a closed form. `simulated`: the exact time, by simulation. `least` or `alone`: a lower bound.
    """
    passes = PassTimes(forward, backward, 2 * sent * crossings(plan), plan.microbatches, plan.chunks)
    if plan.pp == 1:
        return plan.microbatches * passes.total[0]
    if (closed := closed_form(plan.schedule)) is not None:
        return closed(passes)
    share = min(MOST_WEIGHTS, sum(weights) / max(1e-12, sum(backward)))
    apart = stages or (_of_stages(plan, forward), _of_stages(plan, backward))
    unit = max(map(max, apart)) / 1000  # times are rounded to this unit, so that similar plans share a cached simulation
    f, b = (tuple(round(x / unit) for x in times) for times in apart)
    share, message = round(share, 3), round(sent / unit)
    least = _least(plan, f, b, share, message)
    return unit * (least if how != "simulated" else max(least, _simulated(plan, f, b, share, message)))


def _of_stages(plan: Plan, times: Times) -> Times:
    """Return the seconds of each stage. times: seconds of each rank, which are divided equally among its stages."""
    if placed(plan.schedule) == "both_ways":
        return times
    homes = homes_of(plan)
    return [times[rank] * plan.pp / len(homes) for (rank,) in homes]


def _least(plan: Plan, forward: Rounded, backward: Rounded, share: float, sent: float) -> float:
    """Return a lower bound of the pipeline's time for every order of actions (`least` at the top of this file). forward, backward: times of
    the stages, in rounding units. share: weight gradients' fraction of `backward`. sent: time of a message."""
    m, p = plan.microbatches, plan.pp
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    if placed(plan.schedule) == "both_ways":  # a stage's two replicas may share the micro-batches unequally
        return max(m * sum(whole) / p, sum(whole) - share * sum(backward) + 2 * (p - 1) * sent)
    homes = [rank for (rank,) in homes_of(plan)]
    inputs = [(1 - share) * b for b in backward]
    links = [sent if a != b else 0.0 for a, b in zip(homes, homes[1:], strict=False)]
    before, after = ([0.0, *accumulate(x + y for x, y in zip(times, links, strict=False))] for times in (forward, inputs))
    found = [sum(forward) + sum(inputs) + 2 * sum(links)]
    of_ranks: list[list[int]] = [[] for _ in range(p)]
    for stage, home in enumerate(homes):
        of_ranks[home].append(stage)
    for rank, mine in enumerate(of_ranks):  # the first stage of rank r is stage r
        work = m * sum([whole[stage] for stage in mine])
        put_off = m * share * sum([backward[stage] for stage in mine])
        found.append(before[rank] + max(work, work - put_off + after[rank]))
    return max(found)


def _simulated(plan: Plan, forward: Rounded, backward: Rounded, share: float, sent: float) -> float:
    p, m = plan.pp, plan.microbatches

    def seconds(microbatches: int) -> float:
        return _makespan(plan.schedule, p, microbatches, plan.chunks, forward, backward, share, sent)

    few = steady(plan.schedule, p, m)
    if m <= few + p or not kind_of(plan.schedule).steady or not possible(plan.schedule, p, few + p):
        return seconds(m)
    first = seconds(few)
    return first + (seconds(few + p) - first) * (m - few) / p


@lru_cache(maxsize=5_000)
def _makespan(
    schedule: str, ranks: int, microbatches: int, chunks: int, forward: Rounded, backward: Rounded, share: float, sent: float
) -> float:
    order = made(schedule, ranks, microbatches, chunks)
    return makespan(order, costs(forward, backward, weight_share=share), transfer_time=sent)


class Tail(NamedTuple):
    """Actions at the end of a rank's step, each as (operation, number of actions). Gradient reductions can run at the same time. after: for
    each stage of the rank, the actions after this stage's gradients are complete. late: actions after the rank's last input gradient."""

    after: tuple[tuple[tuple[str, int], ...], ...]
    late: tuple[tuple[str, int], ...]


def tails(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[Tail, ...]:
    """Return for each rank the last actions of its step (Tail). They are counted in a short step, because the number of micro-batches does
    not change them."""
    if chunks == 1 and placed(schedule) == "line" and not kind_of(schedule).splits_backward:
        return (Tail(((),), ()),) * ranks  # each rank ends with a whole backward pass, which also completes its weight gradients
    return _tails(schedule, ranks, steady(schedule, ranks, microbatches), chunks)


@lru_cache(maxsize=500)
def _tails(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[Tail, ...]:
    def after(order: Sequence[Action], at: int) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(Counter(action.op.name for action in order[at + 1 :] if action.op in COMPUTE).items()))

    found = []
    for order in made(schedule, ranks, microbatches, chunks).orders:
        last = max(at for at, action in enumerate(order) if action.op in (Op.B, Op.I))
        found.append(Tail(tuple(after(order, at) for at in sorted(stage_complete_at(order))), after(order, last)))
    return tuple(found)
