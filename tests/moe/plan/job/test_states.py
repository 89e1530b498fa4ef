"""Closed forms of the bytes of model states and of sent bytes: tables of the ZeRO paper, and laws between its stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe.plan.job.states import (
    FP32,
    FP32_AND_COPY,
    MIXED,
    MIXED_FP32_GRADIENTS,
    STAGES,
    Storage,
    model_states,
    sparse_model_states,
)
from tests.counted.comm import sent_bytes

STORAGES = (MIXED, MIXED_FP32_GRADIENTS, FP32, FP32_AND_COPY)
some_storage = st.sampled_from(STORAGES)
some_ranks = st.sampled_from([1, 2, 3, 4, 8, 64])


# ZeRO (arXiv 1910.02054), table 1: (parameters, ranks, GB per rank in stages 1, 2 and 3)
@pytest.mark.parametrize(
    ("parameters", "ranks", "gigabytes"),
    [
        (7.5e9, 1, (120, 120, 120)),
        (7.5e9, 4, (52.5, 41.3, 30)),
        (7.5e9, 16, (35.6, 21.6, 7.5)),
        (7.5e9, 64, (31.4, 16.6, 1.88)),
        (7.5e9, 256, (30.4, 15.4, 0.47)),
        (7.5e9, 1024, (30.1, 15.1, 0.12)),
        (128e9, 64, (536, 284, 32)),
        (128e9, 1024, (513.5, 257.8, 2)),
        (1e12, 64, (4187, 2219, 250)),
        (1e12, 1024, (4012, 2014, 15.6)),
    ],
)
def test_the_tables_of_the_zero_paper(parameters: float, ranks: int, gigabytes: tuple[float, float, float]) -> None:
    for stage, want in zip((1, 2, 3), gigabytes, strict=True):
        got = model_states(parameters, stage=stage, copies=ranks).total / 1e9
        assert abs(got - want) <= max(0.07, 0.0003 * want), (stage, got)  # rounding of the table
    assert model_states(parameters, stage=0, copies=ranks).total == 16 * parameters


@pytest.mark.parametrize(
    ("storage", "by_stage"),
    [
        (MIXED, ((16, 0), (4, 12), (2, 14), (0, 16))),
        (MIXED_FP32_GRADIENTS, ((18, 0), (6, 12), (2, 16), (0, 18))),
        (FP32, ((16, 0), (8, 8), (4, 12), (0, 16))),
        (FP32_AND_COPY, ((20, 0), (8, 12), (4, 16), (0, 20))),
    ],
)
def test_bytes_a_parameter_are_whole_ones_and_one_nth_of_the_rest(storage: Storage, by_stage: tuple[tuple[int, int], ...]) -> None:
    for stage, (whole, shared) in zip(STAGES, by_stage, strict=True):
        for ranks in (1, 4, 64):
            states = model_states(1000, stage=stage, copies=ranks, storage=storage)
            assert states.total == pytest.approx(1000 * (whole + shared / ranks))
            assert states.total == states.parameters + states.gradients + states.optimizer


@given(some_storage, some_ranks, st.integers(1, 10**6))
def test_each_stage_keeps_at_most_what_the_one_before_keeps(storage: Storage, ranks: int, parameters: int) -> None:
    totals = [model_states(parameters, stage=stage, copies=ranks, storage=storage).total for stage in STAGES]
    assert totals == sorted(totals, reverse=True)
    assert totals[3] * ranks == pytest.approx(totals[0])  # in stage 3, all ranks together hold each byte once
    if ranks == 1:
        assert len(set(totals)) == 1


@given(some_storage, st.sampled_from(STAGES), st.sampled_from([(1, 1, 1), (2, 2, 1), (4, 2, 1), (8, 2, 2), (6, 3, 1)]))
def test_experts_are_shared_over_edp_alone(storage: Storage, stage: int, degrees: tuple[int, int, int]) -> None:
    dp, ep, etp = degrees
    dense, expert = 700, 1200
    held = sparse_model_states(dense=dense, expert=expert, stage=stage, dp=dp, ep=ep, etp=etp, storage=storage)
    edp = dp // (ep * etp)
    apart = model_states(expert / (ep * etp), stage=stage, copies=edp, storage=storage)
    assert held == model_states(dense, stage=stage, copies=dp, storage=storage) + apart
    if stage == 3:  # all ranks together hold each byte once
        assert held.total * dp == pytest.approx((dense + expert) * storage.total)
    if edp == 1:  # no other rank holds the same experts, so no stage shards their states
        assert apart.total == expert / dp * storage.total


def test_model_states_with_experts_equal_megatrons_formula() -> None:
    """Megatron-Core's distributed optimizer in bf16 needs (6 + 12/dp) dense + (6 + 12/edp) expert / (ep etp) bytes."""
    got = sparse_model_states(dense=10, expert=24, stage=1, dp=8, ep=2, etp=2, storage=MIXED_FP32_GRADIENTS).total
    assert got == (6 + 12 / 8) * 10 + (6 + 12 / 2) * 24 / 4


def test_stages_0_to_2_send_as_much_as_an_all_reduce_and_stage_3_half_more() -> None:
    for ranks in (2, 3, 64):
        sent = [sent_bytes(parameters=40, gradients=40, stage=stage, copies=ranks) for stage in STAGES]
        assert sent[:3] == pytest.approx([2 * 40 * (ranks - 1) / ranks] * 3)
        assert sent[3] == pytest.approx(1.5 * sent[0])
        stays = sent_bytes(parameters=40, gradients=40, stage=3, copies=ranks, gathers=1)
        assert stays == pytest.approx(sent[0])
    assert all(sent_bytes(parameters=40, gradients=40, stage=stage, copies=1, microbatches=3) == 0 for stage in STAGES)


def test_micro_batches_cost_a_message_only_where_something_is_not_kept_between_them() -> None:
    one = {stage: sent_bytes(parameters=40, gradients=20, stage=stage, copies=2) for stage in STAGES}
    kept = {stage: sent_bytes(parameters=40, gradients=20, stage=stage, copies=2, microbatches=3) for stage in STAGES}
    assert kept[0] == one[0] and kept[1] == one[1] and kept[2] == one[2]
    assert kept[3] == one[3] + 2 * 2 * 20  # two more micro-batches with two all-gathers each
    summed = sent_bytes(parameters=40, gradients=20, stage=2, copies=2, microbatches=3, reduces="microbatch")
    assert summed == one[2] + 2 * 10
