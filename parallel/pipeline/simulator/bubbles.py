"""Packs other work into the bubbles of a Timeline, like PipeFisher (2211.14133) packs K-FAC's curvature and inversion work.

    rank 1 | .. F0 F1 A0 A1 F2 ...     A0: work on micro-batch 0, possible after F0, done while the rank would wait

Bubbles are filled in time order, and work in order of priority. Work that fits into no bubble of the first step goes into the next steps,
which have the same timeline. The pipeline's actions keep their times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Op
from parallel.pipeline.simulator.simulate import Timeline

_MOST_STEPS = 1000


class BubbleWork(NamedTuple):
    """Work that a rank can do in a bubble. The name must be unique.
    time: its duration, in the timeline's unit. after: actions of this rank, in the first step, that must end before it starts. needs: names
    of other work, on any rank, that must end before it starts."""

    name: str
    rank: int
    time: float
    after: tuple[Action, ...] = ()
    needs: tuple[str, ...] = ()


class Placed(NamedTuple):
    """A piece of work and the step, start and end that `pack` gave it. Times are counted from the start of step 0."""

    work: BubbleWork
    step: int
    start: float
    end: float


@dataclass(frozen=True)
class Packing:
    """Result of `pack`. placed: all work, sorted by start. steps: number of steps until all work is done.
    utilisation_before, utilisation: busy time of all ranks as a fraction of the steps' time, without and with the work."""

    timeline: Timeline
    placed: tuple[Placed, ...]
    steps: int
    utilisation_before: float
    utilisation: float


class Bubble(NamedTuple):
    """An interval in which a rank waits. start, end: counted from the start of a step."""

    rank: int
    start: float
    end: float
    first_step_only: bool = False


def bubbles(timeline: Timeline) -> list[Bubble]:
    """Return the bubbles of all ranks in one step, sorted by start. A rank counts as waiting during S, which runs on the network."""
    found = []
    for rank, spans in enumerate(timeline.spans):
        at = 0.0
        for start, end in [*((s.start, s.end) for s in spans if s.action.op is not Op.S), (timeline.makespan, 0.0)]:
            if start > at:
                found.append(Bubble(rank, at, start))
            at = max(at, end)
    return sorted(found, key=lambda bubble: (bubble.start, bubble.rank))


def pack(timeline: Timeline, works: Sequence[BubbleWork], *, margin: float = 1.05) -> Packing:
    """Place all work in bubbles. works: the pieces of work, in order of priority.
    margin: a bubble must be at least `margin` times as long as the work, because real times vary. Raises BadInput if a piece of work fits
    into no bubble of its rank, or if 1,000 steps are too few for all work. Also raises it if two pieces of work have one name, if `after`
    has actions of another rank, or if `needs` name missing work or form a cycle."""
    found = _of_steps(timeline)
    _check(timeline, works, found, margin)
    ends = {(rank, span.action): span.end for rank, spans in enumerate(timeline.spans) for span in spans}
    waiting: dict[int, list[BubbleWork]] = {rank: [w for w in works if w.rank == rank] for rank in range(timeline.schedule.num_ranks)}
    done: dict[str, Placed] = {}
    for step in range(_MOST_STEPS):
        for bubble in found:
            if step and bubble.first_step_only:
                continue
            at, end = (step * timeline.makespan + time for time in (bubble.start, bubble.end))
            while (chosen := _earliest(waiting[bubble.rank], at, ends, done, margin, end)) is not None:
                start, work = chosen
                done[work.name] = Placed(work, step, start, start + work.time)
                waiting[bubble.rank].remove(work)
                at = start + work.time
        if len(done) == len(works):
            return _packing(timeline, done, step + 1)
    left = [work for queue in waiting.values() for work in queue]
    if any(all(need in done for need in work.needs) for work in left):
        needed = f"work for at most {_MOST_STEPS:,} steps"
        raise BadInput(
            "works", got=f"{left[0].name}, which has no bubble in these steps", needed=needed, fix="give less work, or other `after`"
        )
    got = f"{left[0].name}, which waits for {', '.join(left[0].needs)}"
    raise BadInput("needs", got=got, needed="needs that form no cycle", fix="remove one of the needs")


def _of_steps(timeline: Timeline) -> list[Bubble]:
    """Return the bubbles of repeated steps: a rank's bubble at the end of a step is joined with its bubble at the start of the next."""
    found = bubbles(timeline)
    heads = {bubble.rank: bubble for bubble in found if bubble.start == 0}
    tails = {bubble.rank: bubble for bubble in found if bubble.end == timeline.makespan}
    joined = []
    for bubble in found:
        if bubble is tails.get(bubble.rank) and bubble.rank in heads:
            bubble = bubble._replace(end=bubble.end + heads[bubble.rank].end)
        joined.append(bubble._replace(first_step_only=bubble is heads.get(bubble.rank) and bubble.rank in tails))
    return joined


def _earliest(
    queue: Sequence[BubbleWork], at: float, ends: dict[tuple[int, Action], float], done: dict[str, Placed], margin: float, end: float
) -> tuple[float, BubbleWork] | None:
    """Return (start, work) for the work in the queue that can start first in a bubble from `at` to `end`; None if none fits.
    ends: (rank, action) -> its end in the first step. done: name -> work that is already placed. margin: factor on the work's time."""
    best: tuple[float, BubbleWork] | None = None
    for work in queue:
        if all(need in done for need in work.needs):
            start = max([at, *(ends[work.rank, action] for action in work.after), *(done[need].end for need in work.needs)])
            if start + margin * work.time <= end * (1 + 1e-12) and (best is None or start < best[0]):
                best = (start, work)
                if start == at:
                    break
    return best


def _packing(timeline: Timeline, done: dict[str, Placed], steps: int) -> Packing:
    ranks = timeline.schedule.num_ranks
    busy = sum(timeline.busy(rank) for rank in range(ranks))
    whole = ranks * timeline.makespan
    added = sum(placed.work.time for placed in done.values())
    placed = tuple(sorted(done.values(), key=lambda p: (p.start, p.work.rank)))
    return Packing(timeline, placed, steps, busy / whole, (steps * busy + added) / (steps * whole))


def _check(timeline: Timeline, works: Sequence[BubbleWork], found: Sequence[Bubble], margin: float) -> None:
    names = {work.name for work in works}
    if len(names) < len(works):
        raise BadInput(
            "works", got=f"{len(works)} pieces of work with {len(names)} names", needed="unique names", fix="give each a different name"
        )
    for work in works:
        missing = [need for need in work.needs if need not in names]
        if missing:
            raise BadInput(work.name, got=f"the need {missing[0]}", needed="the name of other work", fix="add that work or remove the need")
        if not set(work.after) <= set(timeline.schedule.orders[work.rank]):
            wanted = " and ".join(map(str, work.after))
            raise BadInput(work.name, got=f"after {wanted}", needed=f"actions of rank {work.rank}", fix="name actions of this rank")
        room = max((bubble.end - bubble.start for bubble in found if bubble.rank == work.rank), default=0.0)
        if margin * work.time > room * (1 + 1e-9):
            got = f"{work.time:g} long, {margin * work.time:g} with its margin"
            needed = f"at most {room:g}, the longest bubble of rank {work.rank}"
            raise BadInput(work.name, got=got, needed=needed, fix="cut it into parts, layer by layer, or take fewer micro-batches")
