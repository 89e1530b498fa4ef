"""Interleaved 1F1B [2104.04473, section 2.2]: each of p ranks has v chunks of layers; rank r holds stages r, p + r, 2p + r, ...

With m micro-batches, the bubble is (p - 1) / (v m). There are v times the messages of 1F1B. Micro-batches run in groups of at least p. A
group runs through all chunks before the next group starts. Sizes of groups differ by at most one, so m need not be a multiple of p:

    p = 3, m = 7     groups of 4 and 3     chunk 0: 0 1 2 3, chunk 1: 0 1 2 3, chunk 0: 4 5 6, chunk 1: 4 5 6

If the largest group has n micro-batches, rank r keeps the activations of up to min(m v, 2 (p - 1 - r) + (v - 1) n + 1) forward passes,
each of one micro-batch through one chunk. If m < p, there is one group, and the bubble is (p - 1 + (v - 1) (p - m)) / (v m). If m // p
divides m, torch.distributed.pipelining has the same order.
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
    """Return the number of micro-batches in each group: at least `ranks`, as equal as possible, larger groups first. If there are fewer
    micro-batches than ranks: one group."""
    count = max(1, microbatches // ranks)
    each, more = divmod(microbatches, count)
    return [each + 1] * more + [each] * (count - more)


def interleaved_seconds(passes: PassTimes) -> float:
    """Return a step's seconds: m max t + (sum t - max t) / v; with fewer micro-batches than ranks: sum t + (m - 1) max t / v. t: for each
    rank, the time of one micro-batch in all chunks of the rank. m micro-batches, v chunks."""
    total, m, v = passes.total, passes.microbatches, passes.chunks
    if m < len(total):
        return sum(total) + (m - 1) * max(total) / v
    return m * max(total) + (sum(total) - max(total)) / v


def interleaved_peaks(size: Size) -> tuple[RankPeaks, ...]:
    """Return the peak activations of each of p ranks. They are computed from the first groups of micro-batches, because further groups do
    not change them: at most 2 groups if p divides the number of micro-batches, otherwise at most p + 1 groups."""
    p, more = size.ranks, size.microbatches % size.ranks
    return _peaks(p, min(size.microbatches, (p + 1) * p + more if more else 2 * p), size.chunks)


@cache
def _peaks(ranks: int, microbatches: int, chunks: int) -> tuple[RankPeaks, ...]:
    """Return the peak activations of each rank, without making a schedule. The micro-batches in flight on a rank are encoded as one number
    in base microbatches + 1, with one digit for each chunk: the number of micro-batches between the chunk's forward and backward pass."""
    sizes, base = groups(ranks, microbatches), microbatches + 1
    passes = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    # item n: how many of the first n passes each chunk has, encoded as one number; backward passes begin with the last chunk
    forward = list(accumulate((base ** (chunks - 1 - chunk) for chunk in passes), initial=0))
    backward = list(accumulate((base**chunk for chunk in passes), initial=0))
    found = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0] + 1, len(passes))
        peaks = sorted(set(map(sub, forward[ahead:], backward)), reverse=True)
        most = [tuple(peak // base ** (chunks - 1 - chunk) % base for chunk in range(chunks)) for peak in peaks]
        found.append(RankPeaks(tuple(range(rank, ranks * chunks, ranks)), undominated(most)))
    return tuple(found)
