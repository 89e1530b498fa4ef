"""Packs other work into the bubbles of a Timeline, like PipeFisher (arXiv 2211.14133) packs K-FAC's curvature and inversion work.

    rank 1 | .. F0 F1 A0 A1 F2 ...     A0: work on micro-batch 0, possible after F0, done while the rank would wait

Bubbles are filled in time order, each with the work that can start first; if several can start at the same time, with the one of highest
priority. Work that fits into no bubble of the first step goes into the next steps, which have the same timeline. The pipeline's actions
keep their times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from parallel.pipeline.schedule import Action, Op
from parallel.pipeline.simulator.simulate import Timeline


class BubbleWork(NamedTuple):
    """Work that a rank can do in a bubble. The name must be unique.
    time: duration in the timeline's unit. after: actions of this rank, in the first step, that must end before the work starts. needs:
    names of other work, on any rank, that must end before it."""

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


class Bubble(NamedTuple):
    """An interval in which a rank waits. start, end: counted from the start of a step. first_step_only: the
    interval begins the step; in later steps it belongs to the last bubble of the previous step."""

    rank: int
    start: float
    end: float
    first_step_only: bool = False


def bubbles(timeline: Timeline) -> list[Bubble]:
    """Return the bubbles of all ranks in one step, sorted by start. A rank counts as waiting during S, the all-reduce of gradients between
    replicas of a stage, because S needs only the network."""
    found = []
    for rank, spans in enumerate(timeline.spans):
        at = 0.0
        for start, end in [*((s.start, s.end) for s in spans if s.action.op is not Op.S), (timeline.makespan, 0.0)]:
            if start > at:
                found.append(Bubble(rank, at, start))
            at = max(at, end)
    return sorted(found, key=lambda bubble: (bubble.start, bubble.rank))


def pack(timeline: Timeline, works: Sequence[BubbleWork], *, steps: int, margin: float = 1.05) -> list[Placed]:
    """Place work in the bubbles of `steps` steps, and return it sorted by start. Work that fits into none of them is left out.
    works: the pieces of work, highest priority first. margin: a bubble must be at least `margin` times as long as the work, because real
    times vary."""
    found = _of_steps(timeline)
    ends = {(rank, span.action): span.end for rank, spans in enumerate(timeline.spans) for span in spans}
    waiting = {rank: [work for work in works if work.rank == rank] for rank in range(timeline.schedule.num_ranks)}
    done: dict[str, Placed] = {}
    for step, bubble in product(range(steps), found):
        if step and bubble.first_step_only:
            continue
        at, end = (step * timeline.makespan + time for time in (bubble.start, bubble.end))
        while (chosen := _earliest(waiting[bubble.rank], at, ends, done, margin, end)) is not None:
            start, work = chosen
            done[work.name] = Placed(work, step, start, start + work.time)
            waiting[bubble.rank].remove(work)
            at = start + work.time
    return sorted(done.values(), key=lambda placed: (placed.start, placed.work.rank))


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
    """Return (start, work) for the work in the queue that can start first in a bubble from `at` to `end`; None if no work fits.
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
