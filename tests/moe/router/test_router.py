"""The router: experts, gates, jitter, random second experts, capacity, and equal results for any division into micro-batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.losses import balance_loss, z_loss
from moe.router.router import Router
from moe.router.routing import Routing
from parallel.errors import BadInput
from parallel.numerics.random import key_of, uniform

# B sequences, L length, T = B*L tokens, D model, E experts, K choices
B, L, D, E = 6, 9, 7, 5


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def router_of(*, num_experts: int = E, d_model: int = D, weight: Tensor | None = None, **options: Any) -> Router:
    router = Router(sections.Router(**options), num_experts=num_experts, d_model=d_model, name="layers.1.router")
    router.weight.data.copy_(random(num_experts, d_model, seed=99) if weight is None else weight)
    return router


def from_logits(logits_TE: Tensor, **options: Any) -> Router:
    """A router whose logits are its input."""
    num_experts = logits_TE.shape[1]
    return router_of(num_experts=num_experts, d_model=num_experts, weight=torch.eye(num_experts), **options)


def context(batch: int = B, length: int = L, **options: Any) -> Context:
    return Context.of(torch.zeros(batch, length), **options)


def route(router: Router, x_TD: Tensor, *, length: int = L, **options: Any) -> Routing:
    return router(x_TD, sequence_tokens=length, context=context(len(x_TD) // length, length, **options))  # type: ignore[no-any-return]


def test_switchs_gate_is_the_probability_as_it_is() -> None:
    x_TD = random(B * L, D)
    got = route(router_of(preset="switch"), x_TD)
    want_TE = (x_TD @ random(E, D, seed=99).t()).softmax(-1)
    torch.testing.assert_close(got.probs_TE, want_TE)
    assert torch.equal(got.expert_TK, want_TE.argmax(-1, keepdim=True))
    torch.testing.assert_close(got.gate_TK, want_TE.amax(-1, keepdim=True))
    assert got.gate_TK.max() < 1


@pytest.mark.parametrize("preset", ["switch", "gshard", "glam"])
def test_the_router_learns_from_the_gate(preset: str) -> None:
    """Without a balance loss, the router's gradient is not small. If a top-1 gate were normalized to sum to 1, its gradient would be 0."""
    layer = MoELayer(
        sections.Experts(num_experts=E), sections.Router(preset=preset, balance_weight=0), d_model=D, d_ff=8, ffn="relu", layer=1
    )
    for i, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    layer(random(B, L, D), context())[0].square().sum().backward()
    assert layer.router.weight.grad is not None
    assert layer.router.weight.grad.norm() > 1 and (layer.router.weight.grad.norm(dim=1) > 0).all()

    routed = route(router_of(preset="switch"), random(B * L, D))
    renormalized = routed.gate_TK / routed.gate_TK.sum(-1, keepdim=True)
    (dead,) = torch.autograd.grad((renormalized * random(B * L, 1, seed=3)).sum(), [routed.probs_TE])
    assert dead.abs().max() < 1e-6


@pytest.mark.parametrize("preset", ["gshard", "glam"])
def test_two_gates_sum_to_one_before_anything_is_dropped(preset: str) -> None:
    routed = route(router_of(preset=preset, capacity_factor=0.3, min_capacity=1), random(B * L, D))
    assert 0 < routed.kept_TK.sum() < routed.kept_TK.numel()
    torch.testing.assert_close(routed.gate_TK.sum(-1), torch.ones(B * L))
    top = routed.probs_TE.topk(2)
    assert torch.equal(routed.expert_TK, top.indices)
    torch.testing.assert_close(routed.gate_TK, top.values / top.values.sum(-1, keepdim=True))


@pytest.mark.parametrize("preset", ["switch", "glam"])
def test_ties_go_to_the_lowest_expert(preset: str) -> None:
    tied_TE = torch.tensor([[0.0, 0, 0, 0], [1, 2, 1, 2], [3, 1, 1, 1], [0, 0, 5, 5]])
    routed = route(from_logits(tied_TE, preset=preset), tied_TE, length=4)
    want = torch.tensor([[0, 1], [1, 3], [0, 1], [2, 3]])
    assert torch.equal(routed.expert_TK, want[:, : routed.expert_TK.shape[1]])


@pytest.mark.parametrize("preset", ["switch", "gshard", "glam"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_is_fp32_for_16_bit_inputs(preset: str, dtype: torch.dtype) -> None:
    """Results for a 16-bit input are bitwise those for its fp32 copy."""
    x_TD = random(B * L, D).to(dtype)
    router = router_of(preset=preset, jitter=0.1)
    low, full = route(router, x_TD), route(router, x_TD.float())
    assert low.gate_TK.dtype == low.probs_TE.dtype == low.logits_TE.dtype == torch.float32
    for name in ("expert_TK", "gate_TK", "kept_TK", "probs_TE", "logits_TE"):
        assert torch.equal(getattr(low, name), getattr(full, name))


def test_jitter_multiplies_the_routers_input_by_keyed_noise() -> None:
    x_TD = random(B * L, E).abs() + 1
    router = from_logits(x_TD, jitter=0.25)
    ratio_TD = (route(router, x_TD, seed=3, step=4).logits_TE / x_TD).detach()
    assert ratio_TD.min() >= 0.75 and ratio_TD.max() <= 1.25 and ratio_TD.std() > 0.12
    noise_TD = uniform(key_of(3, 4, "layers.1.router.jitter"), torch.arange(B * L), E)
    torch.testing.assert_close(ratio_TD, 0.75 + 0.5 * noise_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_get_the_input_without_jitter(dtype: torch.dtype) -> None:
    """Jitter changes only the router's copy of the input: the layer's input and the experts' input have none."""
    router = sections.Router(preset="glam", capacity_factor=None, jitter=0.5)
    layer = MoELayer(sections.Experts(num_experts=E), router, d_model=D, d_ff=8, ffn="relu", layer=1)
    for i, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    seen: list[Tensor] = []
    layer.experts.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    x_BLD = random(B, L, D).to(dtype)
    before = x_BLD.clone()
    layer(x_BLD, context())
    assert torch.equal(x_BLD, before)
    assert torch.equal(seen[0], x_BLD.flatten(0, 1))


def test_noise_differs_between_layers_steps_and_seeds() -> None:
    x_TD = random(B * L, D)
    router = router_of(jitter=0.3)
    base = route(router, x_TD).logits_TE
    assert torch.equal(route(router, x_TD).logits_TE, base)
    assert not torch.equal(route(router, x_TD, seed=1).logits_TE, base)
    assert not torch.equal(route(router, x_TD, step=1).logits_TE, base)
    router.name = "layers.3.router"
    assert not torch.equal(route(router, x_TD).logits_TE, base)


@pytest.mark.parametrize("preset", ["switch", "gshard", "glam"])
def test_evaluation_has_no_noise(preset: str) -> None:
    """Results do not depend on seed and step, although the recipe has jitter and a random second expert."""
    x_TD = random(B * L, D)
    router = router_of(preset=preset, jitter=0.3, eval_capacity_factor=1.0).eval()
    first, second = route(router, x_TD, seed=1, step=1), route(router, x_TD, seed=2, step=2)
    for name in ("expert_TK", "gate_TK", "kept_TK", "logits_TE"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    torch.testing.assert_close(first.logits_TE, x_TD @ router.weight.t())
    router.train()
    assert not torch.equal(route(router, x_TD, seed=1).logits_TE, route(router, x_TD, seed=2).logits_TE)


@pytest.mark.parametrize("second", [0.05, 0.2, 0.35, 0.5])
def test_a_random_second_expert_is_used_with_probability_twice_its_gate(second: float) -> None:
    """Counted over 6000 tokens, within five standard errors. The first expert is always used."""
    tokens = 6000
    logits_TE = torch.tensor([math.log(1 - second), -30.0, math.log(second)]).repeat(tokens, 1)
    routed = route(from_logits(logits_TE, preset="gshard", capacity_factor=None), logits_TE, length=tokens)
    assert routed.expert_TK.unique(dim=0).tolist() == ([[0, 2]])
    assert routed.kept_TK[:, 0].all()
    p = min(1.0, 2 * second)
    share = routed.kept_TK[:, 1].float().mean().item()
    assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / tokens) + 1e-3 * (p == 1)


def test_whether_the_second_is_random_is_the_presets_choice_or_the_recipes() -> None:
    logits_TE = torch.tensor([3.0, 0.0, -9.0]).repeat(200, 1)
    used = {}
    for preset, second in [("gshard", "preset"), ("gshard", "always"), ("glam", "preset"), ("glam", "random")]:
        routed = route(from_logits(logits_TE, preset=preset, second=second, capacity_factor=None), logits_TE, length=200)
        used[preset, second] = bool(routed.kept_TK.all())
    assert used == {("gshard", "preset"): False, ("gshard", "always"): True, ("glam", "preset"): True, ("glam", "random"): False}


def test_an_unused_second_choice_takes_no_slot() -> None:
    """Second experts that are not used take no slot: an expert keeps the first choices among those used."""
    x_TD = random(60, D)
    kept = {f: route(router_of(preset="gshard", capacity_factor=f, min_capacity=0), x_TD, length=60).kept_TK for f in (None, 0.6)}
    expert_TK = route(router_of(preset="gshard"), x_TD, length=60).expert_TK
    slots = math.ceil(60 * 2 * 0.6 / E)
    full = 0
    for expert in range(E):
        queue = (kept[None] & (expert_TK == expert)).t().flatten().nonzero().flatten()
        got = (kept[0.6] & (expert_TK == expert)).t().flatten().nonzero().flatten()
        assert torch.equal(got, queue[:slots])
        full += len(queue) > slots
    assert full and not kept[None].all()


def test_training_and_evaluation_have_separate_capacity_factors() -> None:
    x_TD = random(B * L, D)
    router = router_of(capacity_factor=0.5, eval_capacity_factor=2.0, min_capacity=0)
    assert route(router, x_TD).capacity == math.ceil(L * 0.5 / E)
    assert route(router.eval(), x_TD).capacity == math.ceil(L * 2 / E)
    dropless = router_of(capacity_factor=0.5, min_capacity=0).eval()
    assert route(dropless, x_TD).capacity is None and route(dropless, x_TD).kept_TK.all()


@pytest.mark.parametrize(("group", "groups"), [("sequence", 6), (1, 6), (2, 3), (3, 2), (6, 1), ("rank", 1)])
def test_a_group_is_some_sequences_or_all_tokens_of_a_rank(group: str | int, groups: int) -> None:
    routed = route(router_of(group=group, capacity_factor=1.0, min_capacity=0), random(B * L, D))
    assert routed.num_groups == groups and routed.capacity == math.ceil(B * L // groups / E)


def test_fewer_sequences_than_a_group_are_one_group_in_evaluation_and_refused_in_training() -> None:
    router = router_of(group=4)
    assert route(router.eval(), random(3 * L, D)).num_groups == 1
    with pytest.raises(BadInput, match="router.group"):
        route(router.train(), random(3 * L, D))


@given(
    st.sampled_from(["switch", "gshard", "glam"]),
    st.sampled_from(["sequence", 1, 2]),
    st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, None]),
)
@settings(max_examples=25, deadline=None)
def test_a_batch_is_routed_the_same_whole_or_in_micro_batches(preset: str, group: Any, seed: int, factor: float | None) -> None:
    """With jitter and random seconds, experts, gates, drops and losses are equal: noise depends on a token's position in the step."""
    x_BLD = random(B, L, D, seed=seed)
    router = router_of(preset=preset, group=group, jitter=0.4, capacity_factor=factor, min_capacity=1)
    whole = route(router, x_BLD.flatten(0, 1), seed=seed)
    for m in (3,) if group == 2 else (2, 3, 6):
        held = B // m
        parts = [route(router, x_BLD[i * held : (i + 1) * held].flatten(0, 1), seed=seed, first_sequence=i * held) for i in range(m)]
        assert torch.equal(torch.cat([p.expert_TK for p in parts]), whole.expert_TK)
        assert torch.equal(torch.cat([p.kept_TK for p in parts]), whole.kept_TK)
        torch.testing.assert_close(torch.cat([p.gate_TK for p in parts]), whole.gate_TK)
        for loss in (lambda r: balance_loss(r.probs_TE, r.expert_TK, num_groups=r.num_groups), lambda r: z_loss(r.logits_TE)):
            torch.testing.assert_close(torch.stack([loss(p) for p in parts]).mean(), loss(whole))


@pytest.mark.parametrize("preset", ["switch", "gshard", "glam"])
def test_both_kernels_route_alike(preset: str) -> None:
    x_TD = random(B * L, D)
    found = []
    for kernels in ("cpu", "reference"):
        router = Router(sections.Router(preset=preset, capacity_factor=0.7, jitter=0.1), num_experts=E, d_model=D, kernels=kernels)
        router.weight.data.copy_(random(E, D, seed=99))
        found.append(route(router, x_TD))
    for name in ("expert_TK", "gate_TK", "kept_TK", "probs_TE"):
        assert torch.equal(*(getattr(r, name) for r in found))
