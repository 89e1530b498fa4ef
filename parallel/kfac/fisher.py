"""PipeFisher (arXiv 2211.14133): packs K-FAC's work into a pipeline's bubbles, by a plan made from measured times, and runs it there.

    rank 1   F0  A0  F1  A1  B0  G0  B1  G1 | F0 F1 inv inv B0 ...      F0, B0: forward and backward pass of micro-batch 0
                                                                        A0, G0: its terms of the factors A, G   inv: inversion

A and G are K-FAC's factors: second moments of a linear layer's inputs and of its output gradients. Each rank measures its
first steps and makes its own plan. Work that fits into no bubble runs at the end of a step.

Bubbles are filled in time order, each with the work that can start first; if several can start at the same time, with the one of highest
priority. Work that fits into no bubble of the plan's first step goes into the next steps, which have the same timeline. The pipeline's
actions keep their times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from parallel.kfac.kfac import Kfac, KfacUnit
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Axis
from parallel.pipeline.schedule import Action, Op, Schedule, Span, Watcher
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


_MARGIN = 1.05  # a unit is planned into a bubble only if the bubble is at least this multiple of the unit's time


@dataclass
class BubbleFiller(Watcher):
    """Watcher of the pipeline's runtime that runs a rank's K-FAC units while the rank would wait.

    A unit is one piece of K-FAC's work (KfacUnit). In the first `measured` refreshes (recomputations of all factors and inverses), units
    run at the ends of steps and are timed. In the last step before the next refresh, the rank's actions (forward and backward passes) are
    timed too, then the plan is made.

    schedule: the schedule of one batch. axis: the pipeline's ranks. stages: name of a linear -> its stage.
    slots: the plan: (steps since the last refresh began, index of an action in the rank's order) -> the units to run after this action;
        index -1: before the first action. None: not planned yet.
    placed_share: planned units' time as a fraction of all units' time.
    waits: (idle time of this rank without K-FAC, idle time with the plan), as fractions of a step."""

    kfac: Kfac
    schedule: Schedule
    axis: Axis
    stages: Mapping[str, int]
    measured: int = 2
    slots: dict[tuple[int, int], list[KfacUnit]] | None = None
    placed_share: float = 0.0
    waits: tuple[float, float] = (0.0, 0.0)
    _record: list[Span] | None = None  # times of the rank's actions; None: they are not measured now

    def __post_init__(self) -> None:
        self.kfac.defer(timed=True)

    def begin(self) -> None:
        if self.slots is not None:
            self._fill(-1)
        elif self._record and len(self._record) >= len(self._order):
            self.plan()
        elif self.kfac.updates == self.measured * self.kfac.settings.refresh_every - 1:
            self._record = []

    def after(self, at: int, took: Span) -> None:
        if self._record is not None:
            self._record.append(took)
        if self.slots is not None:
            self._fill(at)

    def _fill(self, at: int) -> None:
        """Run the units that are planned after the action with index `at` (-1: before the first action) if they are ready."""
        assert self.slots is not None
        for unit in self.slots.get((self.kfac.updates % self.kfac.settings.refresh_every, at), ()):
            if unit in self.kfac.waiting:
                self.kfac.run(unit)

    @property
    def _order(self) -> tuple[Action, ...]:
        return self.schedule.orders[self.axis.index]

    def plan(self) -> None:
        """Make the plan from the measured times. Collective over the pipeline's ranks, which agree on the start and end of a step."""
        s = self.kfac.settings
        assert self._record is not None
        record = self._record[: len(self._order)]
        self._record = None
        first = -largest(-record[0].start, self.axis)
        last = largest(record[-1].end, self.axis)
        spans = tuple(Span(took.action, took.start - first, took.end - first) for took in record)
        # A timeline of this rank alone. It ends with an added update of negligible length, at the time at which the slowest rank ends the
        # step, so that the wait before this time counts as a bubble.
        end = Action(Op.U, spans[0].action.stage, version=-1)
        own = Schedule(self.schedule.name, tuple((0,) for _ in self.schedule.homes), 1, 1, ((*self._order, end),))
        timeline = Timeline(own, ((*spans, Span(end, last - first, (last - first) * (1 + 1e-6))),), (), True)
        seconds = self.kfac.times()
        self.slots, room, total = defaultdict(list), 0.0, 0.0
        for kind, begin, steps in (("curvature", 0, s.delay // 2 + 1), ("inversion", s.delay // 2 + 1, s.delay - s.delay // 2)):
            units = {str(unit): unit for unit in self._units(kind)}
            cost = {name: seconds[unit.kind, unit.factor, unit.name] for name, unit in units.items()}
            total += sum(cost.values())
            works = [BubbleWork(name, 0, cost[name], self._after(unit)) for name, unit in units.items() if cost[name] > 0]
            for placed in pack(timeline, works, steps=steps, margin=_MARGIN):
                self.slots[begin + placed.step, self._last_ended(timeline, placed)].append(units[placed.work.name])
                room += placed.work.time
        self.placed_share = room / total if total else 1.0
        idle = sum(bubble.end - bubble.start for bubble in bubbles(timeline))
        self.waits = idle / timeline.makespan, (idle - room / s.refresh_every) / timeline.makespan

    def _units(self, kind: str) -> list[KfacUnit]:
        keys = list(self.kfac.factors)
        if kind == "inversion":
            return [KfacUnit(kind, *key) for key in keys if key in self.kfac.inverts]
        passes = Counter(a.stage for a in self._order if a.op is Op.F)
        return [KfacUnit(kind, *key, i) for key in keys for i in range(passes[self.stages[key[1]]])]

    def _after(self, unit: KfacUnit) -> tuple[Action, ...]:
        """Return a tuple with the action after which a unit can run: the forward pass (F) for curvature of A, the backward pass (B or I)
        for curvature of G. Empty for an inversion."""
        if unit.kind == "inversion":
            return ()
        stage = self.stages[unit.name]
        forward = [a for a in self._order if a.op is Op.F and a.stage == stage][unit.microbatch]
        ops, microbatch = ((Op.F,) if unit.factor == "A" else (Op.B, Op.I)), forward.microbatch
        return (next(a for a in self._order if a.op in ops and a[1:3] == (stage, microbatch)),)

    def _last_ended(self, timeline: Timeline, placed: Placed) -> int:
        """Return the index of the step's last action that has ended when the planned unit starts; -1 if none has."""
        at = placed.start - placed.step * timeline.makespan
        return sum(span.end <= at + 1e-9 for span in timeline.spans[0][:-1]) - 1
