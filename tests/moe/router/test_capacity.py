"""Capacity: the number of slots equals its formula, and slots are given per group, to first choices before second ones, in the order of
tokens.
"""

from __future__ import annotations

import math
from fractions import Fraction
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.kernels import cpu, reference
from moe.recipe.router_spec import RouterSpec
from moe.router.capacity import kept_choices, slots_of
from parallel.errors import BadInput

KERNELS = pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])


def choices(tokens: int, k: int, num_experts: int, *, seed: int, skew: float = 1.0) -> Tensor:
    """Return k different experts for each token, int64 [tokens, k]. A larger `skew` makes the first experts more likely."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, num_experts, generator=generator) - skew * torch.arange(num_experts) / num_experts
    return scores.topk(k).indices


def capacity(tokens: int, *, num_experts: int, num_choices: int, factor: float | None, minimum: int, **rounding: Any) -> int | None:
    spec = RouterSpec(num_choices=num_choices, capacity_factor=factor, min_capacity=minimum, **rounding)
    return slots_of(spec, tokens, num_experts=num_experts, training=True)


@pytest.mark.parametrize(("k", "factor", "slots"), [(1, 1.0, 13), (1, 1.25, 16), (2, 1.0, 25), (2, 1.25, 32), (2, 2.0, 50)])
def test_capacity_of_100_tokens_on_8_experts_is_deepspeeds(k: int, factor: float, slots: int) -> None:
    assert capacity(100, num_experts=8, num_choices=k, factor=factor, minimum=4) == slots


@example(100, 10, 1, 110, 0)
@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 2), st.integers(1, 400), st.integers(0, 9))
@settings(max_examples=300, deadline=None)
def test_capacity_is_the_formula_in_exact_decimals(tokens: int, num_experts: int, k: int, hundredths: int, minimum: int) -> None:
    """slots = max(minimum, ceil(tokens k factor / E)) with the factor as a decimal: 100 * 1.1 / 10 is 11, not 11.000000000000002."""
    exact = math.ceil(Fraction(tokens * k * hundredths, 100 * num_experts))
    got = capacity(tokens, num_experts=num_experts, num_choices=k, factor=hundredths / 100, minimum=minimum)
    assert got == min(tokens, max(minimum, exact))


def test_factor_2_with_one_choice_equals_factor_1_with_two() -> None:
    one, two = (capacity(1000, num_experts=7, num_choices=k, factor=2 / k, minimum=0) for k in (1, 2))
    assert one == two == 286


def test_without_a_factor_there_is_no_capacity() -> None:
    assert capacity(100, num_experts=8, num_choices=2, factor=None, minimum=4) is None
    expert_TK, active_TK = torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1, dtype=torch.bool)
    active_TK[4] = False
    kept_TK = kept_choices(expert_TK, active_TK, num_groups=1, num_experts=3, slots_each=None, kernels=cpu)
    assert torch.equal(kept_TK, active_TK)


@KERNELS
def test_slots_go_to_the_first_tokens(kernels: ModuleType) -> None:
    """64 tokens choose one expert with 16 slots: tokens 0 to 15 are kept."""
    expert_TK = torch.full((64, 1), 2)
    kept_TK = kept_choices(expert_TK, expert_TK == 2, num_groups=1, num_experts=3, slots_each=16, kernels=kernels)
    assert kept_TK[:, 0].nonzero().flatten().tolist() == list(range(16))


@KERNELS
def test_second_choices_queue_behind_every_first_one(kernels: ModuleType) -> None:
    """Expert 1 is the second choice of token 0 and the first choice of token 3: token 3 gets its slot first."""
    expert_TK = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 0], [1, 0]])
    active_TK = torch.ones(5, 2, dtype=torch.bool)
    kept_TK = kept_choices(expert_TK, active_TK, num_groups=1, num_experts=2, slots_each=3, kernels=kernels)
    assert kept_TK.tolist() == [[True, True], [True, False], [True, False], [True, False], [True, False]]


@KERNELS
def test_a_declined_choice_takes_no_slot(kernels: ModuleType) -> None:
    expert_TK = torch.tensor([[0, 1], [0, 1], [0, 1], [0, 1]])
    active_TK = torch.tensor([[True, False], [True, True], [True, False], [True, True]])
    kept_TK = kept_choices(expert_TK, active_TK, num_groups=1, num_experts=2, slots_each=2, kernels=kernels)
    assert kept_TK.tolist() == [[True, False], [True, True], [False, False], [False, True]]


@KERNELS
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 13), st.integers(1, 2), st.integers(0, 6), st.floats(0, 3))
@settings(max_examples=40, deadline=None)
def test_an_expert_keeps_the_first_choices_of_its_queue(
    kernels: ModuleType, seed: int, groups: int, each: int, k: int, slots: int, skew: float
) -> None:
    """In each group, an expert keeps the first `slots` of the choices that name it, in the order (choice, token)."""
    expert_TK = choices(groups * each, k, 5, seed=seed, skew=skew)
    active_TK = torch.rand(expert_TK.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.8
    kept_TK = kept_choices(expert_TK, active_TK, num_groups=groups, num_experts=5, slots_each=slots, kernels=kernels)
    assert not (kept_TK & ~active_TK).any()
    for group in range(groups):
        rows = slice(group * each, (group + 1) * each)
        for expert in range(5):
            asked = (active_TK & (expert_TK == expert))[rows].t().flatten()
            kept = (kept_TK & (expert_TK == expert))[rows].t().flatten()
            queue = asked.nonzero().flatten().tolist()
            assert kept.nonzero().flatten().tolist() == queue[:slots]


@KERNELS
def test_drops_do_not_depend_on_how_groups_are_spread(kernels: ModuleType) -> None:
    """6 groups routed together, or 3, 2 or 1 at a time, drop the same choices."""
    expert_TK = choices(6 * 11, 2, 4, seed=3)
    active_TK = torch.ones_like(expert_TK, dtype=torch.bool)
    whole = kept_choices(expert_TK, active_TK, num_groups=6, num_experts=4, slots_each=4, kernels=kernels)
    assert 0 < whole.sum() < whole.numel()
    for parts in (2, 3, 6):
        pieces = [
            kept_choices(e, a, num_groups=6 // parts, num_experts=4, slots_each=4, kernels=kernels)
            for e, a in zip(expert_TK.chunk(parts), active_TK.chunk(parts), strict=True)
        ]
        assert torch.equal(torch.cat(pieces), whole)


@KERNELS
def test_a_group_does_not_see_the_others(kernels: ModuleType) -> None:
    expert_TK = choices(3 * 10, 1, 4, seed=4)
    active_TK = torch.ones_like(expert_TK, dtype=torch.bool)
    kept = kept_choices(expert_TK, active_TK, num_groups=3, num_experts=4, slots_each=2, kernels=kernels)
    crowded = expert_TK.clone()
    crowded[:10] = 0
    after = kept_choices(crowded, active_TK, num_groups=3, num_experts=4, slots_each=2, kernels=kernels)
    assert torch.equal(after[10:], kept[10:]) and after[:10].sum() == 2


def test_groups_that_do_not_divide_the_tokens_are_refused() -> None:
    expert_TK = torch.zeros(10, 1, dtype=torch.int64)
    with pytest.raises(BadInput, match="router.group"):
        kept_choices(expert_TK, expert_TK == 0, num_groups=3, num_experts=2, slots_each=4, kernels=cpu)


QUEUES = pytest.mark.parametrize("queue", ["choices_first", "tokens_first"])


@KERNELS
@QUEUES
@pytest.mark.parametrize("by", ["position", "token", "choice"])
@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 8), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_slots_are_given_in_the_order_of_queue_and_priority(
    kernels: ModuleType, queue: str, by: str, seed: int, groups: int, each: int, k: int, slots: int
) -> None:
    """The order is (choice, priority, token) with choices_first, and (priority, token, choice) with tokens_first."""
    expert_TK = choices(groups * each, k, 4, seed=seed, skew=1.5)
    generator = torch.Generator().manual_seed(seed + 1)
    active_TK = torch.rand(expert_TK.shape, generator=generator) < 0.8
    priority = {
        "position": None,
        "token": torch.randint(3, (groups * each, 1), generator=generator).float().expand_as(expert_TK),
        "choice": torch.randint(3, expert_TK.shape, generator=generator).float(),
    }[by]
    kept_TK = kept_choices(
        expert_TK, active_TK, num_groups=groups, num_experts=4, slots_each=slots, kernels=kernels, queue=queue, priority_TK=priority
    )

    def turn(choice: tuple[int, int]) -> tuple[float, ...]:
        t, c = choice
        rank = 0.0 if priority is None else -priority[t, c].item()
        return (c, rank, t) if queue == "choices_first" else (rank, t, c)

    want_TK = torch.zeros_like(active_TK)
    for group in range(groups):
        for expert in range(4):
            asked = (active_TK & (expert_TK == expert))[group * each : (group + 1) * each].nonzero().tolist()
            for t, c in sorted(((group * each + t, c) for t, c in asked), key=turn)[:slots]:
                want_TK[t, c] = True
    assert torch.equal(kept_TK, want_TK)


@KERNELS
def test_tokens_first_serves_both_choices_of_earlier_tokens(kernels: ModuleType) -> None:
    """With tokens_first (Megatron-LM), both choices of token 0 get slots before the first choice of token 3."""
    expert_TK = torch.tensor([[0, 1], [0, 1], [0, 1], [1, 0], [1, 0]])
    active_TK = torch.ones(5, 2, dtype=torch.bool)
    kept_TK = kept_choices(expert_TK, active_TK, num_groups=1, num_experts=2, slots_each=3, kernels=kernels, queue="tokens_first")
    assert kept_TK.tolist() == [[True, True]] * 3 + [[False, False]] * 2


@given(st.integers(1, 5000), st.integers(1, 300), st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_roundings_are_those_of_the_exact_number(tokens: int, num_experts: int, hundredths: int) -> None:
    exact = Fraction(tokens * hundredths, 100 * num_experts)
    wanted = {"ceil": math.ceil(exact), "floor": math.floor(exact), "round": round(exact)}
    for rounding, slots in wanted.items():
        for multiple in (1, 4):
            about = {"capacity_rounding": rounding, "capacity_multiple": multiple}
            got = capacity(tokens, num_experts=num_experts, num_choices=1, factor=hundredths / 100, minimum=0, **about)
            assert got == min(tokens, math.ceil(slots / multiple) * multiple)
