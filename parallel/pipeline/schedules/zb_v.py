"""ZB-V [2401.10241, section 6]: zero bubble at the memory of 1F1B, by two chunks a rank laid out as a V.

    stages   rank 0: 0 and 2p - 1      rank 1: 1 and 2p - 2   ...      the first and the last stage live together

A micro-batch runs down the ranks and up again, so its loss is made where it came in, and every rank frees memory at the same pace:
2 p chunks in flight on each, as much as 1F1B's first rank. No bubble where F = I = W; twice the messages of 1F1B.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, folded
from parallel.pipeline.schedules.counted import Counted


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """With fewer than 2 p - 1 micro-batches, the order of 2 p - 1 without those that are not there."""
    orders = [[a for a in _order(rank, ranks, max(microbatches, 2 * ranks - 1)) if a.microbatch < microbatches] for rank in range(ranks)]
    return flushed("zb_v", folded(ranks), microbatches, orders)


def _order(rank: int, ranks: int, microbatches: int) -> list[Action]:
    down, up = rank, 2 * ranks - 1 - rank
    to = Counted()
    for _ in range(2 * (ranks - rank) - 1):
        to.forward(down)
    for _ in range(rank):
        to.forward(up)
        to.forward(down)
    for _ in range(ranks - rank):
        to.forward(up)
        _split(to, up)
    while to.count(up) < microbatches:
        if to.count(down) < microbatches:
            to.forward(down)
        _split(to, down)
        to.forward(up)
        _split(to, up)
    for _ in range(rank):
        to.input(down)
        to.input(up)
    for _ in range(ranks - rank):
        to.input(down)
        to.weights(down)
    for stage in (up, down):
        for _ in range(microbatches - sum(a.op is Op.W and a.stage == stage for a in to.order)):
            to.weights(stage)
    return to.order


def _split(to: Counted, stage: int) -> None:
    to.input(stage)
    to.weights(stage)
