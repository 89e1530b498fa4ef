"""Micro-batches that a rank keeps at once, by stage, for a schedule's name and sizes: what a planner multiplies a stage's bytes by.

    1f1b, 4 ranks     4 3 2 1 of each rank's one stage
    gpipe             all of them

The schedule's closed form says it, or its order of actions (parallel/pipeline/simulator/held.py). In a steady state nothing more is kept,
so the order of a few times as many micro-batches as ranks says it for any larger number. Cached: a planner asks for the same few sizes
thousands of times. `made` is the schedule of sizes, which pipeline_time.py asks for as well.
"""

from __future__ import annotations

from functools import cache, lru_cache

from parallel.pipeline.schedule import Schedule
from parallel.pipeline.schedules.catalog import kind_of, make_schedule
from parallel.pipeline.schedules.kind import Size
from parallel.pipeline.simulator.held import Rank, held

STEADY = 3  # rounds of one micro-batch a rank after which each further round is as the one before


def in_flight(schedule: str, *, ranks: int, microbatches: int, chunks: int = 1) -> tuple[Rank, ...]:
    """What each pipeline rank keeps. Raises BadInput for sizes that the schedule cannot have."""
    kind = kind_of(schedule)
    if kind.held is not None:
        return kind.held(Size(ranks, microbatches, kind.chunks or chunks))
    if kind.rounds is None:
        return _found(schedule, ranks, steady(schedule, ranks, microbatches), chunks)
    fewer = range(kind.rounds * ranks, microbatches)
    return _found(schedule, ranks, next((n for n in fewer if possible(schedule, ranks, n)), microbatches), chunks)


def steady(schedule: str, ranks: int, microbatches: int) -> int:
    """The number of micro-batches of a short step that begins and ends as the whole does."""
    fewer = range(STEADY * ranks + microbatches % ranks, microbatches, ranks)
    return next((n for n in fewer if possible(schedule, ranks, n)), microbatches)


def possible(schedule: str, ranks: int, microbatches: int) -> bool:
    """Whether the schedule can have these sizes."""
    return kind_of(schedule).refusal(Size(ranks, microbatches)) is None


@lru_cache(maxsize=4)
def made(schedule: str, ranks: int, microbatches: int, chunks: int) -> Schedule:
    """With its steps, once they were found."""
    own = chunks if kind_of(schedule).chunks is None else None
    return make_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=own)


@cache
def _found(schedule: str, ranks: int, microbatches: int, chunks: int) -> tuple[Rank, ...]:
    return held(made(schedule, ranks, microbatches, chunks))
