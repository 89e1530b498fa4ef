"""Predicts the seconds of a pipeline from its ranks' times for one micro-batch, by closed forms or the simulator. Also gives a lower bound.

    closed form   if the schedule has one (`seconds` in the catalog), such as sum t + (m - 1) max t for 1F1B
    otherwise     the project's simulator; for long steps, three rounds and one more, which repeats

    least         lower bound, the largest of: for each rank, the time before its first forward pass, all of its work, and the time after
                  its last input gradient; the time of one micro-batch through all stages. It is computed in microseconds, so that the
                  planner need not simulate plans that it rules out

The bound holds for every order of actions, because it uses only what actions wait for.
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
from parallel.pipeline.schedules.catalog import closed_form, kind_of, placed
from parallel.pipeline.schedules.kind import PassTimes, Placed
from parallel.pipeline.simulator.simulate import costs, makespan

MOST_WEIGHTS = 0.99  # largest fraction of a backward pass that may compute weight gradients
How = Literal["simulated", "least", "alone"]  # `least`, `alone`: lower bounds (see step_time)


def crossings(plan: Plan) -> int:
    """Number of messages that a rank waits for in each direction for each micro-batch."""
    return 0 if plan.pp == 1 else plan.chunks


def head_rank(plan: Plan) -> int:
    """Rank of the last stage; with placement `v` this is rank 0."""
    return 0 if plan.pp > 1 and placed(plan.schedule) == "v" else plan.pp - 1


def homes_of(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """For each stage, the ranks that hold it."""
    return homes_at(placed(plan.schedule), plan.pp, plan.chunks)


@lru_cache(maxsize=1_000)
def homes_at(where: Placed, p: int, chunks: int) -> tuple[tuple[int, ...], ...]:
    """For each stage, the ranks that hold it. where: placement of stages on the p ranks."""
    if where == "both_ways":
        return tuple(tuple(sorted({stage, p - 1 - stage})) for stage in range(p))
    return tuple(folded(p)) if where == "v" else tuple((stage % p,) for stage in range(p * chunks))


def pipeline_time(
    plan: Plan,
    forward: Sequence[float],
    backward: Sequence[float],
    weights: Sequence[float],
    sent: float = 0.0,
    *,
    stages: tuple[Sequence[float], Sequence[float]] | None = None,
    how: How = "simulated",
) -> float:
    """Seconds from the first forward to the last backward pass.

    forward, backward: seconds of one micro-batch on each rank. weights: seconds of weight gradients in `backward` (simulations use their
    fraction over all ranks). sent: seconds of a message, which a rank waits for once in each direction. stages: (forward, backward)
    seconds of each stage, used in simulations if ranks have several stages (None: a rank's stages are equal). how: `least` and `alone`
    give the lower bound if there is no closed form.
    """
    passes = PassTimes(forward, backward, 2 * sent * crossings(plan), plan.microbatches, plan.chunks)
    if plan.pp == 1:
        return plan.microbatches * passes.total[0]
    if (closed := closed_form(plan.schedule)) is not None:
        return closed(passes)
    share = min(MOST_WEIGHTS, sum(weights) / max(1e-12, sum(backward)))
    apart = stages or (_of_stages(plan, forward), _of_stages(plan, backward))
    unit = max(map(max, apart)) / 1000  # times are rounded to this, so that similar plans share a cached simulation
    f, b = (tuple(round(x / unit) for x in way) for way in apart)
    share, message = round(share, 3), round(sent / unit)
    least = _least(plan, f, b, share, message)
    return unit * (least if how != "simulated" else max(least, _simulated(plan, f, b, share, message)))


def _of_stages(plan: Plan, times: Sequence[float]) -> Sequence[float]:
    """Seconds of each stage. times: seconds of each rank, which are divided equally among its stages."""
    if placed(plan.schedule) == "both_ways":
        return times
    homes = homes_of(plan)
    return [times[rank] * plan.pp / len(homes) for (rank,) in homes]


def _least(plan: Plan, forward: tuple[int, ...], backward: tuple[float, ...], share: float, sent: float) -> float:
    m, p = plan.microbatches, plan.pp
    whole = [f + b for f, b in zip(forward, backward, strict=True)]
    if placed(plan.schedule) == "both_ways":  # micro-batches can be divided between a stage's replicas in any way
        return max(m * sum(whole) / p, sum(whole) - share * sum(backward) + 2 * (p - 1) * sent)
    homes = [rank for (rank,) in homes_of(plan)]
    inputs = [(1 - share) * b for b in backward]
    links = [sent if a != b else 0.0 for a, b in zip(homes, homes[1:], strict=False)]
    before, after = ([0.0, *accumulate(x + y for x, y in zip(way, links, strict=False))] for way in (forward, inputs))
    found = [sum(forward) + sum(inputs) + 2 * sum(links)]
    of_ranks: list[list[int]] = [[] for _ in range(p)]
    for stage, home in enumerate(homes):
        of_ranks[home].append(stage)
    for rank, mine in enumerate(of_ranks):  # rank r's first stage is r, so before[r] is the time until its first forward pass
        work = m * sum([whole[stage] for stage in mine])
        put_off = m * share * sum([backward[stage] for stage in mine])
        found.append(before[rank] + max(work, work - put_off + after[rank]))
    return max(found)


def _simulated(plan: Plan, forward: tuple[float, ...], backward: tuple[float, ...], share: float, sent: float) -> float:
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
    schedule: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    forward: tuple[float, ...],
    backward: tuple[float, ...],
    share: float,
    sent: float,
) -> float:
    order = made(schedule, ranks, microbatches, chunks)
    return makespan(order, costs(forward, backward, weight_share=share), transfer_time=sent)


class Tail(NamedTuple):
    """Actions at the end of a rank's step, as (operation, number of actions). after: for each stage of the rank, the actions after its
    gradients are complete. late: actions after the rank's last input gradient."""

    after: tuple[tuple[tuple[str, int], ...], ...]
    late: tuple[tuple[str, int], ...]


def tails(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[Tail, ...]:
    """Tail of each rank. A short step is built for it, because the tail does not depend on the number of micro-batches."""
    if (
        chunks == 1 and placed(schedule) == "line" and not kind_of(schedule).splits_backward
    ):  # the last action completes the only stage's gradients
        return (Tail(((),), ()),) * ranks
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
