"""Breadth-first pipeline [2211.05953]: v chunks a rank as in interleaved 1F1B, but all micro-batches pass one chunk before the next.

With p ranks and m micro-batches, the bubble is (p - 1) / (v m) of the compute time. All micro-batches are in flight in all
chunks. FSDP gathers weights only once for each chunk and direction, not for each micro-batch.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, looped


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build the breadth-first schedule, with `chunks` stages a rank."""
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(Op.F, stage, j) for stage in stages for j in range(microbatches)]
        backwards = [Action(Op.B, action.stage, action.microbatch) for action in reversed(forwards)]
        orders.append(forwards + backwards)
    return flushed("looped_bfs", looped(ranks, chunks), microbatches, orders)
