"""ZB-V [2401.10241, section 6]: zero bubble with the memory of 1F1B, by two chunks a rank placed as a V.

    stages   rank 0: 0 and 2p - 1      rank 1: 1 and 2p - 2   ...      the first and the last stage are on the same rank

A micro-batch runs down the ranks and up again, so its loss is computed on the rank where it started, and all ranks free memory at the
same rate. Each has 2 p chunks in flight, as much as 1F1B's first rank. There is no bubble if F = I = W, and twice the messages of 1F1B.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Schedule, flushed, folded
from parallel.pipeline.schedules.counted import Counted


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V. For fewer than 2 p - 1 micro-batches, take the order of 2 p - 1 and leave out the actions of the others."""
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
        while to.weights(stage):
            pass
    return to.order


def _split(to: Counted, stage: int) -> None:
    to.input(stage)
    to.weights(stage)
