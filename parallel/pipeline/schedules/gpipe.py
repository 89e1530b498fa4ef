"""GPipe [1811.06965]: every forward, then every backward.

    rank 0 | F0 F1 F2 .. .. .. B0 B0 B1 B1 B2 B2
    rank 1 | .. F0 F1 F2 B0 B0 B1 B1 B2 B2 .. ..

Bubble (p - 1) / m; all m micro-batches in flight on every rank.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank
from parallel.pipeline.schedules.kind import Passes, Size
from parallel.pipeline.simulator.held import Rank


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards in order, then all backwards in the same order."""
    orders = [[Action(op, rank, j) for op in (Op.F, Op.B) for j in range(microbatches)] for rank in range(ranks)]
    return flushed("gpipe", one_stage_a_rank(ranks), microbatches, orders)


def gpipe_seconds(passes: Passes) -> float:
    """A wave of forward passes, then one of backward passes, each as fast as its slowest stage: sum t + (m - 1) max t of either."""
    ways = ([x + passes.waits / 2 for x in way] for way in (passes.forward, passes.backward))
    return sum(sum(way) + (passes.microbatches - 1) * max(way) for way in ways)


def all_at_once(size: Size) -> tuple[Rank, ...]:
    """Every rank keeps all micro-batches of each of its stages."""
    p, v = size.ranks, size.chunks
    return tuple(Rank(tuple(range(r, p * v, p)), ((size.microbatches,) * v,)) for r in range(p))
