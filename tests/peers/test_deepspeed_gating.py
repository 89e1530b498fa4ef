"""DeepSpeed's gating functions, with their random options off, agree with this project's router where both define the same thing.

capacity        same formula, but DeepSpeed does not limit it to the number of tokens
balance loss    top-1: same; top-2: DeepSpeed counts first choices only
drops           top-1: same number for each expert; DeepSpeed drops in torch.topk's order of equal numbers, this router by position
                top-2: same choices
                top-3 and more, by probability: same choices
top-2 gates     DeepSpeed renormalizes them after dropping, as preset deepspeed does; preset glam does it before dropping, so they are
                equal for tokens without a dropped choice
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.nn.context import Context
from moe.recipe import sections
from moe.recipe.router_spec import RouterSpec
from moe.router.capacity import slots_of
from moe.router.losses import balance_loss
from moe.router.router import Router
from moe.router.routing import Routing

# T tokens, E experts, C slots
T, E = 100, 8


@pytest.fixture(scope="module")
def gating() -> ModuleType:
    module: ModuleType = pytest.importorskip("deepspeed.moe.sharded_moe")
    return module


def logits_of(*, seed: int, skew: float = 0.0) -> Tensor:
    return torch.randn(T, E, generator=torch.Generator().manual_seed(seed)) * 1.5 - skew * torch.arange(E)


def ours(logits_TE: Tensor, **options: Any) -> Routing:
    """Return this project's routing for these logits, with all tokens in one group."""
    router = Router(sections.Router(**options), num_experts=E, d_model=E)
    router.weight.data.copy_(torch.eye(E))
    return router(logits_TE, sequence_tokens=T, context=Context.of(torch.zeros(1, T)))  # type: ignore[no-any-return]


def top1(gating: ModuleType, logits_TE: Tensor, factor: float, minimum: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Return DeepSpeed's (balance loss, combine weights [T, E, C], dispatch mask [T, E, C]) for top-1."""
    loss, combine_TEC, mask_TEC, _ = gating.top1gating(logits_TE, factor, minimum, use_rts=False)
    return loss, combine_TEC, mask_TEC


def top2(gating: ModuleType, logits_TE: Tensor, factor: float, minimum: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    loss, combine_TEC, mask_TEC, _ = gating.top2gating(logits_TE.clone(), factor, minimum, top2_2nd_expert_sampling=False)
    return loss, combine_TEC, mask_TEC


def dispatched(routing: Routing) -> Tensor:
    """Return bool [T, E]: whether the token has a slot at the expert."""
    return torch.zeros_like(routing.probs_TE, dtype=torch.bool).scatter(1, routing.expert_TK, routing.kept_TK)


@pytest.mark.parametrize("factor", [0.3, 0.5, 1.0, 1.25, 2.0])
@pytest.mark.parametrize("minimum", [0, 4, 30])
def test_capacity(gating: ModuleType, factor: float, minimum: int) -> None:
    for k, function in ((1, top1), (2, top2)):
        _, combine_TEC, _ = function(gating, logits_of(seed=0), factor, minimum)
        spec = RouterSpec(num_choices=k, capacity_factor=factor, min_capacity=minimum)
        assert combine_TEC.shape[2] == slots_of(spec, T, num_experts=E, training=True)


@pytest.mark.parametrize("skew", [0.0, 0.4])
def test_top_1_balance_loss_and_gradient(gating: ModuleType, skew: float) -> None:
    logits = logits_of(seed=1, skew=skew).requires_grad_()
    want, _, _ = top1(gating, logits, 1.0)
    routing = ours(logits, preset="switch", capacity_factor=1.0)
    got = balance_loss(routing.probs_TE, routing.expert_TK)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(*(torch.autograd.grad(v, logits)[0] for v in (got, want)))


@pytest.mark.parametrize("skew", [0.0, 0.4])
def test_top_2_balance_loss_of_first_choices(gating: ModuleType, skew: float) -> None:
    logits = logits_of(seed=1, skew=skew)
    want, _, _ = top2(gating, logits, 1.0)
    routing = ours(logits, preset="glam")
    torch.testing.assert_close(balance_loss(routing.probs_TE, routing.expert_TK[:, :1], num_groups=1), want)


@pytest.mark.parametrize("skew", [0.0, 0.4, 2.0])
@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_top_1_keeps_as_many_of_each_expert(gating: ModuleType, skew: float, factor: float) -> None:
    logits = logits_of(seed=2, skew=skew)
    _, _, mask_TEC = top1(gating, logits, factor)
    got_TE = dispatched(ours(logits, preset="switch", capacity_factor=factor))
    assert torch.equal(got_TE.sum(0), mask_TEC.any(2).sum(0)) and got_TE.sum() < T


def test_top_1_with_slots_for_all_is_the_same_assignment_gates_and_gradients(gating: ModuleType) -> None:
    logits = logits_of(seed=3).requires_grad_()
    _, combine_TEC, mask_TEC = top1(gating, logits, 8.0)
    routing = ours(logits, preset="switch", capacity_factor=8.0)
    assert torch.equal(dispatched(routing), mask_TEC.any(2))
    want_TK = combine_TEC.sum(2).gather(1, routing.expert_TK)
    torch.testing.assert_close(routing.gate_TK, want_TK)
    weights = torch.randn(T, 1, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(*(torch.autograd.grad((v * weights).sum(), logits)[0] for v in (routing.gate_TK, want_TK)))


@pytest.mark.parametrize("skew", [0.0, 0.4, 2.0])
@pytest.mark.parametrize("factor", [0.4, 0.8, 1.0, 2.0])
def test_top_2_drops_the_same_choices(gating: ModuleType, skew: float, factor: float) -> None:
    """Preset glam and DeepSpeed's top-2 drop the same choices: all first choices get slots before second choices, by position."""
    logits = logits_of(seed=5, skew=skew)
    _, combine_TEC, _ = top2(gating, logits, factor)
    routing = ours(logits, preset="glam", capacity_factor=factor)
    assert torch.equal(dispatched(routing), (combine_TEC > 0).any(2))
    assert routing.kept_TK.all() == (factor == 2.0 and skew == 0)


def test_top_2_without_drops_has_the_same_gates_and_gradients(gating: ModuleType) -> None:
    logits = logits_of(seed=6).requires_grad_()
    _, combine_TEC, _ = top2(gating, logits, 4.0)
    routing = ours(logits, preset="glam", capacity_factor=4.0)
    want_TK = combine_TEC.sum(2).gather(1, routing.expert_TK)
    assert routing.kept_TK.all()
    torch.testing.assert_close(routing.gate_TK, want_TK)
    weights = torch.randn(T, 2, generator=torch.Generator().manual_seed(4))
    torch.testing.assert_close(*(torch.autograd.grad((v * weights).sum(), logits)[0] for v in (routing.gate_TK, want_TK)))


@pytest.mark.parametrize("skew", [0.0, 0.4])
@pytest.mark.parametrize("factor", [0.4, 0.8, 1.0])
def test_the_preset_has_their_gates_and_gradients_with_drops(gating: ModuleType, skew: float, factor: float) -> None:
    """Preset deepspeed has DeepSpeed's gates, which sum to 1 over the choices with a slot, its balance loss of first choices, and the
    gradient of both."""
    logits = logits_of(seed=7, skew=skew).requires_grad_()
    loss, combine_TEC, mask_TEC = top2(gating, logits, factor)
    routing = ours(logits, preset="deepspeed", capacity_factor=factor)
    assert torch.equal(dispatched(routing), mask_TEC.any(2)) and 0 < routing.kept_TK.sum() < routing.kept_TK.numel()
    want_TK = combine_TEC.sum(2).gather(1, routing.expert_TK)
    torch.testing.assert_close(routing.gate_TK, want_TK)
    weights = torch.randn(T, 2, generator=torch.Generator().manual_seed(4))
    mine = balance_loss(routing.probs_TE, routing.expert_TK[:, :1])
    torch.testing.assert_close(mine, loss)
    got, want = ((gate * weights).sum() + aux for gate, aux in ((routing.gate_TK, mine), (want_TK, loss)))
    torch.testing.assert_close(*(torch.autograd.grad(v, logits)[0] for v in (got, want)))


@pytest.mark.parametrize("gates", ["as_is", "before_drop", "after_drop"])
def test_top_3_drops_the_choices_of_lowest_probability(gating: ModuleType, gates: str) -> None:
    """With drop lowest_gate, the dropped choices are those of lowest probability over all experts, as in DeepSpeed, whether or not gates
    are renormalized."""
    logits = logits_of(seed=8, skew=0.4)
    _, combine_TEC, _, _ = gating.topkgating(logits, 3, 0.5, 4, drop_policy="probs")
    routing = ours(logits, num_choices=3, gates=gates, drop="lowest_gate", queue="tokens_first", capacity_factor=0.5, min_capacity=4)
    assert torch.equal(dispatched(routing), (combine_TEC > 0).any(2)) and 0 < routing.kept_TK.sum() < routing.kept_TK.numel()
    if gates == "after_drop":
        torch.testing.assert_close(routing.gate_TK, combine_TEC.sum(2).gather(1, routing.expert_TK))


def test_trap_deepspeeds_top_2_gate_is_one_if_one_choice_is_left(gating: ModuleType) -> None:
    """DeepSpeed renormalizes gates after dropping, so a token with one choice left has gate 1, and the router gets no gradient. Preset glam
    keeps the gate that the choice had."""
    logits = logits_of(seed=5, skew=0.4)
    _, combine_TEC, _ = top2(gating, logits, 0.8)
    routing = ours(logits, preset="glam", capacity_factor=0.8)
    single_T = routing.kept_TK.sum(1) == 1
    assert single_T.any()
    torch.testing.assert_close(combine_TEC.sum((1, 2))[single_T], torch.ones(int(single_T.sum())))
    assert ((routing.gate_TK * routing.kept_TK).sum(1)[single_T] < 1).all()


def test_trap_top_1_slots_are_not_given_by_position(gating: ModuleType) -> None:
    """64 tokens choose expert 0, which has 16 slots. This router keeps tokens 0 to 15; which tokens DeepSpeed keeps depends on torch.topk's
    order of equal numbers."""
    logits = torch.zeros(64, 4)
    logits[:, 0] = 5
    _, _, mask_TEC = top1(gating, logits, 1.0)
    assert mask_TEC.any(2)[:, 0].sum() == 16
    router = Router(sections.Router(preset="switch", capacity_factor=1.0), num_experts=4, d_model=4)
    router.weight.data.copy_(torch.eye(4))
    kept_T = router(logits, sequence_tokens=64, context=Context.of(torch.zeros(1, 64))).kept_TK[:, 0]
    assert kept_T.nonzero().flatten().tolist() == list(range(16))
