"""Interleaved 1F1B [2104.04473, section 2.2]: v chunks of layers per rank, rank r holds stages r, p + r, 2p + r, ...

A micro-batch passes the ranks v times with 1/v of the work each time, so the ramp costs 1/v as much: bubble (p - 1) / (v m), with
v times the messages. Micro-batches go in groups of p: one group through chunk 0, through chunk 1, ..., then the next group.
In flight on rank r: min(m v, 2 (p - 1 - r) + (v - 1) p + 1) chunks; on rank 0, the layers of 1 + (p - 1) / (p v) times its own.
"""

from __future__ import annotations

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Op, Schedule, flushed, looped
from parallel.pipeline.schedules.one_f_one_b import alternate


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Raises BadInput unless the micro-batches are a multiple of the ranks."""
    if microbatches % ranks:
        near = sorted({max(ranks, microbatches // ranks * ranks), (microbatches // ranks + 1) * ranks})
        raise BadInput(
            "microbatches",
            got=microbatches,
            needed=f"a multiple of {ranks} stages for interleaved, whose micro-batches go in groups of that size",
            fix=f"set microbatches to {' or '.join(map(str, near))}",
        )
    orders = []
    for rank in range(ranks):
        passes = [(c, g + j) for g in range(0, microbatches, ranks) for c in range(chunks) for j in range(ranks)]
        forwards = [Action(Op.F, chunk * ranks + rank, j) for chunk, j in passes]
        backwards = [Action(Op.B, (chunks - 1 - chunk) * ranks + rank, j) for chunk, j in passes]
        orders.append(alternate(forwards, backwards, warmup=2 * (ranks - 1 - rank) + (chunks - 1) * ranks))
    return flushed("interleaved", looped(ranks, chunks), microbatches, orders)
