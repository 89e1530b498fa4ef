"""Naive model parallelism: one micro-batch at a time through all stages and back; one rank works, the others wait.

    rank 0 | F0 .. .. .. B0 B0 F1 .. .. .. B1 B1
    rank 1 | .. F0 B0 B0 .. .. .. F1 B1 B1 .. ..

Bubble p - 1, whatever the number of micro-batches; one in flight.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank
from parallel.pipeline.schedules.kind import Passes


def naive(ranks: int, microbatches: int) -> Schedule:
    """One micro-batch after the other, without overlap: the baseline for the other schedules."""
    orders = [[Action(op, rank, j) for j in range(microbatches) for op in (Op.F, Op.B)] for rank in range(ranks)]
    return flushed("naive", one_stage_a_rank(ranks), microbatches, orders)


def naive_seconds(passes: Passes) -> float:
    """m sum t, t a rank's seconds for one micro-batch."""
    return passes.microbatches * sum(passes.total)
