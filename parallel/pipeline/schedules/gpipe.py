"""GPipe [1811.06965]: all forward passes, then all backward passes.

    rank 0 | F0 F1 F2 .. .. .. B0 B0 B1 B1 B2 B2
    rank 1 | .. F0 F1 F2 B0 B0 B1 B1 B2 B2 .. ..

With p ranks and m micro-batches, the bubble is (p - 1) / m. All m micro-batches are in flight on every rank.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank
from parallel.pipeline.schedules.kind import PassTimes, Size
from parallel.pipeline.simulator.held import RankPeaks


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Build GPipe. Backward passes run in the same order of micro-batches as forward passes."""
    orders = [[Action(op, rank, j) for op in (Op.F, Op.B) for j in range(microbatches)] for rank in range(ranks)]
    return flushed("gpipe", one_stage_a_rank(ranks), microbatches, orders)


def gpipe_seconds(passes: PassTimes) -> float:
    """Return the seconds of a step: sum t + (m - 1) max t for the forward passes, plus the same for the backward passes. t: for each rank,
    the time of one pass plus half the time that it waits for the messages of a micro-batch. m: number of micro-batches."""
    directions = ([x + passes.waits / 2 for x in times] for times in (passes.forward, passes.backward))
    return sum(sum(times) + (passes.microbatches - 1) * max(times) for times in directions)


def all_in_flight(size: Size) -> tuple[RankPeaks, ...]:
    """Return each rank's peak activations for a schedule that keeps all micro-batches of all stages until the backward passes."""
    p, v = size.ranks, size.chunks
    return tuple(RankPeaks(tuple(range(r, p * v, p)), ((size.microbatches,) * v,)) for r in range(p))
