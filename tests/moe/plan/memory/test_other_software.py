"""Activation memory under the stacks of other software: scores with T5's bias, and tensors of 8 bits that wait for W."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe.plan.job.network import Network, Plan
from moe.plan.memory.kept import head_pending, layer_kept, layer_pending
from moe.plan.memory.stack import OURS
from tests.planner.software import DEEPSEEK, DEEPSPEED, MEGATRON_2022

S, B, H, A = 64, 3, 96, 8
GPT = Network(layers=1, width=H, heads=A, hidden=4 * H, vocab=100, length=S, dropout=True)
ENCODER = replace(GPT, length=40, kv_heads=2, sees="all", biases=False)
HALVES = replace(GPT, kv_heads=2, encoder=ENCODER)


@pytest.mark.parametrize("sees", ["past", "all"])
@pytest.mark.parametrize("sp", [1, 2])
def test_scores_with_t5s_bias_are_those_of_korthikanti(sees: str, sp: int) -> None:
    """s b h (34 + 5 a s / h): the sum of scores and a bias keeps nothing. A causal mask that is not a part of the softmax has s^2 bytes."""
    network, plan = replace(GPT, buckets=32, sees=sees), Plan(microbatch=B, sp=sp)  # type: ignore[arg-type]
    mask = S**2 if sees == "past" and sp == 1 else 0
    assert layer_kept(network, plan, MEGATRON_2022, 0, "none") == pytest.approx(S * B * H * (34 + 5 * A * S / H) / sp + mask)


def test_scores_with_t5s_bias_grow_with_the_square_of_the_length() -> None:
    """5 bytes of each score in 16 bits, and a byte of the mask."""
    one, two = (layer_kept(replace(GPT, buckets=32, length=n), Plan(microbatch=B), DEEPSPEED, 0, "none") for n in (S, 2 * S))
    assert two - 2 * one == pytest.approx((4 - 2) * S**2 * (5 * A * B + 1))


@pytest.mark.parametrize("stack", [OURS, DEEPSEEK], ids=["16 bits", "8 bits"])
def test_products_of_cross_attention_and_head_wait_in_the_stacks_bytes(stack: object) -> None:
    """Inputs: of q and of out. Output gradients: of q, k, v and out. The encoder's output is kept for the whole stage."""
    size = 2 * stack.pending  # type: ignore[attr-defined]
    plan, tokens, read = Plan(microbatch=B), B * S, B * 40
    cross = layer_pending(HALVES, plan, stack, 0) - layer_pending(replace(HALVES, encoder=None), plan, stack, 0)  # type: ignore[arg-type]
    assert cross == pytest.approx(size * (tokens * (H + H + H + H) + read * 2 * 2 * H / A))
    assert head_pending(GPT, plan, stack) == pytest.approx(size * tokens * (H + 100))  # type: ignore[arg-type]
