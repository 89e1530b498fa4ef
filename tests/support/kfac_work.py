"""K-FAC's work in a pipeline as input of `pack`, for any schedule, and how well it fills bubbles; for tests and for the docs' picture."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from parallel.kfac.fisher import BubbleWork, Placed, pack
from parallel.pipeline.schedule import Op, Schedule
from parallel.pipeline.simulator.simulate import Timeline
from tests.support.plain_simulation import backward as backward_of


def works(schedule: Schedule, factors: Mapping[int, Sequence[tuple[str, str]]], seconds: Mapping[str, float]) -> list[BubbleWork]:
    """Return K-FAC's work for one batch, in order of priority: curvature, all-reduces over replicas, inversions.

    A of a micro-batch needs its forward pass, G its input gradient. The all-reduce needs all curvature of the factor, the inversion the
    all-reduce. factors: stage -> its factors, each as ("A" or "G", name of the linear). seconds: kind of work -> duration of one unit.
    """
    curvature, sums, inversions = [], [], []
    made: dict[tuple[str, str], tuple[str, ...]] = defaultdict(tuple)  # factor -> names of all its curvature
    for stage, homes in enumerate(schedule.homes):
        keys = factors.get(stage, ())
        for rank, key in product(homes, keys):
            for forward in (a for a in schedule.orders[rank] if a.op is Op.F and a.stage == stage):
                backward = backward_of(schedule, stage, forward.microbatch)
                assert backward is not None
                name = f"curvature {key[0]} {key[1]} micro-batch {forward.microbatch} rank {rank}"
                after = forward if key[0] == "A" else schedule.action(backward)
                curvature.append(BubbleWork(name, rank, seconds["curvature"], (after,)))
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


@dataclass(frozen=True)
class Packing:
    """All work, placed in a timeline's bubbles."""

    timeline: Timeline
    placed: tuple[Placed, ...]

    @property
    def steps(self) -> int:
        """Number of steps until all work is done."""
        return 1 + max((placed.step for placed in self.placed), default=0)

    @property
    def utilization_before(self) -> float:
        """Busy time of all ranks as a fraction of the steps' time, without the work."""
        return 1 - sum(map(self.timeline.idle, range(self.timeline.schedule.num_ranks))) / self._of_a_step

    @property
    def utilization(self) -> float:
        """Busy time of all ranks as a fraction of the steps' time, with the work."""
        return self.utilization_before + sum(placed.work.time for placed in self.placed) / (self.steps * self._of_a_step)

    @property
    def _of_a_step(self) -> float:
        return self.timeline.schedule.num_ranks * self.timeline.makespan


def packing_of(timeline: Timeline, works: Sequence[BubbleWork]) -> Packing:
    """Place all work, in as many steps as it needs."""
    placed = pack(timeline, works, steps=1000)
    assert len(placed) == len(works)
    return Packing(timeline, tuple(placed))
