"""Chimera [2107.06925]: two pipelines through the same ranks in opposite directions, each with half of the micro-batches.

    rank 0   stage 0 of the pipeline down, stage p - 1 of the one up         (v: down, ^: up, p = m = 4)
    rank 0   vF . vF ^F ^B ^F ^B vB . vB
    rank 1   . vF ^F vF ^F ^B vB ^B vB ^B          ranks 2 and 3 are their mirror images

Each stage has two replicas, on ranks s and p - 1 - s, whose gradients are summed: S starts right after the last backward of a
stage and runs in the bubbles that follow. Bubble (p - 2) / m of ideal time where F = B; for m = p it takes p F + (2 p - 2) B. With more
micro-batches and B = 2 F, blocks of p follow one another directly and bubbles open between them: 1/4 of ideal for p = 4, m = 8.
In flight: p / 2 + 1 on the outer ranks to p in the middle.
"""

from __future__ import annotations

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Op, Schedule, flushed


def chimera(ranks: int, microbatches: int) -> Schedule:
    """Raises BadInput for an odd number of ranks, and for micro-batches that are not a multiple of it."""
    if ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise BadInput(
            "stages", got=ranks, needed="an even number for chimera, whose two directions meet in the middle", fix=f"set stages to {near}"
        )
    if microbatches % ranks:
        near = " or ".join(str(n) for n in (microbatches // ranks * ranks, (microbatches // ranks + 1) * ranks) if n)
        raise BadInput(
            "microbatches",
            got=microbatches,
            needed=f"a multiple of {ranks} stages for chimera, half each way",
            fix=f"set microbatches to {near}",
        )
    homes = [sorted((stage, ranks - 1 - stage)) for stage in range(ranks)]
    orders = [_order(rank, ranks, microbatches) for rank in range(ranks)]
    return flushed("chimera", homes, microbatches, orders)


def _order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    """Both directions in slots of equal length: 1F1B has F of micro-batch j at slot s + 2j and B at 2p - 1 - s + 2j.

    The two stages of a rank have different parity, so no slot is taken twice; a block of p micro-batches takes 2p slots.
    """
    half = ranks // 2
    slots: dict[int, Action] = {}
    for block in range(microbatches // ranks):
        for stage, first in ((rank, 0), (ranks - 1 - rank, half)):
            for j in range(half):
                start, microbatch = 2 * ranks * block + 2 * j, ranks * block + first + j
                slots[start + stage] = Action(Op.F, stage, microbatch)
                slots[start + 2 * ranks - 1 - stage] = Action(Op.B, stage, microbatch)
    order = [slots[slot] for slot in sorted(slots)]
    for stage in {rank, ranks - 1 - rank}:
        last = max(at for at, action in enumerate(order) if action.op is Op.B and action.stage == stage)
        order.insert(last + 1, Action(Op.S, stage, version=1))
    return order
