"""PipeDream [1806.03377]: 1F1B that never drains; each micro-batch is a batch of its own, and its update follows its backward pass.

    rank 0   0F0 0F1 ... 0B0 0U@1 0F2@1 ...

In the drawing, 0F2@1 is stage 0's forward pass of micro-batch 2 with weight version 1, and U@1 the update that makes version 1.

A forward pass reads the newest weights of its stage, and its backward pass reads the same version (weight stashing). So rank r of p keeps
p - r versions, and its micro-batch b reads version max(0, b - (p - 1 - r)). The only bubble is the first warm-up, but gradients belong to
old weights: w_s(t + 1) = w_s(t) - lr grad_s f(w_0(t - p + 1), w_1(t - p + 2), ..., w_{p-1}(t)), with w_s the weights of stage s and f the
loss. With vertical sync, all stages read version t - p + 1, and every rank keeps p versions.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, one_stage_a_rank
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.schedules.one_f_one_b import alternate


def pipedream(ranks: int, microbatches: int, *, batches: int = 1, vertical_sync: bool = False) -> Schedule:
    """Build PipeDream for batches * microbatches micro-batches, with one update after each. vertical_sync: all stages read the weight
    version that the first stage reads."""
    total = batches * microbatches
    orders = []
    for rank in range(ranks):
        delay = ranks - 1 if vertical_sync else ranks - 1 - rank
        forwards = [Action(Op.F, rank, j, max(0, j - delay)) for j in range(total)]
        order = alternate(forwards, [a._replace(op=Op.B) for a in forwards], warmup=ranks - 1 - rank)
        orders.append(tuple(with_updates(order, every=1)))
    return Schedule("pipedream", tuple(one_stage_a_rank(ranks)), total, 1, tuple(orders))


def with_updates(order: list[Action], *, every: int) -> list[Action]:
    """Return a rank's order with an update inserted after the backward pass of each `every`-th micro-batch."""
    updated = []
    for action in order:
        updated.append(action)
        if action.op is Op.B and (action.microbatch + 1) % every == 0:
            updated.append(Action(Op.U, action.stage, version=(action.microbatch + 1) // every))
    return updated


def pipedream_age(size: Size, stage: int) -> int:
    """Return the age of a stage's gradients: the number of updates between the weights that compute them and the weights that they update.
    It is p - 1 - s on stage s of p, or p - 1 on all stages with vertical sync."""
    return size.ranks - 1 - (0 if size.vertical_sync else stage)
