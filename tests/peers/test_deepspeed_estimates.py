"""DeepSpeed's estimates of model states (its functions estimate_zero*) equal the formulas of moe/plan/job/states.py."""

from __future__ import annotations

import pytest

from moe.plan.job.states import MIXED_FP32_GRADIENTS, model_states
from tests.planner.software import MIXED_BOTH_GRADIENTS

pytest.importorskip("deepspeed")
PARAMETERS, LARGEST = 2_851_000_000, 32_800_000


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (8, 4), (16, 8)])
def test_states_of_stage_2_equal_deepspeeds_estimate(gpus: int, nodes: int) -> None:
    """Stage 2: 16-bit weights are whole; gradients (16-bit and fp32), master weights and moments are sharded. With offload only the weights
    are on the GPU."""
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    states = model_states(PARAMETERS, stage=2, copies=gpus * nodes, storage=MIXED_BOTH_GRADIENTS)
    sizes = {"total_params": PARAMETERS, "num_gpus_per_node": gpus, "num_nodes": nodes}
    _, on_gpu = estimate_zero2_model_states_mem_needs(**sizes, cpu_offload=False)
    assert on_gpu == pytest.approx(states.total, abs=1)
    _, left = estimate_zero2_model_states_mem_needs(**sizes, cpu_offload=True)
    assert left == pytest.approx(states.parameters, abs=1)


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (8, 4), (16, 8)])
def test_states_of_stage_3_equal_deepspeeds_estimate(gpus: int, nodes: int) -> None:
    """Stage 3: all states are sharded, and the largest layer's 16-bit weights and gradients are whole. With offload only the shards of
    weights are on the GPU; with offloaded parameters none."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs

    live = 4 * LARGEST
    states = model_states(PARAMETERS, stage=3, copies=gpus * nodes, storage=MIXED_FP32_GRADIENTS)
    sizes = {"total_params": PARAMETERS, "largest_layer_params": LARGEST, "num_gpus_per_node": gpus, "num_nodes": nodes}
    cases = (
        ({"cpu_offload": False, "cpu_offload_params": False}, live + states.total),
        ({"cpu_offload": True, "cpu_offload_params": False}, live + states.parameters),
        ({"cpu_offload": True, "cpu_offload_params": True}, live),
    )
    for flags, want in cases:
        _, on_gpu, _ = estimate_zero3_model_states_mem_needs(**sizes, **flags)
        assert on_gpu == pytest.approx(want, abs=1)
