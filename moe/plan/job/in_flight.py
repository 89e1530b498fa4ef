"""Number of micro-batches in flight: micro-batches whose activations a rank keeps until their backward pass, by schedule and sizes.

    1f1b, 4 ranks     4 3 2 1 on ranks 0 to 3
    gpipe             all micro-batches on every rank

The numbers come from the schedule's formula if it has one. Otherwise they are counted in its order of actions
(parallel/pipeline/simulator/held.py). Beyond a few micro-batches per rank, more micro-batches do not change the numbers, so they are
counted in a shorter step.
"""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import accumulate
from operator import ge, le

from moe.plan.job.network import repeats
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules import kind_of, make_schedule
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.simulator.held import InFlight, RankPeaks, rank_peaks

STEADY = 3  # after this number of rounds, all further rounds of a schedule are equal; a round has one micro-batch for each rank


@lru_cache(maxsize=5_000)
def in_flight(schedule: str, *, ranks: int, microbatches: int, chunks: int = 1) -> tuple[RankPeaks, ...]:
    """Return the peak numbers of micro-batches in flight on each pipeline rank. Raises BadInput for sizes that the schedule does not allow.
    chunks: number of stages on each rank."""
    kind = kind_of(schedule)
    if kind.peaks is not None:
        return kind.peaks(Size(ranks, microbatches, kind.chunks or chunks))
    if kind.rounds is None:
        return _found(schedule, ranks, steady(schedule, ranks, microbatches), chunks)
    fewer = range(kind.rounds * ranks, microbatches)
    return _found(schedule, ranks, next((n for n in fewer if possible(schedule, ranks, n)), microbatches), chunks)


def steady(schedule: str, ranks: int, microbatches: int) -> int:
    """Return the number of micro-batches of a shorter step that stands for a step of `microbatches` micro-batches. Both fill and drain the
    pipeline in the same way; the shorter step has fewer of the equal rounds in between."""
    fewer = range(STEADY * ranks + microbatches % ranks, microbatches, ranks)
    return next((n for n in fewer if possible(schedule, ranks, n)), microbatches)


def possible(schedule: str, ranks: int, microbatches: int) -> bool:
    """Return whether the schedule allows these numbers of ranks and micro-batches."""
    return kind_of(schedule).refusal(Size(ranks, microbatches)) is None


@lru_cache(maxsize=4)
def made(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """Build a schedule. The last four schedules stay cached, because a schedule computes its order of actions at first use and stores
    it."""
    own = chunks if kind_of(schedule).chunks is None else None
    return make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=own)


@cache
def _found(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[RankPeaks, ...]:
    return rank_peaks(made(schedule, ranks, microbatches, chunks))


@lru_cache(maxsize=5_000)
def fullest_ranks(
    schedule: str, pp: int, microbatches: int, chunks: int, sizes: tuple[int, ...], sparse: tuple[int, ...], before: int, every: int
) -> tuple[int, ...]:
    """Return the pipeline ranks that may need the most memory. A rank is left out if an earlier rank certainly needs as much memory. That
    is certain if the earlier rank has the same layers, at least as many micro-batches in flight and weight versions, and also gradients and
    the head if the later rank has them. In addition, both ranks must have the embedding, or neither: a rank without the embedding keeps the
    inputs that it receives, which may be larger.

    sizes: number of layers of each stage. sparse: indices of the layers with experts. before: number of encoder layers, of which the last
    has the encoder's norm. every: layers 0, every, 2 * every, ... are recomputed. chunks: number of stages on each rank.
    """
    ranks = in_flight(schedule, ranks=pp, microbatches=microbatches, chunks=chunks)
    bounds, last = [0, *accumulate(sizes)], len(sizes) - 1
    of_layer = [(i < before, i == before - 1, i in sparse, repeats(i, every)) for i in range(bounds[-1])]
    kinds = [[sorted(of_layer[bounds[s] : bounds[s + 1]]) for s in rank.stages] for rank in ranks]
    first, head = ([[s == end for s in rank.stages] for rank in ranks] for end in (0, last))
    moments = [moments_of(rank, microbatches) for rank in ranks]

    def covers(a: int, b: int) -> bool:
        if kinds[a] != kinds[b] or first[a] != first[b] or not all(map(ge, head[a], head[b])):
            return False
        if ranks[a].versions < ranks[b].versions:
            return False
        return all(any(_exceeds(x, y) and (y_is_first or not x_is_first) for x, x_is_first in moments[a]) for y, y_is_first in moments[b])

    found: list[int] = []
    for number in range(len(ranks)):
        if not any(covers(before, number) for before in found):
            found.append(number)
    return tuple(found)


def moments_of(rank: RankPeaks, microbatches: int) -> tuple[tuple[InFlight, bool], ...]:
    """Return the points of a step at which the rank's memory may peak, as pairs (micro-batches in flight, whether no gradients of weights
    exist yet). Gradients of weights exist as soon as an action B (backward pass) or W (gradients of weights) has ended. The point after the
    first backward pass is returned too: it has fewer micro-batches in flight, but also gradients."""
    found = [(of, max(of.gradients) < 2 if of.gradients else microbatches == 1 or min(of.kept) == microbatches) for of in rank.moments]
    later = [of._replace(kept=tuple([n - 1 for n in of.kept])) for of, first in found if first and microbatches > 1 and not of.gradients]
    return (*found, *((of, False) for of in later))


def _exceeds(more: InFlight, less: InFlight) -> bool:
    """Return whether `more` has at least as many micro-batches, gathered weights (FSDP) and gradients as `less` in each stage. A backward
    action I counts as more than B or W."""
    holds = all(map(le, more.freed, less.freed)) and all(map(ge, more.gradients, less.gradients))
    return holds and more.at_i >= less.at_i and all(map(ge, more.kept + more.pending, less.kept + less.pending))
