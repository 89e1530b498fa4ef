"""PipeDream-2BW [2006.09503, section 3.1]: 1F1B that never drains, with m micro-batches per update and two weight versions.

All micro-batches of batch t read W(t - 1), forward and backward: W(t + 1) = W(t) - lr grad f(W(t - 1)), W(-1) = W(0). The delay is one
update on every rank. At most p - 1 forwards of the next batch start before an update, so only the newest version and the one
before it are kept. No bubble except the first ramp.
"""

from __future__ import annotations

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.pipeline.schedule import Action, Op, Schedule, one_stage_a_rank
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.schedules.one_f_one_b import alternate
from parallel.pipeline.schedules.pipedream import with_updates


def two_bw(ranks: int, microbatches: int, *, batches: int = 2) -> Schedule:
    """At least as many micro-batches as ranks."""
    orders = []
    for rank in range(ranks):
        forwards = [Action(Op.F, rank, j, max(0, j // microbatches - 1)) for j in range(batches * microbatches)]
        order = alternate(forwards, [a._replace(op=Op.B) for a in forwards], warmup=ranks - 1 - rank)
        orders.append(tuple(with_updates(order, every=microbatches)))
    return Schedule("two_bw", tuple(one_stage_a_rank(ranks)), batches * microbatches, microbatches, tuple(orders))


def two_bw_refusal(size: Size) -> BadInput | None:
    """Fewer micro-batches than ranks: a forward would need weights that do not exist yet."""
    if size.microbatches >= size.ranks:
        return None
    needed = f"at least {size.ranks}, one a stage, for two_bw: with fewer two versions are not enough"
    return BadInput("microbatches", got=size.microbatches, needed=needed, fix=Set("it", size.ranks))


def two_bw_age(size: Size, stage: int) -> int:
    """One update, on every stage."""
    return 1
