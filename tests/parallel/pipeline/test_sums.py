"""Data-parallel reductions of gradients that overlap with a pipeline's actions: when they start, how long the step still waits for them,
and that gradients stay equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.train.parts.executor import Pipelined
from moe.verify.cases import Case
from parallel.data import buckets
from parallel.pipeline.schedule import Action, Op, Span, Watcher, stage_complete_at
from parallel.pipeline.schedules import SCHEDULES, make_schedule
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


def exposed_seconds(timeline: Timeline, seconds: float) -> float:
    """Return how long the step still waits for reductions after its last action, if each stage's reduction takes `seconds`.
    A rank's reductions run one after another, so the last ends at the maximum over its stages of the stage's last gradient plus the time of
    this reduction and all later ones."""
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
def test_the_step_waits_for_the_last_reduction_in_each_ranks_queue(name: str, seconds: float) -> None:
    timeline = simulate(make_schedule(name, ranks=4, microbatches=8), costs([1, 1.5, 1, 2] * 2, [2, 3, 2, 5] * 2))
    beside, after = (exposed(timeline, lambda rank, stage: seconds, begin=begin) for begin in ("stage", "rank"))  # type: ignore[arg-type]
    assert beside == pytest.approx(exposed_seconds(timeline, seconds)) and 0 < beside <= after
    stages = max(len(timeline.schedule.stages_of(rank)) for rank in range(4))
    assert stages > 1 or beside == after


@pytest.mark.parametrize("chunks", [2, 4])
def test_a_rank_with_several_stages_waits_for_one_reduction_only(chunks: int) -> None:
    """Rank 0's last p micro-batches run backward through its stages one after another, p B / v each. Meanwhile the reduction of the stage
    before runs, so only the last stage's reduction is exposed."""
    timeline = simulate(make_schedule("interleaved", ranks=4, microbatches=8, chunks=chunks), costs(1 / chunks, 2 / chunks))
    whole = 8.0  # p B: the longest reduction of all stages that can overlap
    assert exposed(timeline, lambda rank, stage: whole / chunks, begin="rank") == pytest.approx(whole)
    assert exposed(timeline, lambda rank, stage: whole / chunks) == pytest.approx(whole / chunks)


class Late:
    """Collects the reductions to start, and starts all of them after the rank's last action."""

    def __init__(self, start: Callable[[Sequence[str]], None], actions: int) -> None:
        self.start, self.actions, self.kept = start, actions, list[Sequence[str]]()

    def after(self, at: int) -> None:
        for names in self.kept if at == self.actions - 1 else ():
            self.start(names)


def _gradients(rank: int, case: Case) -> tuple[bool, list[str], dict[int, int]]:
    """Return (whether all gradients equal, bit for bit, those of reductions that start after the last action; "action", "sum" and "end" in
    the order of starts of actions, starts of sums, and ends of actions; index of an action -> stage that it completes)."""
    found: list[dict[str, Tensor]] = []
    log: list[str] = []
    real = buckets.start_sum
    for late in (False, True):
        tiny = start(case, rank)
        assert isinstance(tiny.executor, Pipelined)
        (sums,) = tiny.executor.sums
        order = tiny.executor.runtime.schedule.orders[tiny.mesh.axis("pp").index]
        keeper = Late(sums.start, len(order))  # type: ignore[attr-defined]

        def noted(*args: Any, late: bool = late, **named: Any) -> Any:
            log.extend([] if late else ["sum"])
            return real(*args, **named)

        class Recorded(Watcher):
            def before(self, action: Action, late: bool = late) -> None:
                log.extend([] if late else ["action"])

            def after(self, at: int, took: Span, keeper: Late = keeper, late: bool = late) -> None:
                log.extend([] if late else ["end"])
                keeper.after(at)

        buckets.start_sum = noted
        if late:
            sums.expect, sums.start = (lambda names: None), keeper.kept.append  # type: ignore[attr-defined]
        else:
            tiny.executor.sums, tiny.executor.watchers = (), (Recorded(), sums)  # so that "end" comes before the sums that follow an action
        with tiny.executor.watched(Recorded()) if late else nullcontext():
            tiny.accumulate(0)
        found.append({name: tiny.engine.gradient(name).clone() for name in tiny.engine.layouts})
    buckets.start_sum = real
    equal = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    log = log[: len(log) - log[::-1].index("end")]  # without the sums of parameters that several stages hold, which follow
    return equal, log, stage_complete_at(order)


@pytest.mark.parametrize(("schedule", "layers"), [("interleaved", 5), ("zb_v", 5)])
def test_reductions_start_in_the_action_that_completes_a_stage_and_equal_late_ones(schedule: str, layers: int) -> None:
    """Bit for bit, on three data-parallel ranks. With three, a ring's order of summation depends on an element's position in the buffer."""
    case = Case("gshard", "ddp", 6, 1, 4, "fp32", pp=2, schedule=schedule, layers=layers)
    for equal, log, places in run_on_ranks(_gradients, case.world, case, timeout_s=90):
        assert equal
        begun = [(log[:here].count("action") - 1, log[:here].count("end")) for here, what in enumerate(log) if what == "sum"]
        assert {action for action, _ in begun} == set(places)
        ended = {action for action, ends in begun if ends > action}  # actions that had ended before the sum started
        assert not ended or schedule == "zb_v"  # there, norms have their gradients in I, before the action W
