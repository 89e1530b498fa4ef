"""Breadth-first pipeline [2211.05953]: v chunks per rank as in interleaved, but all micro-batches pass a chunk before the next begins.

Bubble (p - 1) / (v m) for any number of micro-batches; all m v chunks are in flight. A chunk's weights are needed in one stretch in each
direction, so sharded weights are gathered once per chunk instead of once per micro-batch. Backwards run in reverse order.
"""

from __future__ import annotations

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, looped


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """`chunks` stages per rank. With fewer micro-batches than ranks, a chunk waits until the one before it has passed all ranks."""
    orders = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(Op.F, stage, j) for stage in stages for j in range(microbatches)]
        backwards = [Action(Op.B, action.stage, action.microbatch) for action in reversed(forwards)]
        orders.append(forwards + backwards)
    return flushed("looped_bfs", looped(ranks, chunks), microbatches, orders)
