"""Interleaved 1F1B [2104.04473, section 2.2]: each rank has v chunks of layers; rank r holds stages r, p + r, 2p + r, ...

A micro-batch passes all ranks v times, with 1/v of the work each time. So the warm-up costs 1/v as much: the bubble is (p - 1) / (v m),
with v times the messages. Micro-batches run in groups of p or a few more. A group runs through chunk 0, chunk 1, ..., then the next group:

    p = 3, m = 7     groups of 4 and 3     chunk 0: 0 1 2 3, chunk 1: 0 1 2 3, chunk 0: 4 5 6, chunk 1: 4 5 6

m need not be a multiple of p: there are m // p groups, with sizes that differ by at most one. If the largest group has n micro-batches,
rank r has min(m v, 2 (p - 1 - r) + (v - 1) n + 1) chunks in flight. If p divides m, n = p, and rank 0 keeps 1 + (p - 1) / (p v) times the
activations of 1F1B's first rank. Fewer than p micro-batches are one group. It ends a chunk on rank 0 before its first micro-batch has
passed all ranks, so each chunk but the last costs a wait of p - m, and the bubble is (p - 1 + (v - 1) (p - m)) / (v m).

If m // p divides m, torch.distributed.pipelining has the same order. Megatron-Core has groups of a given size and a smaller last one.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from operator import sub

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, looped
from parallel.pipeline.schedules.kind import PassTimes, Size
from parallel.pipeline.schedules.one_f_one_b import alternate
from parallel.pipeline.simulator.held import RankPeaks, undominated


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build interleaved 1F1B, with `chunks` stages a rank."""
    sizes = groups(ranks, microbatches)
    orders = []
    for rank in range(ranks):
        passes = [(c, j) for start, end in pairwise([0, *accumulate(sizes)]) for c in range(chunks) for j in range(start, end)]
        forwards = [Action(Op.F, chunk * ranks + rank, j) for chunk, j in passes]
        backwards = [Action(Op.B, (chunks - 1 - chunk) * ranks + rank, j) for chunk, j in passes]
        orders.append(alternate(forwards, backwards, warmup=2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0]))
    return flushed("interleaved", looped(ranks, chunks), microbatches, orders)


def groups(ranks: int, microbatches: int) -> list[int]:
    """Return the sizes of the groups of micro-batches: at least `ranks` each, as equal as possible, the larger first; one if m < ranks."""
    count = max(1, microbatches // ranks)
    each, more = divmod(microbatches, count)
    return [each + 1] * more + [each] * (count - more)


def interleaved_seconds(passes: PassTimes) -> float:
    """Return m max t + (sum t - max t) / v, where t is a rank's time for one micro-batch; sum t + (m - 1) max t / v if m < p."""
    total, m, v = passes.total, passes.microbatches, passes.chunks
    if m < len(total):
        return sum(total) + (m - 1) * max(total) / v
    return m * max(total) + (sum(total) - max(total)) / v


def interleaved_held(size: Size) -> tuple[RankPeaks, ...]:
    """Return the peak activations of each rank, counted with the fewest micro-batches that reach these peaks.

    Two groups are enough if all have p micro-batches. If some are larger, it takes p + 1, because ranks then reach their peaks in
    different groups.
    """
    p, more = size.ranks, size.microbatches % size.ranks
    return _held(p, min(size.microbatches, (p + 1) * p + more if more else 2 * p), size.chunks)


@cache
def _held(ranks: int, microbatches: int, chunks: int) -> tuple[RankPeaks, ...]:
    """Return each rank's peaks, counted without building a schedule: after the warm-up, forward and backward passes alternate.

    The numbers of micro-batches kept of all chunks are the digits of one number in base microbatches + 1.
    """
    sizes, base = groups(ranks, microbatches), microbatches + 1
    passes = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    forward = list(accumulate((base ** (chunks - 1 - chunk) for chunk in passes), initial=0))
    backward = list(accumulate((base**chunk for chunk in passes), initial=0))  # starts of backward passes, from the last chunk to the first
    found = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0] + 1, len(passes))
        peaks = sorted(set(map(sub, forward[ahead:], backward)), reverse=True)
        most = [tuple(peak // base ** (chunks - 1 - chunk) % base for chunk in range(chunks)) for peak in peaks]
        found.append(RankPeaks(tuple(range(rank, ranks * chunks, ranks)), undominated(most)))
    return tuple(found)
