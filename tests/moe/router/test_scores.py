"""Scores, gates and noise of the router: formulas, gradients, and noise in training only."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.router_spec import RouterSpec
from moe.router.losses import balance_loss
from moe.router.scores import chosen_gates, gumbel, normal, probabilities, scores_of
from parallel.numerics.random import key_of, uniform
from tests.support.routed import B, D, E, L, context, from_logits, layer_of, random, route, router_of

SCORES = {
    "softmax": lambda x: x.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda x: torch.log1p(x.double().exp()).sqrt().to(x.dtype),
}


@pytest.mark.parametrize("score", SCORES)
def test_scores_and_probabilities_equal_their_formulas(score: str) -> None:
    logits = 3 * random(20, E)
    spec = RouterSpec(num_choices=2, score=score)  # type: ignore[arg-type]
    scores = scores_of(logits, spec)
    torch.testing.assert_close(scores, SCORES[score](logits))
    torch.testing.assert_close(probabilities(scores, spec), scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("gates", ["as_is", "before_drop"])
def test_far_logits_have_finite_gates_and_gradients(score: str, gates: str) -> None:
    """Gates and gradients are finite for logits of -300 to 300, where scores underflow or reach their limit."""
    logits = torch.tensor([[-200.0] * E, [200.0] * E, [300.0, -300.0] * (E // 2)]).requires_grad_()
    spec = RouterSpec(num_choices=2, score=score, gates=gates)  # type: ignore[arg-type]
    scores = scores_of(logits, spec)
    gate = chosen_gates(scores, logits, torch.tensor([[0, 1], [0, 1], [1, 3]]), spec=spec, of_TK=None)
    (grad,) = torch.autograd.grad((gate * torch.tensor([1.0, 2.0])).sum() + probabilities(scores, spec)[:, 0].sum(), logits)
    assert gate.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("score", SCORES)
def test_gates_sum_to_one_however_small_the_scores(score: str) -> None:
    """Gates and gradients equal float64's for scores below 1e-26, whose sum cannot be used as a divisor in fp32."""
    logits = torch.tensor([[90.0, -1.0, -60.0, -61.0], [90.0, -2.0, -85.0, -85.5]])
    expert_TK, of_TK = torch.tensor([[0, 2, 3]] * 2), torch.tensor([[False, True, True]] * 2)
    spec = RouterSpec(num_choices=3, score=score, gates="after_drop")  # type: ignore[arg-type]

    def gates(x: Tensor) -> Tensor:
        return chosen_gates(scores_of(x, spec), x, expert_TK, spec=spec, of_TK=of_TK)

    exact = logits.double().requires_grad_()
    kept = SCORES[score](exact)[:, 2:]
    want = kept / kept.sum(1, keepdim=True)
    found = gates(logits.requires_grad_())
    torch.testing.assert_close(found[:, 1:].double(), want, rtol=1e-5, atol=0)
    assert not found[:, 0].any()
    (got_grad,), (want_grad,) = (torch.autograd.grad(g.sum(), x) for g, x in ((found[:, 1], logits), (want[:, 0], exact)))
    torch.testing.assert_close(got_grad.double(), want_grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("score", SCORES)
def test_gates_are_the_scores_of_the_chosen(score: str) -> None:
    """Gates are the chosen experts' scores times gate_scale: unchanged, or normalized to sum to 1 before or after dropping."""
    logits = random(B * L, E) + torch.linspace(3, 0, E)
    scores = SCORES[score](logits)
    common = {"score": score, "num_choices": 3, "capacity_factor": 0.6, "min_capacity": 1, "gate_scale": 1.5}
    found = {g: route(from_logits(logits, gates=g, **common), logits) for g in ("as_is", "before_drop", "after_drop")}
    expert_TK, kept_TK = found["as_is"].expert_TK, found["as_is"].kept_TK
    gate_TK = scores.gather(1, expert_TK)
    assert torch.equal(expert_TK, scores.topk(3).indices) and 0 < kept_TK.sum() < kept_TK.numel()
    torch.testing.assert_close(found["as_is"].gate_TK, 1.5 * gate_TK)
    torch.testing.assert_close(found["before_drop"].gate_TK, 1.5 * gate_TK / gate_TK.sum(1, keepdim=True))
    left_TK = gate_TK * kept_TK
    torch.testing.assert_close(found["after_drop"].gate_TK, 1.5 * left_TK / left_TK.sum(1, keepdim=True).clamp(min=1e-20))
    lost = ~kept_TK.any(1)
    assert lost.any() and not found["after_drop"].gate_TK[lost].any()


def test_softmax_over_the_chosen_equals_renormalized_softmax() -> None:
    """Softmax over the chosen experts (Mixtral) gives the gates and gradients of a softmax over all experts, normalized (GShard)."""
    logits = random(B * L, E)
    weight = random(B * L, 2, seed=2)
    found = []
    for options in ({"softmax_over": "chosen"}, {"gates": "before_drop"}):
        router = from_logits(logits, preset="switch", num_choices=2, capacity_factor=None, **options)
        routing = route(router, logits)
        (grad,) = torch.autograd.grad(
            (routing.gate_TK * weight).sum() + 0.1 * balance_loss(routing.probs_TE, routing.expert_TK), [router.weight]
        )
        found.append((routing, grad))
    (a, grad_a), (b, grad_b) = found
    assert torch.equal(a.expert_TK, b.expert_TK)
    torch.testing.assert_close(a.gate_TK, b.gate_TK)
    torch.testing.assert_close(a.probs_TE, b.probs_TE)
    torch.testing.assert_close(grad_a, grad_b)


def test_keyed_noise_has_its_distribution() -> None:
    u = uniform(5, torch.arange(4000), 25)
    n, g = normal(u), gumbel(u)
    assert n.isfinite().all() and g.isfinite().all() and gumbel(torch.tensor([0.0, 1.0])).isfinite().all()
    assert abs(n.mean().item()) < 0.02 and abs(n.std().item() - 1) < 0.02 and abs((n.abs() < 1).float().mean().item() - 0.6827) < 0.01
    assert abs(g.mean().item() - 0.5772) < 0.02 and abs(g.std().item() - math.pi / math.sqrt(6)) < 0.02


def test_gumbel_draws_an_expert_with_its_probability() -> None:
    """Counted over 8000 tokens, within five standard errors. The gate is the probability without noise."""
    p_E = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = p_E.log().repeat(8000, 1)
    routing = route(from_logits(logits, noise="gumbel", capacity_factor=None), logits, length=8000)
    share_E = torch.bincount(routing.expert_TK[:, 0], minlength=4) / 8000
    assert ((share_E - p_E).abs() < 5 * (p_E * (1 - p_E) / 8000).sqrt()).all()
    torch.testing.assert_close(routing.gate_TK, p_E[routing.expert_TK])
    assert torch.equal(routing.logits_TE, logits)


def test_noisy_top_k_is_the_papers_formula_and_learns_its_size() -> None:
    """H = x W + N softplus(x W_noise); gates are a softmax over the k highest of H (Shazeer et al., eq. 3-5). routing.logits_TE is x W."""
    x = random(B * L, D)
    router = router_of(noise="noisy_top_k", num_choices=2, softmax_over="chosen", capacity_factor=None)
    routing = route(router, x, seed=3, step=4)
    assert router.noise_weight is not None
    n_TE = normal(uniform(key_of(3, 4, "layers.1.router.noise"), torch.arange(B * L), E))
    h_TE = x @ router.weight.t() + n_TE * F.softplus(x @ router.noise_weight.t())
    top = h_TE.topk(2)
    assert torch.equal(routing.expert_TK, top.indices)
    torch.testing.assert_close(routing.gate_TK, top.values.softmax(-1))
    torch.testing.assert_close(routing.logits_TE, x @ router.weight.t())
    weight = random(B * L, 2, seed=2)
    leaves = [router.weight, router.noise_weight]
    got, want = (torch.autograd.grad((g * weight).sum(), leaves) for g in (routing.gate_TK, top.values.softmax(-1)))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0.01


@pytest.mark.parametrize(
    "options", [{"noise": "gumbel"}, {"noise": "noisy_top_k"}, {"drop": "random", "capacity_factor": 0.6, "eval_capacity_factor": 0.6}]
)
def test_noise_is_training_only(options: dict[str, object]) -> None:
    """In evaluation, results do not depend on the seed and equal those of a router without noise. In training they depend on it."""
    x = random(B * L, D)
    router = router_of(preset="glam", **options)
    quiet = router_of(preset="glam", **{k: v for k, v in options.items() if k not in ("noise", "drop")})
    evaluated = [route(r.eval(), x, seed=s) for r, s in ((router, 1), (router, 2), (quiet, 1))]
    for routing in evaluated[1:]:
        for name in ("expert_TK", "gate_TK", "kept_TK", "logits_TE"):
            assert torch.equal(getattr(routing, name), getattr(evaluated[0], name))
    a, b = (route(router.train(), x, seed=s) for s in (1, 2))
    assert not (torch.equal(a.expert_TK, b.expert_TK) and torch.equal(a.kept_TK, b.kept_TK))


def test_random_drops_serve_first_choices_before_second_ones() -> None:
    """With drop random and queue choices_first, random drops among first choices do not favor early tokens, and no first choice loses its
    slot to a second choice.
    """
    logits = torch.tensor([4.0, 3.0]).repeat(400, 1)
    routing = route(from_logits(logits, preset="glam", drop="random", capacity_factor=0.5, min_capacity=0), logits, length=400)
    kept = routing.kept_TK
    assert kept.sum(0).tolist() == [200, 200] and 60 < kept[:200, 0].sum() < 140
    both = route(from_logits(logits.flip(1), preset="glam", drop="random", capacity_factor=0.5, min_capacity=0), logits.flip(1), length=400)
    assert both.kept_TK.sum(0).tolist() == [200, 200]


def test_every_parameter_of_a_noisy_router_learns_through_the_layer() -> None:
    layer = layer_of(preset="switch", num_choices=2, noise="noisy_top_k", capacity_factor=None)
    y, _ = layer(random(B, L, D), context())
    y.square().sum().backward()
    for name, p in layer.router.named_parameters():
        assert isinstance(p.grad, Tensor) and p.grad.abs().max() > 1e-3, name
