"""PipeFisher (arXiv 2211.14133): puts K-FAC's work into a pipeline's bubbles, by a plan made from measured times.

    rank 1   F0  A0  F1  A1  B0  G0  B1  G1 | F0 F1 inv inv B0 ...      F0, B0: passes of micro-batch 0   inv: inversion of a factor
                                                                        A0, G0: curvature of its factors A and G

Rules: A of a micro-batch comes after its forward pass, and G after its backward pass (after I, if that is separate). The sum over the
ranks that hold replicas comes after all curvature of that factor. The inversion comes after the sum, on one of these ranks. `works`
states these rules as needs for any packing (parallel/pipeline/simulator/bubbles.py).

`BubbleFiller` measures the first steps, then packs its own rank's units into its own rank's waits. Sums over ranks always run at the end
of a step (parallel/kfac/kfac.py), and so does work that found no place in the plan. A plan changes times, never numbers, so each rank can
make its own plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from parallel.kfac.kfac import Kfac, KfacUnit
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Axis
from parallel.pipeline.schedule import Action, Op, Schedule, Span, Watcher
from parallel.pipeline.simulator.bubbles import BubbleWork, Placed, bubbles, pack
from parallel.pipeline.simulator.simulate import Timeline

_MARGIN = 1.05  # a wait must be at least this multiple of a unit's time


def works(schedule: Schedule, factors: Mapping[int, Sequence[tuple[str, str]]], seconds: Mapping[str, float]) -> list[BubbleWork]:
    """Return K-FAC's work for one batch as input of `pack`, in order of priority: curvature, sums over replicas, inversions.

    factors: stage -> its factors, as ("A" or "G", name of the linear). seconds: duration of one unit by its kind, "curvature" (of one
    micro-batch), "sum" or "inversion".
    """
    curvature, sums, inversions = [], [], []
    made: dict[tuple[str, str], tuple[str, ...]] = defaultdict(tuple)  # factor -> names of all its curvature
    for stage, homes in enumerate(schedule.homes):
        keys = factors.get(stage, ())
        for rank, key in product(homes, keys):
            for at, forward in enumerate(_forwards(schedule.orders[rank], stage)):
                name = f"curvature {key[0]} {key[1]} micro-batch {forward.microbatch} rank {rank}"
                curvature.append(BubbleWork(name, rank, seconds["curvature"], (_maker(schedule.orders[rank], key[0], stage, at),)))
                made[key] += (name,)
        if len(homes) > 1:
            sums += [
                BubbleWork(f"sum {a} {of} rank {rank}", rank, seconds["sum"], (), made[a, of]) for rank, (a, of) in product(homes, keys)
            ]
        for i, key in enumerate(keys):
            rank = homes[i % len(homes)]  # replicas take turns
            needs = (f"sum {key[0]} {key[1]} rank {rank}",) if len(homes) > 1 else made[key]
            inversions.append(BubbleWork(f"inversion {key[0]} {key[1]} rank {rank}", rank, seconds["inversion"], (), needs))
    return [*curvature, *sums, *inversions]


def _forwards(order: Sequence[Action], stage: int) -> list[Action]:
    return [action for action in order if action.op is Op.F and action.stage == stage]


def _maker(order: Sequence[Action], factor: str, stage: int, at: int) -> Action:
    """Return the action after which a factor's curvature can be computed, for the micro-batch of the stage's forward pass number `at`."""
    forward = _forwards(order, stage)[at]
    if factor == "A":
        return forward
    return next(a for a in order if a.op in (Op.B, Op.I) and a[1:3] == forward[1:3])


@dataclass
class BubbleFiller(Watcher):
    """Watcher of the pipeline's runtime that does a rank's K-FAC work while the rank would wait.

    In the first `measured` refreshes, units run at the ends of steps and are timed, and so are the actions of the last of these steps.

    schedule: the schedule of one batch. axis: the ranks of the pipeline. stages: name of a linear -> its stage.
    slots: (number of a step since its refresh, index of an action in the rank's order) -> the units to do after that action; index -1:
        before the first one. None: not planned yet.
    placed_share: fraction of the units' time that has a place in the plan.
    waits: fractions of a step that this rank waits: without the placed units, and with them.
    """

    kfac: Kfac
    schedule: Schedule
    axis: Axis
    stages: Mapping[str, int]
    measured: int = 2
    slots: dict[tuple[int, int], list[KfacUnit]] | None = None
    placed_share: float = 0.0
    waits: tuple[float, float] = (0.0, 0.0)
    _record: list[Span] | None = None  # times of the rank's actions; None: not measured now

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
        """Do the units planned after action number `at`; -1: before the first action."""
        assert self.slots is not None
        for unit in self.slots.get((self.kfac.updates % self.kfac.settings.refresh_every, at), ()):
            if unit in self.kfac.waiting:
                self.kfac.run(unit)

    @property
    def _order(self) -> tuple[Action, ...]:
        return self.schedule.orders[self.axis.index]

    def plan(self) -> None:
        """Make the plan from the measured times. Collective over the pipeline, because a step ends with its slowest rank."""
        s = self.kfac.settings
        assert self._record is not None
        record = self._record[: len(self._order)]
        self._record = None
        first = -largest(-record[0].start, self.axis)
        last = largest(record[-1].end, self.axis)
        spans = tuple(Span(took.action, took.start - first, took.end - first) for took in record)
        # Timeline of this rank alone. A short action at its end marks the end of the last rank, so that the plan ends before the next step.
        end = Action(Op.U, spans[0].action.stage, version=-1)
        own = Schedule(self.schedule.name, tuple((0,) for _ in self.schedule.homes), 1, 1, ((*self._order, end),))
        timeline = Timeline(own, ((*spans, Span(end, last - first, (last - first) * (1 + 1e-6))),), (), True)
        seconds = self.kfac.times()
        self.slots, room, total = defaultdict(list), 0.0, 0.0
        for kind, begin, steps in (("curvature", 0, s.delay // 2 + 1), ("inversion", s.delay // 2 + 1, s.delay - s.delay // 2)):
            units = {str(unit): unit for unit in self._units(kind)}
            cost = {name: seconds[unit.kind, unit.factor, unit.name] for name, unit in units.items()}
            longest = max((hole.end - hole.start for hole in bubbles(timeline)), default=0.0)
            fitting = [name for name in units if 0 < _MARGIN * cost[name] <= longest]
            total += sum(cost.values())
            for placed in pack(timeline, [BubbleWork(n, 0, cost[n], self._after(units[n])) for n in fitting], margin=_MARGIN).placed:
                if placed.step < steps:
                    self.slots[begin + placed.step, self._last_ended(timeline, placed)].append(units[placed.work.name])
                    room += placed.work.time
        self.placed_share = room / total if total else 1.0
        idle = sum(hole.end - hole.start for hole in bubbles(timeline))
        self.waits = idle / timeline.makespan, (idle - room / s.refresh_every) / timeline.makespan

    def _units(self, kind: str) -> list[KfacUnit]:
        keys = list(self.kfac.factors)
        if kind == "inversion":
            return [KfacUnit(kind, *key) for key in keys if key in self.kfac.inverts]
        passes = Counter(a.stage for a in self._order if a.op is Op.F)
        return [KfacUnit(kind, *key, i) for key in keys for i in range(passes[self.stages[key[1]]])]

    def _after(self, unit: KfacUnit) -> tuple[Action, ...]:
        return () if unit.kind == "inversion" else (_maker(self._order, unit.factor, self.stages[unit.name], unit.microbatch),)

    def _last_ended(self, timeline: Timeline, placed: Placed) -> int:
        """Return the index of the last action of the step that has ended when the work starts; -1 if none has."""
        at = placed.start - placed.step * timeline.makespan
        return sum(span.end <= at + 1e-9 for span in timeline.spans[0][:-1]) - 1
