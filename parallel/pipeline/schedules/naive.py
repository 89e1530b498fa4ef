"""Naive model parallelism: one micro-batch at a time runs through all stages and back; one rank works, the others wait.

    rank 0 | F0 .. .. .. B0 B0 F1 .. .. .. B1 B1
    rank 1 | .. F0 B0 B0 .. .. .. F1 B1 B1 .. ..

Each of p ranks waits p - 1 times as long as it works (the bubble is p - 1), for any number of micro-batches. One micro-batch is in flight.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank
from parallel.pipeline.schedules.kind import PassTimes


def naive(ranks: int, microbatches: int) -> Schedule:
    """Build the naive schedule: a micro-batch starts when the backward pass of the previous one has ended on the first stage."""
    orders = [[Action(op, rank, j) for j in range(microbatches) for op in (Op.F, Op.B)] for rank in range(ranks)]
    return flushed("naive", one_stage_a_rank(ranks), microbatches, orders)


def naive_seconds(passes: PassTimes) -> float:
    """Return the seconds of a step: number of micro-batches times the sum over ranks of a rank's time for one micro-batch."""
    return passes.microbatches * sum(passes.total)
