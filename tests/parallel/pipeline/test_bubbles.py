"""Tests of `pack` (PipeFisher): the pipeline's actions keep their times, no work overlaps, and work starts after all that it needs."""

from __future__ import annotations

from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.kfac.fisher import BubbleWork, bubbles, pack
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.simulator.simulate import costs, simulate
from tests.support.kfac_work import Packing, packing_of
from tests.support.kfac_work import works as kfac_works

# Milliseconds of one Transformer block and a micro-batch of 32 sequences (16 on V100): forward, backward, curvature, inversion. Each stage
# has one block. Source: kazukiosawa/pipe-fisher at 753fdf0, prof/*_time_memory_*.csv.
PROFILES = {
    "bert-base P100": (9.748101, 16.450238, 25.546598, 71.666884),
    "bert-large P100": (16.100359, 26.952887, 43.499517, 126.700854),
    "bert-large V100": (5.437803, 8.603144, 14.805532, 80.795622),
}


def works_of(schedule: Schedule, curvature: float, inversion: float, blocks: int, summation: float = 0) -> list[BubbleWork]:
    """Return K-FAC's work for stages of `blocks` linears. curvature, inversion: times of a whole stage, both factors together."""
    factors = {stage: [(f, f"{stage}.{block}") for f in "AG" for block in range(blocks)] for stage in range(schedule.num_stages)}
    return kfac_works(schedule, factors, {"curvature": curvature / 2 / blocks, "inversion": inversion / 2 / blocks, "sum": summation})


def check_packing(packing: Packing, works: list[BubbleWork], margin: float = 1.0) -> None:
    timeline = packing.timeline
    period = timeline.makespan
    assert Counter(placed.work for placed in packing.placed) == Counter(works)
    done = {placed.work.name: placed for placed in packing.placed}
    ends = {(rank, span.action): span.end for rank, spans in enumerate(timeline.spans) for span in spans}
    for placed in packing.placed:
        work = placed.work
        assert placed.end - placed.start == pytest.approx(work.time)
        assert all(ends[work.rank, action] <= placed.start + 1e-9 for action in work.after)
        assert all(done[need].end <= placed.start + 1e-9 for need in work.needs)
    for rank in range(timeline.schedule.num_ranks):
        taken = [(p.start, p.end) for p in packing.placed if p.work.rank == rank]
        for span in timeline.spans[rank]:
            if span.action.op is not Op.S and span.end > span.start:
                taken += [(step * period + span.start, step * period + span.end) for step in range(packing.steps + 1)]
        taken.sort()
        assert all(a[1] <= b[0] + 1e-9 for a, b in zip(taken, taken[1:], strict=False)), rank


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "chimera"])
@pytest.mark.parametrize("profile", PROFILES)
def test_k_fac_fits_into_the_bubbles_of_few_steps(name: str, profile: str) -> None:
    """PipeFisher's performance model for m = p: a step takes c_F F + c_B B with (c_F, c_B) = (2 p - 1, 2 p - 1) for GPipe and 1F1B, and (p,
    2 p - 2) for Chimera. Work needs at least ceil(work / bubble) steps; units do not fit exactly, so up to one (Chimera: two) more."""
    forward, backward, curvature, inversion = PROFILES[profile]
    p = 8
    timeline = simulate(make_schedule(name, ranks=p, microbatches=p), costs(forward, backward))
    F, B = (p, 2 * p - 2) if name == "chimera" else (2 * p - 1, 2 * p - 1)
    assert timeline.makespan == pytest.approx(F * forward + B * backward)
    bubble = timeline.makespan - p * (forward + backward)
    assert [timeline.idle(rank) for rank in range(p)] == pytest.approx([bubble] * p)
    works = works_of(timeline.schedule, curvature, inversion, 8)
    packing = packing_of(timeline, works)
    check_packing(packing, works)
    least = ceil((p * curvature + inversion) / bubble)
    assert least <= packing.steps <= least + (2 if name == "chimera" else 1)
    assert packing.utilization_before == pytest.approx(p * (forward + backward) / timeline.makespan)
    work = p * (p * curvature + inversion)
    assert packing.utilization == pytest.approx(packing.utilization_before + work / (p * packing.steps * timeline.makespan))
    assert packing.utilization > 0.8


def test_utilization_of_the_papers_example() -> None:
    """Utilization, step time and bubble with the paper's profile and p = 8: Chimera 0.680, 506.1 ms, 161.7 ms; 1F1B 0.533, 645.8, 301.4."""
    forward, backward, *_ = PROFILES["bert-large P100"]
    for name, share, took, wait in (("chimera", 0.680, 506.1, 161.7), ("1f1b", 0.533, 645.8, 301.4)):
        timeline = simulate(make_schedule(name, ranks=8, microbatches=8), costs(forward, backward))
        packing = packing_of(timeline, [])
        assert (packing.utilization_before, timeline.makespan, timeline.idle(0)) == pytest.approx((share, took, wait), abs=0.06)
        assert packing.utilization == packing.utilization_before and packing.steps == 1


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from([n for n in sorted(SCHEDULES) if n not in ("pipedream", "two_bw")]),
    size=st.sampled_from([(2, 4), (4, 8)]),
    curvature=st.floats(0.01, 0.3),
    inversion=st.floats(0.01, 0.5),
    blocks=st.integers(1, 3),
)
def test_any_packing_keeps_the_rules(name: str, size: tuple[int, int], curvature: float, inversion: float, blocks: int) -> None:
    timeline = simulate(make_schedule(name, ranks=size[0], microbatches=size[1]), costs(1, 2, summation=0.5))
    works = works_of(timeline.schedule, curvature, inversion, blocks, 0.1)
    holes = bubbles(timeline)
    if any(all(1.05 * work.time > hole.end - hole.start for hole in holes if hole.rank == work.rank) for work in works):
        return  # some work fits into no bubble of its rank
    check_packing(packing_of(timeline, works), works)


def test_bubbles_are_the_idle_time_of_each_rank() -> None:
    for name in SCHEDULES:
        timeline = simulate(make_schedule(name, ranks=4, microbatches=8), costs(1, 3, summation=2))
        for rank in range(4):
            assert sum(hole.end - hole.start for hole in bubbles(timeline) if hole.rank == rank) == pytest.approx(timeline.idle(rank))


def test_the_sum_over_replicas_comes_between_curvature_and_inversion() -> None:
    works = {work.name: work for work in works_of(make_schedule("chimera", ranks=2, microbatches=2), 2, 4, 1, 1)}
    assert set(works["sum A 0.0 rank 1"].needs) == {"curvature A 0.0 micro-batch 0 rank 0", "curvature A 0.0 micro-batch 1 rank 1"}
    inverted = [work for name, work in works.items() if name.startswith("inversion A 0.0")]
    assert [work.needs for work in inverted] == [("sum A 0.0 rank 0",)]
    assert {w.rank for n, w in works.items() if n.startswith("inversion") and " 0.0 " in n} == {
        0,
        1,
    }  # the stage's two factors are inverted on different replicas
    assert works["curvature G 1.0 micro-batch 1 rank 0"].after == (Action(Op.B, 1, 1),)


def test_priority_decides_among_what_is_ready_and_the_margin_keeps_a_gap_free() -> None:
    """`pack` on GPipe with p = 2, m = 2, F = 1, B = 2, where rank 0 waits from time 2 to 5."""
    timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=2))
    first, second = BubbleWork("first", 0, 2), BubbleWork("second", 0, 1)
    assert [(p.work.name, p.start) for p in pack(timeline, [first, second], steps=1, margin=1)] == [("first", 2), ("second", 4)]
    packing = packing_of(timeline, [first, second])  # with the default margin of 1.05, the rest of the bubble is too short for `second`
    assert [(p.work.name, p.step) for p in packing.placed] == [("first", 0), ("second", 1)] and packing.steps == 2


def test_a_bubble_at_the_end_of_a_step_continues_in_the_next_step() -> None:
    """1F1B with p = 2 and m = 2: rank 1 waits from time 7 to the end of the step at 9, and 1 more in the next step: 3 together."""
    timeline = simulate(make_schedule("1f1b", ranks=2, microbatches=2))
    (placed,) = pack(timeline, [BubbleWork("long", 1, 2.5)], steps=1)
    assert (placed.start, placed.end) == (7, 9.5)


def test_work_that_fits_into_no_bubble_or_not_into_these_steps_is_left_out() -> None:
    timeline = simulate(make_schedule("gpipe", ranks=2, microbatches=2))  # each step has one bubble of 3 on rank 0
    assert not pack(timeline, [BubbleWork("long", 0, 3)], steps=9)  # 3.15 with its margin
    assert [p.work.name for p in pack(timeline, [BubbleWork(f"{n}", 0, 2) for n in range(4)], steps=3)] == ["0", "1", "2"]
    assert not pack(timeline, [BubbleWork("a", 0, 1, needs=("b",)), BubbleWork("b", 1, 1, needs=("a",))], steps=9)
