"""A plan's timeline is as long as `step_time` predicts, and a picture has a number of micro-batches that the schedule allows.

Fails if stages of the timeline have other layers than the plan, or if another stage has the head.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.plan.job.network import Network, Plan
from moe.plan.job.states import FP32
from moe.plan.machine.cluster import load_cluster
from moe.plan.time.cost import step_time
from moe.plan.time.stage_time import MOST_ACTIONS, pictured, timeline
from parallel.pipeline.schedule import Op
from tests.support.plain_simulation import exposed

NETWORK = Network(layers=24, width=1024, heads=16, hidden=4096, vocab=51200, length=1024)
CLUSTER = load_cluster("a100-80-8")
LINE = Plan(pp=4, dp=2, microbatch=2, microbatches=12, storage=FP32)  # weights are cast at each use


def pipeline_seconds(plan: Plan) -> float:
    """Return the predicted seconds of a step without collectives of data parallelism and without the optimizer."""
    time = step_time(NETWORK, plan, CLUSTER)
    return time.step - time.gradients - time.parameters - time.optimizer - time.offload


@pytest.mark.parametrize(
    "plan",
    [
        *(LINE, replace(LINE, schedule="gpipe"), Plan(dp=8, microbatch=2, microbatches=3, storage=FP32), replace(LINE, schedule="zb_h1")),
        *(replace(LINE, schedule=name, chunks=2) for name in ("zb_v", "dualpipe_v")),
        *(replace(LINE, schedule=name) for name in ("chimera", "dualpipe")),
    ],
    ids=lambda p: f"{p.pp} {p.schedule}",
)
def test_the_timeline_is_as_long_as_the_predicted_step(plan: Plan) -> None:
    """Within 1 %. step_time has a closed form for 1F1B and GPipe, and for other schedules simulates the times of ranks, not of stages."""
    assert timeline(NETWORK, plan, CLUSTER).makespan == pytest.approx(pipeline_seconds(plan), rel=0.01)


def test_the_timelines_last_stage_has_the_head() -> None:
    """With zb_v, rank 0 has stages 0 and 7. Stage 7 takes longer, because of the head; all others take equally long."""
    plan = replace(LINE, schedule="zb_v", chunks=2)
    drawn = timeline(NETWORK, plan, CLUSTER)
    seconds = {s.action.stage: s.end - s.start for spans in drawn.spans for s in spans if s.action.op is Op.F}
    assert drawn.schedule.stages_of(0) == (0, 7) and seconds[7] > 1.2 * seconds[0]
    assert len({round(seconds[stage], 9) for stage in range(7)}) == 1


@pytest.mark.parametrize("dp", [2, 64, 1024])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 6), ("zb_v", 2), ("zb_h1", 1)])
def test_exposed_gradient_reductions_equal_the_simulators(schedule: str, chunks: int, dp: int) -> None:
    """`step_time` waits for gradient reductions as long as a simulation in which they start when a stage's gradients are complete. The
    vocabulary is tiny, because the stages of a rank would not take equally long with a head."""
    network, cluster = replace(NETWORK, vocab=8, length=256), CLUSTER.of(dp * 4 // 8)
    plan = replace(LINE, schedule=schedule, chunks=chunks, dp=dp, microbatch=1)
    drawn, predicted = timeline(network, plan, cluster), step_time(network, plan, cluster)
    whole = predicted.gradients + predicted.hidden  # all reductions of the rank that waits longest
    waits = exposed(drawn, lambda rank, stage: whole / chunks)
    assert predicted.gradients == pytest.approx(waits, rel=0.03, abs=1e-3 * whole)
    assert chunks > 1 or predicted.gradients == pytest.approx(whole)
    assert chunks == 1 or dp > 2 or predicted.gradients < 0.6 * whole


@pytest.mark.parametrize("pp", [1, 2, 16, 64])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", "dualpipe_v", "interleaved"])
def test_a_picture_has_a_number_of_micro_batches_that_the_schedule_takes(pp: int, schedule: str) -> None:
    plan = replace(LINE, pp=pp, schedule=schedule if pp > 1 else "1f1b", chunks=2 if pp > 1 and schedule != "1f1b" else 1, microbatches=512)
    shown = pictured(plan)
    assert shown % pp == 0 and (shown <= 2 * pp or shown * pp <= MOST_ACTIONS)
    assert pictured(replace(plan, microbatches=1)) == 1
    if pp <= 16:
        assert timeline(replace(NETWORK, layers=2 * pp), plan, CLUSTER, microbatches=shown).makespan > 0


def test_schedules_with_equally_many_actions_are_pictured_alike() -> None:
    """All three have two stages per rank, with actions F, I and W for each micro-batch, so they get the same number of micro-batches."""
    assert {pictured(replace(LINE, pp=16, schedule=name, chunks=2, microbatches=512)) for name in ("zb_v", "v_half", "v_min")} == {32}
