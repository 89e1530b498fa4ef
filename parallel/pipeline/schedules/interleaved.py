"""Interleaved 1F1B [2104.04473, section 2.2]: v chunks of layers per rank, rank r holds stages r, p + r, 2p + r, ...

A micro-batch passes the ranks v times with 1/v of the work each time, so the ramp costs 1/v as much: bubble (p - 1) / (v m), with
v times the messages. Micro-batches go in groups of p or a few more: one group through chunk 0, through chunk 1, ..., then the next:

    p = 3, m = 7     groups of 4 and 3     chunk 0: 0 1 2 3, chunk 1: 0 1 2 3, chunk 0: 4 5 6, chunk 1: 4 5 6

m need not be a multiple of p: there are m // p groups, whose sizes differ by at most one. With n = ceil(m / (m // p)) in the largest
group, min(m v, 2 (p - 1 - r) + (v - 1) n + 1) chunks are in flight on rank r; n = p where p divides m, and rank 0 then keeps the layers
of 1 + (p - 1) / (p v) times its own. Fewer than p micro-batches are one group, which is through a chunk before the ranks are: each
chunk but the last costs a wait of p - m, so the bubble is (p - 1 + (v - 1) (p - m)) / (v m).

Where m // p divides m, the order is torch's; Megatron-Core has groups of a given size and a last one that is smaller.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from operator import sub

from parallel.pipeline.schedule import Action, Op, Schedule, flushed, looped
from parallel.pipeline.schedules.kind import Passes, Size
from parallel.pipeline.schedules.one_f_one_b import alternate
from parallel.pipeline.simulator.held import Rank, undominated


def interleaved(ranks: int, microbatches: int, chunks: int) -> Schedule:
    """`chunks` stages per rank."""
    sizes = groups(ranks, microbatches)
    orders = []
    for rank in range(ranks):
        passes = [(c, j) for start, end in pairwise([0, *accumulate(sizes)]) for c in range(chunks) for j in range(start, end)]
        forwards = [Action(Op.F, chunk * ranks + rank, j) for chunk, j in passes]
        backwards = [Action(Op.B, (chunks - 1 - chunk) * ranks + rank, j) for chunk, j in passes]
        orders.append(alternate(forwards, backwards, warmup=2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0]))
    return flushed("interleaved", looped(ranks, chunks), microbatches, orders)


def groups(ranks: int, microbatches: int) -> list[int]:
    """The sizes of groups of at least `ranks` micro-batches, as even as can be, the larger first; one group where there are fewer."""
    count = max(1, microbatches // ranks)
    each, more = divmod(microbatches, count)
    return [each + 1] * more + [each] * (count - more)


def interleaved_seconds(passes: Passes) -> float:
    """m max t + (sum t - max t) / v, t a rank's seconds for one micro-batch; fewer than p micro-batches are one group."""
    total, m, v = passes.total, passes.microbatches, passes.chunks
    if m < len(total):
        return sum(total) + (m - 1) * max(total) / v
    return m * max(total) + (sum(total) - max(total)) / v


def interleaved_held(size: Size) -> tuple[Rank, ...]:
    """Of two rounds, after which no more is kept; of p + 1 if some groups have one more, because each rank then sees another mixture."""
    p, more = size.ranks, size.microbatches % size.ranks
    return _held(p, min(size.microbatches, (p + 1) * p + more if more else 2 * p), size.chunks)


@cache
def _held(ranks: int, microbatches: int, chunks: int) -> tuple[Rank, ...]:
    """By the passes alone, since uneven groups need long orders: from the warm-up on, a pass forward and one backward in turn. How many
    micro-batches of each chunk are kept are the digits of one number."""
    sizes, base = groups(ranks, microbatches), microbatches + 1
    passes = [chunk for size in sizes for chunk in range(chunks) for _ in range(size)]
    forward = list(accumulate((base ** (chunks - 1 - chunk) for chunk in passes), initial=0))
    backward = list(accumulate((base**chunk for chunk in passes), initial=0))  # the last chunk first
    found = []
    for rank in range(ranks):
        ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * sizes[0] + 1, len(passes))
        peaks = sorted(set(map(sub, forward[ahead:], backward)), reverse=True)
        most = [tuple(peak // base ** (chunks - 1 - chunk) % base for chunk in range(chunks)) for peak in peaks]
        found.append(Rank(tuple(range(rank, ranks * chunks, ranks)), undominated(most)))
    return tuple(found)
