"""A router's decision, for every kind of router: valid experts, capacity, equality of kernels, and replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.kernels import reference
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.losses import balance_loss, z_loss
from moe.router.router import Router
from moe.router.routing import Decision
from parallel.numerics.recompute import Replay
from tests.support.routed import B, D, L, by_hand, context, ids, layer_of, random, route, router_of

ROUTERS: dict[str, dict[str, Any]] = {
    "top-1": {},
    "gshard": {"preset": "gshard"},
    "all experts": {"preset": "glam", "num_choices": 4, "second": "always"},
    "over the chosen": {"preset": "mixtral"},
    "after dropping": {"preset": "deepspeed", "group": "sequence"},
    "megatron": {"preset": "megatron", "group": "sequence"},
    "lowest gate": {"preset": "glam", "drop": "lowest_gate"},
    "by lot": {"preset": "glam", "drop": "random", "queue": "tokens_first"},
    "deepseek": {"preset": "deepseek_v3", "expert_groups": 2, "top_groups": 1, "num_choices": 2},
    "sqrt softplus, gumbel": {"preset": "glam", "score": "sqrt_softplus", "noise": "gumbel"},
    "noisy top-k": {"preset": "mixtral", "noise": "noisy_top_k"},
    "hash": {"select": "hash", "num_choices": 3, "balance_weight": 0},
    "sinkhorn": {"select": "sinkhorn", "score": "sigmoid", "balance_weight": 0},
    "expert choice": {"preset": "expert_choice"},
}
EVERY = pytest.mark.parametrize("options", [pytest.param(o, id=name) for name, o in ROUTERS.items()])


@EVERY
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 3),
    length=st.integers(1, 9),
    factor=st.sampled_from([1e-6, 0.3, 1.0, 4.0, None]),
    minimum=st.integers(0, 3),
    padded=st.sampled_from(["none", "some", "all"]),
    training=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
@settings(max_examples=25, deadline=None)
def test_a_decision_is_valid(
    options: dict[str, Any],
    seed: int,
    batch: int,
    length: int,
    factor: float | None,
    minimum: int,
    padded: str,
    training: bool,
    scale: float,
) -> None:
    """No NaN, different experts for each token, no expert above its capacity in a group, and padding is never kept."""
    if options.get("preset") == "expert_choice" and factor is None:
        factor = 1.0
    router = router_of(num_experts=4, **options | {"capacity_factor": factor, "eval_capacity_factor": factor, "min_capacity": minimum})
    router.train(training)
    x = scale * random(batch * length, D, seed=seed)
    share = {"none": 1.0, "some": 0.6, "all": 0.0}[padded]
    valid_BL = torch.rand(batch, length, generator=torch.Generator().manual_seed(seed)) < share
    routing = route(
        router, x, length=length, seed=seed, valid_BL=None if padded == "none" else valid_BL, tokens=ids(batch, length, seed=seed)
    )
    for tensor in (
        routing.gate_TK,
        routing.probs_TE,
        balance_loss(routing.probs_TE, routing.expert_TK, valid_T=routing.valid_T),
        z_loss(routing.logits_TE),
    ):
        assert tensor.isfinite().all()
    assert all(len(set(row)) == len(row) and max(row) < 4 for row in routing.expert_TK.tolist())
    valid_T = torch.ones(batch * length, dtype=torch.bool) if padded == "none" else valid_BL.flatten()
    real_TK = valid_T.unsqueeze(1).expand_as(routing.kept_TK)
    if routing.counted_TK is not None:
        real_TK = real_TK & routing.counted_TK
    assert not (routing.kept_TK & ~real_TK).any()
    if factor is None and not router.spec.random_second:
        assert torch.equal(routing.kept_TK, real_TK) and routing.capacity is None
    for kept, expert in zip(routing.kept_TK.chunk(routing.num_groups), routing.expert_TK.chunk(routing.num_groups), strict=True):
        used = torch.bincount(expert[kept], minlength=4)
        assert routing.capacity is None or used.max() <= routing.capacity


@EVERY
def test_a_layer_is_the_sum_over_kept_choices(options: dict[str, Any]) -> None:
    """The layer's output and gradients equal a sum over each token's kept choices. Kept and dropped choices add up to all choices."""
    layer = layer_of(num_experts=4, **{"capacity_factor": 0.8, "min_capacity": 1} | options)
    x_BLD = random(B, L, D).requires_grad_()
    routing = route(layer.router, x_BLD.flatten(0, 1))
    y_BLD, report = layer(x_BLD, context())
    want = by_hand(layer, x_BLD, routing)
    torch.testing.assert_close(y_BLD, want, rtol=1e-5, atol=1e-5)
    weight = random(B, L, D, seed=5)
    layer.router.spec = layer.router.spec.model_copy(update={"balance_weight": 0.0})
    leaves = {"x": x_BLD} | dict(layer.named_parameters())
    got = torch.autograd.grad((layer(x_BLD, context())[0] * weight).sum(), list(leaves.values()))
    wanted = torch.autograd.grad((want * weight).sum(), list(leaves.values()), allow_unused=True)
    for name, a, b in zip(leaves, got, wanted, strict=True):
        torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-4, atol=2e-5, msg=name)
    counted = routing.expert_TK.numel() if routing.counted_TK is None else int(routing.counted_TK.sum())
    assert report.kept + report.dropped == report.load_E.sum() == counted


@EVERY
def test_a_replayed_decision_is_reused(options: dict[str, Any]) -> None:
    """A second pass with another input reuses the experts and slots of the first, but computes its own gates, with gradient."""
    router = router_of(num_experts=4, **{"capacity_factor": 0.8, "min_capacity": 1} | options)
    there = replace(context(), replay=Replay())
    first = router(random(B * L, D), sequence_tokens=L, context=there)
    second = router(random(B * L, D, seed=7), sequence_tokens=L, context=there)
    assert second.expert_TK is first.expert_TK and second.kept_TK is first.kept_TK and second.counted_TK is first.counted_TK
    assert second.gate_TK.requires_grad and not torch.equal(first.logits_TE, second.logits_TE)


@EVERY
def test_deciding_takes_no_gradient_and_keeps_no_floats(options: dict[str, Any]) -> None:
    router = router_of(num_experts=4, **options)
    logits = random(B * L, 4).requires_grad_()
    made = router.decide(logits.softmax(-1), logits, sequence_tokens=L, context=context())
    assert isinstance(made, Decision)
    tensors = [t for t in (vars(made) | vars(made.chosen)).values() if isinstance(t, torch.Tensor)]
    assert {t.dtype for t in tensors} == {torch.int64, torch.bool} and not any(t.requires_grad for t in tensors)


@EVERY
def test_the_reference_kernels_decide_the_same(options: dict[str, Any]) -> None:
    values = {"capacity_factor": 0.6, "min_capacity": 1} | options
    found = []
    for kernels in ("cpu", "reference"):
        router = Router(sections.Router(**values), num_experts=4, d_model=D, kernels=kernels, name="layers.1.router")
        for i, p in enumerate(router.parameters()):
            p.data.copy_(random(*p.shape, seed=90 + i))
        found.append(route(router, random(B * L, D)))
    assert router.kernels is reference
    for name in ("expert_TK", "gate_TK", "kept_TK"):
        assert torch.equal(*(getattr(r, name) for r in found))


def test_one_token_of_one_sequence() -> None:
    for options in ROUTERS.values():
        router = router_of(num_experts=4, **options).eval()
        routing = router(random(1, D), sequence_tokens=1, context=Context.of(torch.tensor([[3]])))
        assert routing.expert_TK.shape[0] == 1 and routing.gate_TK.isfinite().all()
