"""PipeFisher (arXiv 2211.14133): K-FAC's units of work in a pipeline's bubbles, planned from measured times and done by the runtime.

    rank 1   F0  A0  F1  A1  B0  G0  B1  G1 | F0 F1 inv inv B0 ...      A0: the inputs' factor of micro-batch 0, after its forward

Rules: A of a micro-batch comes after its forward pass, and G after its backward pass (I, where that is separate). A sum over the ranks
that hold replicas comes after all curvature of that factor; an inversion comes after the sum, on one of these ranks. `works` states
the rules as needs for any packing (parallel/pipeline/simulator/bubbles.py); `check_rules` checks a packing without using its needs.

`Filler` measures the first steps, then packs its own rank's units into its own rank's waits. Sums have a fixed place, the end
of a step (parallel/kfac/kfac.py), and work without a place in the plan is done there too. A plan changes times, never numbers, so each
rank can plan on its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.errors import BadInput
from parallel.kfac.kfac import Item, Kfac
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Axis
from parallel.pipeline.runtime import Took
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.simulator.bubbles import BubbleWork, Packing, Placed, bubbles, pack
from parallel.pipeline.simulator.simulate import Span, Timeline

_MARGIN = 1.05
_BACKWARDS = (Op.B, Op.I)  # after either, the gradients of a stage's outputs are available
Factors = Mapping[int, Sequence[tuple[str, str]]]  # stage -> its factors: ("A" or "G", linear)


class KfacWork(NamedTuple):
    """One unit of K-FAC on one rank, for one factor of one linear: "curvature" of a micro-batch, "sum" over replicas, or "inversion"."""

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
    """All units in order of priority: curvature, then sums where a stage has several ranks, then inversions."""
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
    """The same units as work for `pack`, each with what it must come after. A work's name is the unit's text."""
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
    """The action that makes the rows of a unit's micro-batch."""
    wanted = (Op.F,) if unit.factor == "A" else _BACKWARDS
    order = schedule.orders[unit.rank]
    return next(a for a in order if a.op in wanted and (a.stage, a.microbatch) == (unit.stage, unit.microbatch))


def check_rules(packing: Packing, factors: Factors) -> None:
    """Refuse a packing in which a unit is missing, comes twice or comes too early. Raises BadInput."""
    schedule = packing.timeline.schedule
    units = kfac_work(schedule, factors)
    counts = Counter(placed.work.name for placed in packing.placed)
    for unit in units:
        if counts[str(unit)] != 1:
            raise BadInput(str(unit), got=f"{counts[str(unit)]} of it", needed="1", fix="pack what works() gives")
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
class Filler:
    """Puts a rank's K-FAC into its waits: a Watcher of the pipeline's runtime.

    `schedule`: of one batch; `axis`: the ranks of the pipeline; `stages`: of each linear of this rank. The first `measured` refreshes
    are made at the ends of steps, with their times taken, as are the actions' times of the last step of each. `slots`: for each step of a
    refresh and place in the order, the units to do there.
    """

    kfac: Kfac
    schedule: Schedule
    axis: Axis
    stages: Mapping[str, int]
    measured: int = 2
    slots: dict[tuple[int, int], list[Item]] | None = None
    placed_share: float = 0.0  # the share of the units' time that the plan has room for
    waits: tuple[float, float] = (0.0, 0.0)  # this rank's share of a step, without the units that are placed and with them
    _record: list[Took] | None = None

    def __post_init__(self) -> None:
        self.kfac.put_off(timed=True)

    def begin(self) -> None:
        if self.slots is None:
            self._plan_or_record()
        else:
            self._fill(-1)

    def before(self, action: Action) -> None: ...

    def after(self, at: int, took: Took) -> None:
        if self._record is not None:
            self._record.append(took)
        if self.slots is not None:
            self._fill(at)

    def _fill(self, at: int) -> None:
        """After the at-th action, -1: before the first."""
        assert self.slots is not None
        for item in self.slots.get((self.kfac.updates % self.kfac.settings.refresh_every, at), ()):
            if item in self.kfac.waiting:
                self.kfac.run(item)

    def _plan_or_record(self) -> None:
        """In the last step of a refresh actions' times are taken; with the step after it they are complete."""
        if self._record and len(self._record) >= len(self._order):
            self.plan()
        elif self.kfac.updates == self.measured * self.kfac.settings.refresh_every - 1:
            self._record = []

    @property
    def _order(self) -> tuple[Action, ...]:
        return self.schedule.orders[self.axis.index]

    def plan(self) -> None:
        """From what was measured. Collective over the pipeline: a step is as long as its slowest rank says."""
        s = self.kfac.settings
        assert self._record is not None
        record = self._record[: len(self._order)]
        self._record = None
        begun = record[0].start
        first = -largest(-begun, self.axis)
        last = largest(record[-1].end, self.axis)
        spans = tuple(Span(took.action, took.start - first, took.end - first) for took in record)
        # a timeline of this rank alone: a short action at its end marks where the last rank is done, so no wait goes on into the next step
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

    def _items(self, kind: str) -> list[Item]:
        keys = list(self.kfac.factors)
        if kind == "inversion":
            return [Item(kind, *key) for key in keys if key in self.kfac.inverts]
        passes = Counter(a.stage for a in self._order if a.op is Op.F)
        return [Item(kind, *key, i) for key in keys for i in range(passes[self.stages[key[1]]])]

    def _after(self, item: Item) -> tuple[Action, ...]:
        if item.kind == "inversion":
            return ()
        stage = self.stages[item.name]
        forwards = [a for a in self._order if a.op is Op.F and a.stage == stage]
        if item.factor == "A":
            return (forwards[item.microbatch],)
        of = forwards[item.microbatch].microbatch
        return (next(a for a in self._order if a.op in _BACKWARDS and (a.stage, a.microbatch) == (stage, of)),)

    def _place(self, timeline: Timeline, placed: Placed) -> int:
        """Place in the order of the last action that has ended when the work begins, within its step."""
        at = placed.start - placed.step * timeline.makespan
        return sum(span.end <= at + 1e-9 for span in timeline.spans[0][:-1]) - 1
