"""SparseMixer equals its definition and transformers' Phi-3.5-MoE. A router with a normed input equals Gemma 4's.

Only these tests notice a gradient that includes the factor s, draws with other probabilities than the gates, or an expert that is drawn
twice.
"""

from __future__ import annotations

import pytest
import torch

from moe.router.methods.sparsemixer import mixed_gates, one_by_one, shares
from tests.support.routed import D, E, L, random, route, router_of

K, MARGIN = 3, 0.3


def test_experts_are_drawn_by_the_gates_probabilities() -> None:
    """4000 draws for one token: frequencies of the first expert equal the softmax of open experts; s is 1 for the best expert and 0.5 on
    average for others.
    """
    row = torch.tensor([1.0, 2.0, 1.6, -3.0, 1.1, 1.3])
    logits_TE, generator = row.expand(4000, E), torch.Generator().manual_seed(1)
    expert_TK, best_TK, open_TKE = one_by_one(logits_TE, K, margin=MARGIN, uniform=lambda k: torch.rand(4000, E, generator=generator))
    near = [e for e in range(E) if (2.0 - row[e]) / 2.0 <= 2 * MARGIN]
    assert near == [0, 1, 2, 4, 5] and open_TKE[0, 0].nonzero().flatten().tolist() == near
    often = expert_TK[:, 0].bincount(minlength=E) / 4000
    torch.testing.assert_close(often, row.masked_fill(~open_TKE[0, 0], -torch.inf).softmax(0), rtol=0, atol=0.03)
    assert (
        all(len(set(token)) == K for token in expert_TK.tolist())
        and not open_TKE.gather(2, expert_TK[:, :1, None].expand(-1, K, 1))[:, 1:].any()
    )
    share_TK = shares(best_TK, torch.rand(4000, K, generator=generator))
    assert bool((share_TK[best_TK] == 1).all()) and float(share_TK[~best_TK].mean()) == pytest.approx(0.5, abs=0.02)


def test_the_gradient_is_that_of_the_probabilities() -> None:
    logits_TE = random(5, E, seed=3).double().requires_grad_()
    expert_TK, best_TK, open_TKE = one_by_one(logits_TE.detach(), K, margin=MARGIN, uniform=lambda k: torch.rand(5, E).double())
    share_TK = shares(best_TK, torch.zeros(5, K)).double()
    gate_TK = mixed_gates(logits_TE, expert_TK, open_TKE, share_TK)
    plain_TK = mixed_gates(logits_TE, expert_TK, open_TKE, None)
    torch.testing.assert_close(gate_TK, plain_TK * share_TK)
    weights_TK = random(5, K, seed=4).double()
    got, want = (torch.autograd.grad((gate * weights_TK).sum(), logits_TE, retain_graph=True)[0] for gate in (gate_TK, plain_TK))
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(lambda x: mixed_gates(x, expert_TK, open_TKE, None), logits_TE)


@pytest.mark.parametrize("training", [True, False])
def test_sparsemixer_equals_transformers(training: bool) -> None:
    """Choices, gates and gradients equal transformers'. In training, random numbers are set so that the same experts are drawn."""
    phimoe = pytest.importorskip("transformers.models.phimoe.modeling_phimoe", reason="pip install moe-parallel[hf]")
    logits_TE = (random(400, E, seed=5) + 0.5).requires_grad_()
    want_TK, expert_TK = phimoe.sparsemixer(logits_TE, jitter_eps=MARGIN, training=training)

    def made(choice: int) -> torch.Tensor:
        # a uniform number of 1 makes a Gumbel number of 17, so that expert wins
        return torch.full((400, E), 0.5).scatter(1, expert_TK[:, choice : choice + 1], 1.0)

    chosen_TK, best_TK, open_TKE = one_by_one(logits_TE.detach(), 2, margin=MARGIN, uniform=made if training else None)
    assert torch.equal(chosen_TK, expert_TK)
    plain_TK = mixed_gates(logits_TE, chosen_TK, open_TKE, None).detach()
    whole_TK = (want_TK / plain_TK > 0.9).detach()
    assert bool((whole_TK >= best_TK).all()) and bool(whole_TK.all()) != training
    share_TK = shares(best_TK, whole_TK.float()) if training else None
    got_TK = mixed_gates(logits_TE, chosen_TK, open_TKE, share_TK)
    torch.testing.assert_close(got_TK, want_TK, rtol=2e-4, atol=0)  # transformers uses 0.3333 for 1/3
    weights_TK = random(400, 2, seed=6)
    grads = [torch.autograd.grad((gate * weights_TK).sum(), logits_TE)[0] for gate in (got_TK, want_TK)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)


def test_a_router_with_normed_input_and_expert_scales_equals_gemmas() -> None:
    gemma4 = pytest.importorskip("transformers.models.gemma4.modeling_gemma4", reason="pip install moe-parallel[hf]")
    sizes = gemma4.Gemma4TextConfig(hidden_size=D, num_experts=E, top_k_experts=2, enable_moe_block=True, rms_norm_eps=0.5)
    theirs = gemma4.Gemma4TextRouter(sizes)
    options = {"num_choices": 2, "capacity_factor": None, "balance_weight": 0.0, "norm_eps": 0.5}
    ours = router_of(preset="glam", input_norm="rmsnorm", expert_scale="learned", **options)
    with torch.no_grad():
        theirs.proj.weight.copy_(ours.weight)
        theirs.per_expert_scale.copy_(ours.expert_scale)
        theirs.scale.copy_(ours.input_norm.weight * D**0.5)
    x_TD = (3 * random(2 * L, D, seed=7)).requires_grad_()
    _, want_TK, expert_TK = theirs(x_TD)
    routing = route(ours, x_TD)
    assert torch.equal(routing.expert_TK, expert_TK)
    torch.testing.assert_close(routing.gate_TK, want_TK)
    weights_TK = random(2 * L, 2, seed=8)
    mine = torch.autograd.grad((routing.gate_TK * weights_TK).sum(), [x_TD, ours.weight, ours.expert_scale, ours.input_norm.weight])
    want = torch.autograd.grad((want_TK * weights_TK).sum(), [x_TD, theirs.proj.weight, theirs.per_expert_scale, theirs.scale])
    for got, grad in zip(mine[:3], want[:3], strict=True):
        torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mine[3], want[3] * D**0.5, rtol=1e-4, atol=1e-6)
