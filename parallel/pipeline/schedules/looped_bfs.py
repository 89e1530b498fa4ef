"""Breadth-first pipeline [2211.05953]: v chunks a rank as in interleaved, but all micro-batches pass a chunk before the next begins.

The bubble is (p - 1) / (v m) for any number of micro-batches; all m v chunks are in flight. A chunk's weights are used without
interruption in each direction, so sharded weights are gathered once a chunk, not once a micro-batch. Backward passes run in reverse order.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, looped


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build the breadth-first schedule, with `chunks` stages a rank. Fewer micro-batches than ranks add a wait between chunks."""
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(Op.F, stage, j) for stage in stages for j in range(microbatches)]
        backwards = [Action(Op.B, action.stage, action.microbatch) for action in reversed(forwards)]
        orders.append(forwards + backwards)
    return flushed("looped_bfs", looped(ranks, chunks), microbatches, orders)
