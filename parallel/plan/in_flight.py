"""Micro-batches that a rank keeps at once, by stage, for a schedule's name and sizes: what a planner multiplies a stage's bytes by.

    1f1b, 4 ranks     4 3 2 1 of each rank's one stage
    gpipe             all of them

An order of actions says it (parallel/pipeline/simulator/held.py). In a steady state nothing more is kept, so the order of a few times
as many micro-batches as ranks says it for any larger number; where everything is kept the number itself does. Cached: a planner asks for
the same few sizes thousands of times. `made` is the schedule of sizes, which pipeline_time.py asks for as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import accumulate
from operator import ge, sub

from parallel.errors import BadInput
from parallel.pipeline.schedule import Op, Schedule
from parallel.pipeline.schedules.catalog import kind_of, make_schedule
from parallel.pipeline.schedules.interleaved import groups
from parallel.pipeline.simulator.held import weight_versions

ALL_AT_ONCE = ("gpipe", "looped_bfs")
STEADY = 3  # rounds of one micro-batch a rank after which each further round is as the one before
ROUNDS = {  # after which nothing more is kept; others STEADY
    **{"naive": 1, "1f1b": 1, "zb_h1": 1},
    **{"interleaved": 2, "pipedream": 2, "two_bw": 2, "zb_h2": 2, "zb_v": 2, "v_min": 2, "dualpipe_v": 2},
}


@dataclass(frozen=True)
class Rank:
    """`stages` that it has. `most`: numbers of micro-batches kept of each at once, each tuple a moment at which no other has more of all.

    `versions` of the weights that it keeps, the newest among them.
    """

    stages: tuple[int, ...]
    most: tuple[tuple[int, ...], ...]
    versions: int = 1


def in_flight(schedule: str, *, ranks: int, microbatches: int, chunks: int = 1) -> tuple[Rank, ...]:
    """Of each pipeline rank. Raises BadInput for sizes that the schedule cannot have."""
    if ranks == 1 and schedule in ("1f1b", "gpipe", "naive", "zb_h1", "zb_h2"):
        return (Rank((0,), ((microbatches if schedule == "gpipe" else 1,),)),)
    if schedule in ALL_AT_ONCE:
        stages = chunks if schedule == "looped_bfs" else 1
        return tuple(Rank(tuple(range(r, ranks * stages, ranks)), ((microbatches,) * stages,)) for r in range(ranks))
    few = min(microbatches, _few(schedule, ranks, microbatches))
    try:
        return _found(schedule, ranks, few, chunks)
    except BadInput:
        if few == microbatches:
            raise
        return _found(schedule, ranks, -(-few // ranks) * ranks, chunks)


def _few(schedule: str, ranks: int, microbatches: int) -> int:
    """A number that keeps as many at once as `microbatches` do, where these are more."""
    if schedule not in ROUNDS:
        return steady(ranks, microbatches)
    if schedule != "interleaved" or microbatches % ranks == 0:
        return ROUNDS[schedule] * ranks
    return (ranks + 1) * ranks + microbatches % ranks  # groups of `ranks`, of which some have one more: each rank sees another mixture


def steady(ranks: int, microbatches: int) -> int:
    """The number of micro-batches of a short step that begins and ends as the whole does."""
    return min(microbatches, STEADY * ranks + microbatches % ranks)


@lru_cache(maxsize=4)
def made(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """With its steps, once they were found."""
    own = chunks if kind_of(schedule).chunks is None else None
    return make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=own)


@cache
def _found(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[Rank, ...]:
    if schedule == "interleaved":
        return _of_interleaved(ranks, microbatches, chunks)
    order = made(schedule, ranks, microbatches, chunks)
    versions = weight_versions(order) if order.num_updates > 1 else (1,) * ranks
    return tuple(Rank(order.stages_of(r), _most(order, r), versions[r]) for r in range(ranks))


def _of_interleaved(ranks: int, microbatches: int, chunks: int) -> tuple[Rank, ...]:
    """By its passes alone, since uneven groups need long orders: from the warm-up on, a pass forward and one backward in turn. How many
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
        found.append(Rank(tuple(range(rank, ranks * chunks, ranks)), _undominated(most)))
    return tuple(found)


def _most(schedule: Schedule, rank: int) -> tuple[tuple[int, ...], ...]:
    """What waits for W counts as what waits for B: I frees about as much as its output's gradients take."""
    places = {stage: i for i, stage in enumerate(schedule.stages_of(rank))}
    now, peaks, rising = [0] * len(places), set(), False
    change = {Op.F: 1, Op.B: -1, Op.W: -1}
    for action in schedule.orders[rank]:
        step = change.get(action.op, 0)
        if step:
            if step < 0 and rising:
                peaks.add(tuple(now))
            rising = step > 0
            now[places[action.stage]] += step
    return _undominated(sorted(peaks, reverse=True)) or ((0,) * len(now),)


def _undominated(peaks: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Without those of which another has more of all; largest first, so that this comes before."""
    kept: list[tuple[int, ...]] = []
    for peak in peaks:
        if not any(all(map(ge, more, peak)) for more in kept):
            kept.append(peak)
    return tuple(kept)
