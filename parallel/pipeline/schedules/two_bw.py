"""PipeDream-2BW [2006.09503, section 3.1]: 1F1B that never drains, with m micro-batches per update and two weight versions.

All micro-batches of batch t read version t - 1 of the weights W in both passes: W(t + 1) = W(t) - lr grad f(W(t - 1)), W(-1) = W(0), f the
loss. So gradients are one update old on every rank. The only bubble is the first warm-up.
"""

from __future__ import annotations

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Op, Schedule, one_stage_a_rank
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.schedules.one_f_one_b import alternate
from parallel.pipeline.schedules.pipedream import with_updates


def two_bw(ranks: int, microbatches: int, *, batches: int = 2) -> Schedule:
    """Build PipeDream-2BW. `microbatches` must be at least `ranks`."""
    orders = []
    for rank in range(ranks):
        forwards = [Action(Op.F, rank, j, max(0, j // microbatches - 1)) for j in range(batches * microbatches)]
        order = alternate(forwards, [a._replace(op=Op.B) for a in forwards], warmup=ranks - 1 - rank)
        orders.append(tuple(with_updates(order, every=microbatches)))
    return Schedule("two_bw", tuple(one_stage_a_rank(ranks)), batches * microbatches, microbatches, tuple(orders))


def two_bw_refusal(size: Size) -> BadInput | None:
    """Return an error for fewer micro-batches than ranks, which would need more than two weight versions; otherwise None."""
    if size.microbatches >= size.ranks:
        return None
    needed = f"at least {size.ranks}, one a stage, for two_bw: fewer need more than two weight versions"
    return BadInput("microbatches", got=size.microbatches, needed=needed, fix=Set("it", size.ranks))
