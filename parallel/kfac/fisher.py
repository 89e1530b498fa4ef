"""PipeFisher (arXiv 2211.14133): puts K-FAC's work into a pipeline's bubbles, by a plan made from measured times.

    rank 1   F0  A0  F1  A1  B0  G0  B1  G1 | F0 F1 inv inv B0 ...      A0: factor A of micro-batch 0, after its forward pass

Rules: A of a micro-batch comes after its forward pass, and G after its backward pass (after I, if that is separate). The sum over the
ranks that hold replicas comes after all curvature of that factor. The inversion comes after the sum, on one of these ranks. `works`
states these rules as needs for any packing (parallel/pipeline/simulator/bubbles.py); `check_rules` checks a packing independently.

`BubbleFiller` measures the first steps, then packs its own rank's units into its own rank's waits. Sums over ranks always run at the end
of a step (parallel/kfac/kfac.py), and so does work that found no place in the plan. A plan changes times, never numbers, so each rank can
make its own plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.kfac.kfac import Kfac, KfacUnit
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Axis
from parallel.pipeline.runtime import TimedAction
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.simulator.bubbles import BubbleWork, Packing, Placed, bubbles, pack
from parallel.pipeline.simulator.simulate import Span, Timeline

_MARGIN = 1.05
_BACKWARDS = (Op.B, Op.I)  # after either, the gradients of the outputs of a stage's linears are available
Factors = Mapping[int, Sequence[tuple[str, str]]]  # stage -> its factors: ("A" or "G", linear)


class KfacWork(NamedTuple):
    """One unit of K-FAC's work on one rank, for one factor ("A" or "G") of one linear.

    kind: "curvature" of one micro-batch, "sum" over replicas, or "inversion". microbatch: -1 for sums and inversions.
    """

    kind: str
    factor: str
    linear: str
    stage: int
    rank: int
    microbatch: int = -1

    def __str__(self) -> str:
        of = "" if self.microbatch < 0 else f" micro-batch {self.microbatch}"
        return f"{self.kind} {self.factor} {self.linear}{of} rank {self.rank}"


def kfac_work(schedule: Schedule, factors: Factors) -> list[KfacWork]:
    """All units in order of priority: curvature, then sums for stages with several ranks, then inversions."""
    each = [(stage, rank, *key) for stage, homes in enumerate(schedule.homes) for rank in homes for key in factors.get(stage, ())]
    curvature = [
        KfacWork("curvature", factor, linear, stage, rank, a.microbatch)
        for stage, rank, factor, linear in each
        for a in schedule.orders[rank]
        if a.stage == stage and a.op is Op.F
    ]
    sums = [KfacWork("sum", factor, linear, stage, rank) for stage, rank, factor, linear in each if len(schedule.homes[stage]) > 1]
    inversions = [
        KfacWork("inversion", factor, linear, stage, homes[i % len(homes)])  # replicas take turns
        for stage, homes in enumerate(schedule.homes)
        for i, (factor, linear) in enumerate(factors.get(stage, ()))
    ]
    return [*curvature, *sums, *inversions]


def works(schedule: Schedule, factors: Factors, seconds: Callable[[KfacWork], float]) -> list[BubbleWork]:
    """All units as work for `pack`, with the actions and the other work that must come before each. seconds: duration of a unit."""
    units = kfac_work(schedule, factors)
    made: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for unit in units:
        made[unit.kind, unit.factor, unit.linear].append(str(unit))
    found = []
    for unit in units:
        after: tuple[Action, ...] = ()
        needs: tuple[str, ...] = ()
        if unit.kind == "curvature":
            after = (_maker(schedule, unit),)
        elif unit.kind == "inversion" and len(schedule.homes[unit.stage]) > 1:
            needs = (str(unit._replace(kind="sum")),)
        else:
            needs = tuple(made["curvature", unit.factor, unit.linear])
        found.append(BubbleWork(str(unit), unit.rank, seconds(unit), after, needs))
    return found


def _maker(schedule: Schedule, unit: KfacWork) -> Action:
    """Action that makes the rows for a unit of curvature."""
    wanted = (Op.F,) if unit.factor == "A" else _BACKWARDS
    order = schedule.orders[unit.rank]
    return next(a for a in order if a.op in wanted and (a.stage, a.microbatch) == (unit.stage, unit.microbatch))


def check_rules(packing: Packing, factors: Factors) -> None:
    """Check a packing. Raises BadInput if a unit is missing, comes twice, or starts too early."""
    schedule = packing.timeline.schedule
    units = kfac_work(schedule, factors)
    counts = Counter(placed.work.name for placed in packing.placed)
    for unit in units:
        if counts[str(unit)] != 1:
            raise BadInput(str(unit), got=f"{counts[str(unit)]} placements", needed="1", fix="pack what works() gives")
    placed = {p.work.name: p for p in packing.placed}
    ends = {(rank, span.action): span.end for rank, spans in enumerate(packing.timeline.spans) for span in spans}
    curved: dict[tuple[str, str], float] = defaultdict(float)
    for unit in units:
        if unit.kind == "curvature":
            curved[unit.factor, unit.linear] = max(curved[unit.factor, unit.linear], placed[str(unit)].end)
    for unit in units:
        if unit.kind == "curvature":
            maker = _maker(schedule, unit)
            _refuse_before(placed[str(unit)], ends[unit.rank, maker], f"the end of {maker}")
            continue
        _refuse_before(placed[str(unit)], curved[unit.factor, unit.linear], "the end of all curvature of the factor")
        if unit.kind == "inversion" and len(schedule.homes[unit.stage]) > 1:
            _refuse_before(placed[str(unit)], placed[str(unit._replace(kind="sum"))].end, "the end of its sum over replicas")


def _refuse_before(placed: Placed, end: float, what: str) -> None:
    if placed.start < end - 1e-9 * max(1.0, abs(end)):
        raise BadInput(placed.work.name, got=f"a start at {placed.start:g}", needed=f"{what}, {end:g}", fix="let it need that")


# --- at run time: measuring, planning and filling bubbles -------------------------------------------------------------


@dataclass
class BubbleFiller:
    """Watcher of the pipeline's runtime that does a rank's K-FAC work while the rank would wait.

    The first `measured` refreshes run at the ends of steps, and their units are timed. So are the actions of their last step.

    schedule: the schedule of one batch. axis: the ranks of the pipeline. stages: linear -> its stage.
    slots: (step of a refresh, index in the order) -> the units to do after that action; None: not planned yet.
    placed_share: fraction of the units' time that has a place in the plan.
    waits: fraction of a step that this rank waits, without and with the placed units.
    """

    kfac: Kfac
    schedule: Schedule
    axis: Axis
    stages: Mapping[str, int]
    measured: int = 2
    slots: dict[tuple[int, int], list[KfacUnit]] | None = None
    placed_share: float = 0.0
    waits: tuple[float, float] = (0.0, 0.0)
    _record: list[TimedAction] | None = None

    def __post_init__(self) -> None:
        self.kfac.defer(timed=True)

    def begin(self) -> None:
        if self.slots is None:
            self._plan_or_record()
        else:
            self._fill(-1)

    def before(self, action: Action) -> None: ...

    def after(self, at: int, took: TimedAction) -> None:
        if self._record is not None:
            self._record.append(took)
        if self.slots is not None:
            self._fill(at)

    def _fill(self, at: int) -> None:
        """Do the units planned after action number `at`; -1: before the first action."""
        assert self.slots is not None
        for item in self.slots.get((self.kfac.updates % self.kfac.settings.refresh_every, at), ()):
            if item in self.kfac.waiting:
                self.kfac.run(item)

    def _plan_or_record(self) -> None:
        """Start recording at the last step of the measured refreshes; plan one step later, when the record is complete."""
        if self._record and len(self._record) >= len(self._order):
            self.plan()
        elif self.kfac.updates == self.measured * self.kfac.settings.refresh_every - 1:
            self._record = []

    @property
    def _order(self) -> tuple[Action, ...]:
        return self.schedule.orders[self.axis.index]

    def plan(self) -> None:
        """Make the plan from the measured times. Collective over the pipeline, because a step ends with its slowest rank."""
        s = self.kfac.settings
        assert self._record is not None
        record = self._record[: len(self._order)]
        self._record = None
        begun = record[0].start
        first = -largest(-begun, self.axis)
        last = largest(record[-1].end, self.axis)
        spans = tuple(Span(took.action, took.start - first, took.end - first) for took in record)
        # Timeline of this rank only. A short action at its end marks the end of the last rank, so no wait reaches into the next step.
        end = Action(Op.U, spans[0].action.stage, version=-1)
        own = Schedule(self.schedule.name, tuple((0,) for _ in self.schedule.homes), 1, 1, ((*self._order, end),))
        timeline = Timeline(own, ((*spans, Span(end, last - first, (last - first) * (1 + 1e-6))),), (), True)
        seconds = self.kfac.times()
        self.slots, room, total = defaultdict(list), 0.0, 0.0
        for kind, begin, steps in (("curvature", 0, s.delay // 2 + 1), ("inversion", s.delay // 2 + 1, s.delay - s.delay // 2)):
            items = {str(item): item for item in self._items(kind)}
            cost = {name: seconds[item.kind, item.factor, item.name] for name, item in items.items()}
            longest = max((hole.end - hole.start for hole in bubbles(timeline)), default=0.0)
            fitting = [name for name in items if 0 < _MARGIN * cost[name] <= longest]
            total += sum(cost.values())
            for placed in pack(timeline, [BubbleWork(n, 0, cost[n], self._after(items[n])) for n in fitting], margin=_MARGIN).placed:
                if placed.step < steps:
                    self.slots[begin + placed.step, self._place(timeline, placed)].append(items[placed.work.name])
                    room += placed.work.time
        self.placed_share = room / total if total else 1.0
        idle = sum(hole.end - hole.start for hole in bubbles(timeline))
        self.waits = idle / timeline.makespan, (idle - room / s.refresh_every) / timeline.makespan

    def _items(self, kind: str) -> list[KfacUnit]:
        keys = list(self.kfac.factors)
        if kind == "inversion":
            return [KfacUnit(kind, *key) for key in keys if key in self.kfac.inverts]
        passes = Counter(a.stage for a in self._order if a.op is Op.F)
        return [KfacUnit(kind, *key, i) for key in keys for i in range(passes[self.stages[key[1]]])]

    def _after(self, item: KfacUnit) -> tuple[Action, ...]:
        if item.kind == "inversion":
            return ()
        stage = self.stages[item.name]
        forwards = [a for a in self._order if a.op is Op.F and a.stage == stage]
        if item.factor == "A":
            return (forwards[item.microbatch],)
        of = forwards[item.microbatch].microbatch
        return (next(a for a in self._order if a.op in _BACKWARDS and (a.stage, a.microbatch) == (stage, of)),)

    def _place(self, timeline: Timeline, placed: Placed) -> int:
        """Index of the last action of the step that has ended when the work starts; -1 if none has."""
        at = placed.start - placed.step * timeline.makespan
        return sum(span.end <= at + 1e-9 for span in timeline.spans[0][:-1]) - 1
