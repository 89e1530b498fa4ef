"""Methods of selecting experts: each equals its rule written as loops; effects of token ids, selection bias and padding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.kernels import cpu, reference
from moe.nn.context import Context
from moe.router.losses import updated_bias
from moe.router.methods.expert_choice import expert_choice
from moe.router.methods.group_limited import group_limited
from moe.router.methods.hashed import hashed
from moe.router.methods.sinkhorn import balanced_plan
from tests.support.routed import B, D, E, L, by_hand, context, from_logits, ids, layer_of, random, route, router_of

# B sequences, L length, T = B*L tokens, E experts, K choices, C slots


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("counted", [2, 1])
@pytest.mark.parametrize(("groups", "top", "k"), [(1, 1, 3), (4, 1, 2), (4, 2, 5), (4, 4, 6), (3, 2, 8), (12, 5, 4)])
def test_group_limited_is_top_k_within_the_best_groups(kernels: object, groups: int, top: int, k: int, counted: int) -> None:
    """A group's score is the sum of its two best scores (DeepSeek-V3), or its best one (V2). Ties go to the lowest group and expert."""
    scores = (random(40, 12) * 2).round() / 2  # rounded, so that there are ties
    got = group_limited(scores, k, expert_groups=groups, top_groups=top, best=counted, kernels=kernels)  # type: ignore[arg-type]
    each = 12 // groups
    for row, experts in zip(scores.tolist(), got.tolist(), strict=True):
        group_scores = [sum(sorted(row[g * each : (g + 1) * each])[-counted:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: (-group_scores[g], g))[:top]
        allowed = [e for e in range(12) if e // each in best]
        assert experts == sorted(allowed, key=lambda e: (-row[e], e))[:k]


def test_in_one_group_it_is_plain_top_k() -> None:
    scores = random(30, 8)
    assert torch.equal(group_limited(scores, 3, expert_groups=1, top_groups=1, best=2, kernels=cpu), cpu.top_k(scores, 3))


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 7), st.integers(1, 6), st.integers(0, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_each_expert_has_its_best_valid_tokens(seed: int, groups: int, each: int, experts: int, slots: int, padded: bool) -> None:
    """Each expert takes its `slots` best valid tokens of every group, or all if there are fewer. Ties go to the first token."""
    slots, tokens = min(slots, each), groups * each
    scores = (random(tokens, experts, seed=seed) * 2).round()
    valid = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < 0.7 if padded else torch.ones(tokens, dtype=torch.bool)
    found = expert_choice(scores, slots=slots, num_groups=groups, valid_T=valid if padded else None)
    expert_TK, counted_TK = found.expert_TK, found.counted_TK
    assert counted_TK is not None
    chosen = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, expert_TK, counted_TK)
    for g in range(groups):
        rows = [t for t in range(g * each, (g + 1) * each) if valid[t]]
        for e in range(experts):
            best = sorted(rows, key=lambda t: (-scores[t, e].item(), t))[:slots]
            assert chosen[g * each : (g + 1) * each, e].nonzero().flatten().tolist() == [t - g * each for t in sorted(best)]
    assert expert_TK.shape == (tokens, max(1, int(chosen.sum(1).max())))
    assert all(len(set(row)) == len(row) for row in expert_TK.tolist()), "a row names an expert once, fillers included"


def test_a_layer_with_expert_choice_is_the_sum_over_choices() -> None:
    """Output and gradients equal a sum over each token's experts. All experts have the same load, and nothing is dropped."""
    layer = layer_of(preset="expert_choice")
    x_BLD = random(B, L, D).requires_grad_()
    routing = route(layer.router, x_BLD.flatten(0, 1))
    y_BLD, report = layer(x_BLD, context())
    want = by_hand(layer, x_BLD, routing)
    torch.testing.assert_close(y_BLD, want, rtol=1e-5, atol=1e-5)
    leaves = [x_BLD, *layer.parameters()]
    weight = random(B, L, D, seed=5)
    for got, wanted in zip(
        torch.autograd.grad((y_BLD * weight).sum(), leaves), torch.autograd.grad((want * weight).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    slots = -(-L * 2 // E)
    assert report.load_E.tolist() == [B * slots] * E and report.kept == B * slots * E and report.dropped == 0
    assert routing.counted_TK is not None and routing.counted_TK.sum(1).unique().numel() > 1, "tokens have different numbers of experts"
    assert torch.equal(routing.gate_TK != 0, routing.counted_TK)


def test_a_hash_depends_on_the_tokens_id_and_the_layer_alone() -> None:
    options = {"select": "hash", "num_choices": 2, "balance_weight": 0, "capacity_factor": None}
    router = router_of(**options)
    first = route(router, random(B * L, D), seed=1, step=2).expert_TK
    other = route(router.eval(), random(B * L, D, seed=9), seed=3, step=4, first_sequence=7).expert_TK
    assert torch.equal(first, other)
    by_id: dict[int, list[int]] = {}
    for token, experts in zip(ids().flatten().tolist(), first.tolist(), strict=True):
        assert by_id.setdefault(token, experts) == experts and len(set(experts)) == 2
    assert len({tuple(e) for e in by_id.values()}) > 3
    assert not torch.equal(route(router_of(name="layers.3.router", **options), random(B * L, D)).expert_TK, first)


def test_a_hash_spreads_a_vocabulary_evenly() -> None:
    """32000 ids on 7 experts: each expert's load is within five standard deviations of the mean."""
    load = torch.bincount(hashed(torch.arange(32000), 1, num_experts=7, name="layers.1.router", kernels=cpu).flatten(), minlength=7)
    assert ((load - 32000 / 7).abs() < 5 * (32000 / 7 * 6 / 7) ** 0.5).all()


def test_hash_with_one_choice_has_gate_1() -> None:
    """With one expert and softmax over the chosen one, the gate is exactly 1, and the router's weight gets gradient 0."""
    router = router_of(preset="switch", select="hash", softmax_over="chosen", balance_weight=0)
    routing = route(router, random(B * L, D))
    assert torch.equal(routing.gate_TK, torch.ones(B * L, 1))
    routing.gate_TK.sum().backward()
    assert router.weight.grad is not None and not router.weight.grad.any()


def skewed(tokens: int = 240, *, seed: int = 0) -> Tensor:
    return random(tokens, E, seed=seed) + torch.linspace(2, 0, E)


def loads(expert_TK: Tensor) -> Tensor:
    return torch.bincount(expert_TK.flatten(), minlength=E)


def test_sinkhorns_plan_has_equal_sums_for_all_experts() -> None:
    """Sinkhorn scales rows and columns of exp(logits) until all experts have equal sums. Choices by this plan have nearly equal loads."""
    logits = skewed()
    plan = balanced_plan(logits, num_groups=2, valid_T=None)
    for group in plan.view(2, 120, E):
        share_E = group.softmax(-1).sum(0)
        torch.testing.assert_close(share_E, torch.full((E,), 120 / E), rtol=1e-3, atol=0)
    assert loads(logits.argmax(-1)).max() > 2.2 * 240 / E
    assert loads(plan.argmax(-1)).max() < 1.5 * 240 / E


def test_padding_does_not_change_sinkhorns_plan() -> None:
    logits, valid = skewed(), torch.arange(240) % 120 < 70
    full = balanced_plan(logits, num_groups=2, valid_T=valid)
    other = balanced_plan(torch.where(valid[:, None], logits, 50 * random(240, E, seed=3)), num_groups=2, valid_T=valid)
    assert full.isfinite().all() and torch.equal(full[valid], other[valid])
    assert balanced_plan(logits, num_groups=2, valid_T=torch.zeros(240, dtype=torch.bool)).isfinite().all()


def test_sinkhorn_chooses_by_the_plan_in_training_and_by_the_logits_in_evaluation() -> None:
    logits = skewed()
    router = from_logits(logits, select="sinkhorn", balance_weight=0, capacity_factor=None)
    train, evaluated = route(router, logits, length=120), route(router.eval(), logits, length=120)
    assert torch.equal(train.expert_TK[:, 0], balanced_plan(logits, num_groups=2, valid_T=None).argmax(-1))
    assert torch.equal(evaluated.expert_TK[:, 0], logits.argmax(-1))
    for routing in (train, evaluated):  # gates are probabilities of the logits, not of the plan
        torch.testing.assert_close(routing.gate_TK, logits.softmax(-1).gather(1, routing.expert_TK))


@pytest.mark.parametrize("select", ["top_k", "group_limited"])
def test_a_bias_changes_choices_but_no_gates(select: str) -> None:
    logits = random(60, 8)
    router = from_logits(logits, preset="deepseek_v3", select=select, expert_groups=4, top_groups=3, num_choices=2)
    plain = route(router, logits, length=60)
    assert router.bias_E is not None and router.bias_E.dtype == torch.float32 and "bias_E" in router.state_dict()
    router.bias_E[5] = 0.4
    routing = route(router, logits, length=60)
    assert (routing.expert_TK == 5).sum() > (plain.expert_TK == 5).sum()
    gate_TK = logits.sigmoid().gather(1, routing.expert_TK)
    torch.testing.assert_close(routing.gate_TK, 2.5 * gate_TK / gate_TK.sum(1, keepdim=True))
    router.bias_E[5] = -9  # below every score: expert 5 is never chosen
    assert not (route(router, logits, length=60).expert_TK == 5).any()


def test_bias_updates_even_the_load() -> None:
    """On new batches, bias updates alone lower the largest load from 1.6 to 1.25 times the mean."""
    router = from_logits(skewed(), preset="deepseek_v3", select="top_k", num_choices=2, capacity_factor=0.5, bias_rate=0.02)
    assert router.bias_E is not None
    most = []
    for step in range(80):
        batch = skewed(1200, seed=step)
        routing = route(router, batch, length=1200)
        load_E = loads(routing.expert_TK)
        router.bias_E.copy_(updated_bias(router.bias_E, load_E, 0.02))
        most.append(load_E.max().item() / (2400 / E))
    assert most[0] > 1.6 and max(most[-10:]) < 1.25


def test_without_a_rate_there_is_no_bias() -> None:
    assert router_of().bias_E is None and "bias_E" not in router_of().state_dict()
    assert router_of(bias_rate=0.0).bias_E is not None


METHODS: dict[str, dict[str, object]] = {
    "switch": {},
    "gshard": {"preset": "gshard"},
    "megatron": {"preset": "megatron", "capacity_factor": 0.7},
    "random": {"preset": "glam", "drop": "random"},
    "deepseek": {"preset": "deepseek_v3", "expert_groups": 3, "top_groups": 2, "num_choices": 3, "capacity_factor": 0.8},
    "expert choice": {"preset": "expert_choice"},
    "hash": {"select": "hash", "balance_weight": 0},
    "sinkhorn": {"select": "sinkhorn", "balance_weight": 0},
}
EVERY = pytest.mark.parametrize("options", [pytest.param(o, id=name) for name, o in METHODS.items()])


@EVERY
@pytest.mark.parametrize("training", [True, False])
def test_contents_of_padding_have_no_effect(options: dict[str, object], training: bool) -> None:
    """Padding is never kept. Experts, gates and slots of valid tokens do not depend on the values and ids of padding."""
    tight = {"capacity_factor": 0.6, "eval_capacity_factor": 0.9, "min_capacity": 1} | options
    router = router_of(**tight).train(training)
    valid_BL = torch.arange(L) < torch.tensor([9, L, 0]).unsqueeze(1)
    x, valid_T = random(B * L, D), valid_BL.flatten()
    noise = torch.where(valid_T.unsqueeze(1), x, 30 * random(B * L, D, seed=4))
    tokens = torch.where(valid_BL, ids(), ids(seed=8))
    first, second = route(router, x, valid_BL=valid_BL), route(router, noise, valid_BL=valid_BL, tokens=tokens)
    k = min(first.expert_TK.shape[1], second.expert_TK.shape[1])
    for routing in (first, second):
        assert not routing.kept_TK[~valid_T].any() and routing.gate_TK.isfinite().all() and not routing.kept_TK[:, k:].any()
    assert torch.equal(first.kept_TK[valid_T, :k], second.kept_TK[valid_T, :k]) and first.kept_TK.any()
    assert torch.equal(first.expert_TK[valid_T][first.kept_TK[valid_T]], second.expert_TK[valid_T][second.kept_TK[valid_T]])
    torch.testing.assert_close(first.gate_TK[first.kept_TK], second.gate_TK[second.kept_TK])


@EVERY
def test_routing_is_equal_for_a_whole_batch_and_single_sequences(options: dict[str, object]) -> None:
    """A batch routed whole, or one sequence at a time, has the same choices and gates, with jitter and random drops."""
    make: Callable[..., dict[str, object]] = lambda **more: {"capacity_factor": 0.7, "min_capacity": 1, "jitter": 0.3} | options | more  # noqa: E731
    router = router_of(**make(group="sequence"))
    x_BLD, tokens = random(B, L, D), ids()
    whole = route(router, x_BLD.flatten(0, 1), tokens=tokens, seed=6)
    parts = [route(router, x_BLD[i], tokens=tokens[i : i + 1], seed=6, first_sequence=i) for i in range(B)]
    k = whole.expert_TK.shape[1]
    spread = [torch.nn.functional.pad(p.kept_TK, (0, k - p.kept_TK.shape[1])) for p in parts]
    assert torch.equal(torch.cat(spread), whole.kept_TK)
    chosen = [torch.zeros(len(r.expert_TK), E).scatter(1, r.expert_TK, r.gate_TK.detach()) for r in (whole, *parts)]
    torch.testing.assert_close(torch.cat(chosen[1:]), chosen[0])


def test_a_context_of_its_own_carries_ids() -> None:
    assert torch.equal(Context.of(ids()).tokens_T, ids().flatten())  # type: ignore[arg-type]
