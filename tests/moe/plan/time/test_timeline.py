"""A plan's timeline: its length is that of the closed forms, and the picture's number of micro-batches is one that the schedule has.

What this file alone would notice: a timeline whose stages have other layers, or the head in another place, than the plan.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import load_cluster
from moe.plan.time.cost import step_time
from moe.plan.time.stage_time import MOST_ACTIONS, pictured, timeline
from parallel.pipeline.schedule import Op
from tests.support.plain_simulation import exposed

NETWORK = Network(layers=24, width=1024, heads=16, hidden=4096, vocab=51200, length=1024)
CLUSTER = load_cluster("a100-80-8")
LINE = Plan(pp=4, dp=2, microbatch=2, microbatches=12)


def pipeline_seconds(plan: Plan) -> float:
    """The step without what comes once."""
    time = step_time(NETWORK, plan, CLUSTER)
    return time.step - time.gradients - time.parameters - time.optimizer - time.offload


@pytest.mark.parametrize(
    "plan",
    [
        *(LINE, replace(LINE, schedule="gpipe"), Plan(dp=8, microbatch=2, microbatches=3), replace(LINE, schedule="zb_h1")),
        *(replace(LINE, schedule=name, chunks=2) for name in ("zb_v", "dualpipe_v")),
        *(replace(LINE, schedule=name) for name in ("chimera", "dualpipe")),
    ],
    ids=lambda p: f"{p.pp} {p.schedule}",
)
def test_the_length_is_the_steps(plan: Plan) -> None:
    """1F1B: sum t + (m - 1) max t, exact where the last stage, which has the head, is the slowest; GPipe: a wave each way. Others: the
    step is told what ranks take, the timeline what stages do; in a V the head is on the first rank, of replicas on the last stage."""
    assert timeline(NETWORK, plan, CLUSTER).makespan == pytest.approx(pipeline_seconds(plan), rel=0.01)


def test_each_stage_has_its_own_layers_and_the_head_is_with_the_last() -> None:
    """In a V the first rank has the first and the last stage: without the vocabulary both of its stages take as long as the others."""
    plan = replace(LINE, schedule="zb_v", chunks=2)
    drawn = timeline(NETWORK, plan, CLUSTER)
    seconds = {s.action.stage: s.end - s.start for spans in drawn.spans for s in spans if s.action.op is Op.F}
    assert drawn.schedule.stages_of(0) == (0, 7) and seconds[7] > 1.2 * seconds[0]
    assert len({round(seconds[stage], 9) for stage in range(7)}) == 1


@pytest.mark.parametrize("dp", [2, 64, 1024])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 6), ("zb_v", 2), ("zb_h1", 1)])
def test_sums_beside_the_last_actions_are_those_of_the_clock(schedule: str, chunks: int, dp: int) -> None:
    """Without the vocabulary, whose head a rank's stages do not share, the step waits as long as the simulator's clock says."""
    network, cluster = replace(NETWORK, vocab=8, length=256), CLUSTER.of(dp * 4 // 8)
    plan = replace(LINE, schedule=schedule, chunks=chunks, dp=dp, microbatch=1)
    drawn, predicted = timeline(network, plan, cluster), step_time(network, plan, cluster)
    whole = predicted.gradients + predicted.hidden  # of the rank that waits longest, which is as much as any has
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
    """Two stages a rank, each with F, I and W."""
    assert {pictured(replace(LINE, pp=16, schedule=name, chunks=2, microbatches=512)) for name in ("zb_v", "v_half", "v_min")} == {32}
