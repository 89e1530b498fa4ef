"""1F1B with p ranks and m micro-batches: after p - 1 - r forward passes F, rank r runs F and a backward pass B in turn.

    rank 0 | F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2     here p = 2, m = 3, B takes twice as long as F; .. is idle time
    rank 1 | .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..     bubble (p - 1) / m; min(m, p - r) micro-batches in flight on rank r

PipeDream-Flush [2006.09503, section 3.3], DAPPLE [2007.01045].
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, one_stage_a_rank
from parallel.pipeline.schedules.kind import PassTimes


def one_f_one_b(ranks: int, microbatches: int, *, extra_warmup: Sequence[int] | None = None) -> Schedule:
    """Build 1F1B. extra_warmup: for each rank, number of additional forward passes in its warm-up (EnvPipe); None: 0."""
    extra = extra_warmup or [0] * ranks
    orders = []
    for rank in range(ranks):
        forwards = [Action(Op.F, rank, j) for j in range(microbatches)]
        backwards = [Action(Op.B, rank, j) for j in range(microbatches)]
        orders.append(alternate(forwards, backwards, warmup=ranks - 1 - rank + extra[rank]))
    return flushed("1f1b", one_stage_a_rank(ranks), microbatches, orders)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> list[Action]:
    """Return a rank's order: `warmup` forward passes, then a forward and a backward pass in turn, then the remaining backward passes."""
    ahead = min(warmup, len(forwards))
    order = list(forwards[:ahead])
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        order += [forward, backward]
    return [*order, *backwards[len(forwards) - ahead :]]


def one_f_one_b_seconds(passes: PassTimes) -> float:
    """Return the seconds of a step [2104.04473]: sum t + (m - 1) max t. t: for each rank, the seconds of one of the m micro-batches,
    forward and backward."""
    total = passes.total
    return sum(total) + (passes.microbatches - 1) * max(total)
