"""Sums of gradients beside a pipeline's actions: when they begin, what they leave to wait for, and that no number changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.train.parts.executor import Pipelined
from moe.verify.cases import Case
from parallel.pipeline.schedule import Action, Op, Span, Watcher, stage_complete_at
from parallel.pipeline.schedules.catalog import SCHEDULES, make_schedule
from parallel.pipeline.simulator.simulate import Timeline, costs, simulate
from tests.support.plain_simulation import exposed
from tests.support.ranks import run_on_ranks
from tests.support.tiny import start

DRAINED = [name for name, kind in SCHEDULES.items() if not kind.continuous]


@pytest.mark.parametrize("name", DRAINED)
def test_gradients_are_whole_when_no_action_adds_to_them(name: str) -> None:
    made = make_schedule(name, ranks=4, microbatches=8)
    for rank, order in enumerate(made.orders):
        places = stage_complete_at(order)
        assert sorted(places.values()) == sorted(made.stages_of(rank))
        for at, stage in places.items():
            adds = [a.microbatch for a in order[: at + 1] if a.stage == stage and a.op in (Op.B, Op.W)]
            mine = [a.microbatch for a in order if a.stage == stage and a.op is Op.F]
            assert sorted(adds) == sorted(mine) and not any(a.stage == stage and a.op in (Op.F, Op.I) for a in order[at + 1 :])


def left(timeline: Timeline, seconds: float) -> float:
    """The wait by another formula: sums in a queue end with the latest of (a stage's end and all sums from it on)."""
    latest = timeline.makespan
    for spans in timeline.spans:
        ends: dict[int, float] = {}
        for span in spans:
            if span.action.op in (Op.B, Op.W):
                ends[span.action.stage] = max(ends.get(span.action.stage, 0.0), span.end)
        queue = sorted(ends.values(), reverse=True)
        latest = max(latest, *(end + all_after for end, all_after in zip(queue, accumulate([seconds] * len(queue)), strict=True)))
    return latest - timeline.makespan


@pytest.mark.parametrize("name", DRAINED)
@pytest.mark.parametrize("seconds", [0.5, 3.0, 40.0])
def test_what_is_waited_for_is_the_end_of_the_queue(name: str, seconds: float) -> None:
    timeline = simulate(make_schedule(name, ranks=4, microbatches=8), costs([1, 1.5, 1, 2] * 2, [2, 3, 2, 5] * 2))
    beside, after = (exposed(timeline, lambda rank, stage: seconds, begin=begin) for begin in ("stage", "rank"))  # type: ignore[arg-type]
    assert beside == pytest.approx(left(timeline, seconds)) and 0 < beside <= after
    stages = max(len(timeline.schedule.stages_of(rank)) for rank in range(4))
    assert stages > 1 or beside == after


@pytest.mark.parametrize("chunks", [2, 4])
def test_of_several_stages_a_rank_waits_for_one_alone(chunks: int) -> None:
    """Rank 0's last p micro-batches go back through one stage after another: p B / v each, in which the stage before is summed."""
    timeline = simulate(make_schedule("interleaved", ranks=4, microbatches=8, chunks=chunks), costs(1 / chunks, 2 / chunks))
    whole = 8.0  # p B: the most that is hidden
    assert exposed(timeline, lambda rank, stage: whole / chunks, begin="rank") == pytest.approx(whole)
    assert exposed(timeline, lambda rank, stage: whole / chunks) == pytest.approx(whole / chunks)


class Late:
    """Sums that all begin after the rank's last action."""

    def __init__(self, start: Callable[[Sequence[str]], None], actions: int) -> None:
        self.start, self.actions, self.kept = start, actions, list[Sequence[str]]()

    def after(self, at: int) -> None:
        for names in self.kept if at == self.actions - 1 else ():
            self.start(names)


def _gradients(rank: int, case: Case) -> tuple[bool, list[str], dict[int, int]]:
    """Whether all gradients are those of sums that begin last, to the bit; sums and actions in the order of their beginning."""
    found: list[dict[str, Tensor]] = []
    log: list[str] = []
    for late in (False, True):
        tiny = start(case, rank)
        assert isinstance(tiny.executor, Pipelined)
        (sums,) = tiny.executor.sums
        order = tiny.executor.runtime.schedule.orders[tiny.mesh.axis("pp").index]
        inner, keeper = sums.start, Late(sums.start, len(order))  # type: ignore[attr-defined]

        def noted(names: Sequence[str], inner: Any = inner) -> None:
            log.extend(["sum"] if names else [])
            inner(names)

        class Recorded(Watcher):
            def before(self, action: Action) -> None:
                log.append("action")

            def after(self, at: int, took: Span, keeper: Late = keeper) -> None:
                keeper.after(at)

        sums.start = keeper.kept.append if late else noted  # type: ignore[attr-defined]
        with tiny.executor.watched(Recorded()):
            tiny.accumulate(0)
        found.append({name: tiny.engine.gradient(name).clone() for name in tiny.engine.layouts})
    equal = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    return equal, log[: len(order) + len(stage_complete_at(order))], stage_complete_at(order)


@pytest.mark.parametrize(("schedule", "layers"), [("interleaved", 5), ("zb_v", 5)])
def test_sums_begin_when_a_stage_is_done_and_are_bit_for_bit_those_after_all(schedule: str, layers: int) -> None:
    """Three replicas, of which a ring adds up each element in an order that depends on its place in the buffer."""
    case = Case("gshard", "ddp", 6, 1, 4, "fp32", pp=2, schedule=schedule, layers=layers)
    for equal, log, places in run_on_ranks(_gradients, case.world, case, timeout_s=90):
        assert equal
        begun = [log[:here].count("action") - 1 for here, what in enumerate(log) if what == "sum"]
        assert begun == sorted(places) and begun[0] < begun[1]  # right after the action with which the stage is whole
