"""GPipe [1811.06965]: every forward, then every backward.

    rank 0 | F0 F1 F2 .. .. .. B0 B0 B1 B1 B2 B2
    rank 1 | .. F0 F1 F2 B0 B0 B1 B1 B2 B2 .. ..

Bubble (p - 1) / m; all m micro-batches in flight on every rank.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards in order, then all backwards in the same order."""
    orders = [[Action(op, rank, j) for op in (Op.F, Op.B) for j in range(microbatches)] for rank in range(ranks)]
    return flushed("gpipe", one_stage_a_rank(ranks), microbatches, orders)
