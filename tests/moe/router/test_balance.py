"""Balance, importance and z losses: values for known routings, gradients, padding, and how a loss joins the backward pass."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.experts.layer import MoELayer
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.losses import balance_loss, count_choices, importance_loss, join, spread_gates, step_means, z_loss
from moe.router.router import Router
from tests.support.routed import D, L, random, route, router_of

# G groups, S tokens of a group, T = G*S tokens, E experts, K choices, D model


def routing(groups: int, each: int, num_experts: int, k: int, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return (router probabilities [T, E] with gradient, each token's k most probable experts)."""
    logits = torch.randn(groups * each, num_experts, generator=torch.Generator().manual_seed(seed)) * 2
    probs = logits.softmax(-1).requires_grad_()
    return probs, probs.detach().topk(k).indices


def plain(probs_TE: Tensor, expert_TK: Tensor, groups: int) -> Tensor:
    """Return the balance loss by Switch's eq. 4 to 6, in loops: a mean over groups."""
    tokens, num_experts = probs_TE.shape
    each, values = tokens // groups, []
    for g in range(groups):
        rows = slice(g * each, (g + 1) * each)
        share = [(expert_TK[rows] == e).sum().item() / (each * expert_TK.shape[1]) for e in range(num_experts)]
        values.append(num_experts * sum(f * probs_TE[rows, e].mean() for e, f in enumerate(share)))
    return torch.stack([torch.as_tensor(v) for v in values]).mean()


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 9), st.integers(2, 6), st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_balance_equals_the_equation(seed: int, groups: int, each: int, num_experts: int, k: int) -> None:
    probs, expert = routing(groups, each, num_experts, k, seed=seed)
    got, want = balance_loss(probs, expert, num_groups=groups), plain(probs, expert, groups)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, probs), torch.autograd.grad(want, probs))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("num_experts", [3, 8])
def test_balance_is_one_when_all_is_even_whatever_k(num_experts: int, k: int) -> None:
    tokens = num_experts * 5
    expert_TK = (torch.arange(tokens).unsqueeze(1) + torch.arange(k)) % num_experts
    probs_TE = torch.full((tokens, num_experts), 1 / num_experts)
    assert balance_loss(probs_TE, expert_TK, num_groups=1).item() == pytest.approx(1, abs=1e-6)
    assert balance_loss(probs_TE, expert_TK, num_groups=5).item() == pytest.approx(1, abs=1e-6)


def test_losses_of_layers_are_added_not_pooled() -> None:
    """Two layers send all tokens to one expert each: the losses sum to 2 E. Counts pooled over layers would look more even."""
    num_experts, tokens = 6, 35
    losses = []
    for layer in range(2):
        probs_TE = torch.zeros(tokens, num_experts)
        probs_TE[:, layer * 5] = 1
        losses.append(balance_loss(probs_TE, torch.full((tokens, 1), layer * 5), num_groups=1))
    assert torch.stack(losses).sum().item() == pytest.approx(2 * num_experts)


def test_losses_of_groups_are_averaged_not_pooled() -> None:
    """Each of four sequences has an expert of its own: the loss over groups is 4, the loss over the batch is 1."""
    expert_TK = torch.arange(4).repeat_interleave(7).unsqueeze(1)
    probs_TE = torch.nn.functional.one_hot(expert_TK[:, 0], 4).float()
    assert balance_loss(probs_TE, expert_TK, num_groups=4).item() == pytest.approx(4)
    assert balance_loss(probs_TE, expert_TK, num_groups=1).item() == pytest.approx(1)


def test_the_counts_have_no_gradient() -> None:
    """The gradient of the balance loss by p[t, e] is E f_e / T, as if the shares f were constants."""
    groups, each, num_experts = 3, 7, 5
    probs, expert = routing(groups, each, num_experts, 2)
    balance_loss(probs, expert, num_groups=groups).backward()
    f_GE = count_choices(expert, num_groups=groups, num_experts=num_experts) / (each * 2)
    want = num_experts * f_GE.repeat_interleave(each, 0) / (each * groups)
    assert probs.grad is not None
    torch.testing.assert_close(probs.grad, want)


def test_choices_are_counted_before_dropping() -> None:
    """A router with one slot per expert has the same balance loss and gradient as a dropless one."""
    x_TD = torch.randn(2 * 24, 8, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(4, 8, generator=torch.Generator().manual_seed(2))
    found = []
    for factor in (0.01, None):
        settings_ = sections.Router(preset="glam", capacity_factor=factor, min_capacity=1)
        router = Router(settings_, num_experts=4, d_model=8)
        router.weight.data.copy_(weight)
        routed = router(x_TD, sequence_tokens=24, context=Context.of(torch.zeros(2, 24)))
        loss = balance_loss(routed.probs_TE, routed.expert_TK, num_groups=routed.num_groups)
        found.append((int(routed.kept_TK.sum()), loss.item(), torch.autograd.grad(loss, router.weight)[0]))
    (few, *tight), (every, *free) = found
    assert few == 2 * 4 and every == 2 * 24 * 2
    assert tight[0] == free[0] and torch.equal(tight[1], free[1])


def test_the_value_does_not_depend_on_micro_batches() -> None:
    """With groups of whole sequences, the mean over micro-batches equals the whole batch, in value and gradient."""
    probs, expert = routing(6, 9, 5, 2)
    whole = balance_loss(probs, expert, num_groups=6)
    for m in (2, 3, 6):
        parts = [balance_loss(p, e, num_groups=6 // m) for p, e in zip(probs.chunk(m), expert.chunk(m), strict=True)]
        mean = torch.stack(parts).mean()
        torch.testing.assert_close(mean, whole)
        torch.testing.assert_close(torch.autograd.grad(mean, probs), torch.autograd.grad(whole, probs, retain_graph=True))


def test_counts_add_up_to_the_choices() -> None:
    _, expert = routing(4, 5, 3, 2)
    counts_GE = count_choices(expert, num_groups=4, num_experts=3)
    assert counts_GE.shape == (4, 3) and counts_GE.sum(1).tolist() == [10] * 4
    assert torch.equal(counts_GE.sum(0), count_choices(expert, num_groups=1, num_experts=3)[0])


def test_z_is_the_mean_squared_log_of_the_partition_function() -> None:
    logits = torch.randn(11, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    want = sum(math.log(sum(math.exp(v) for v in row)) ** 2 for row in logits.tolist()) / 11
    assert z_loss(logits).item() == pytest.approx(want, rel=1e-6)
    assert z_loss(torch.full((3, 4), 10000.0)).item() == pytest.approx((10000 + math.log(4)) ** 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_are_fp32_whatever_comes_in(dtype: torch.dtype) -> None:
    probs, expert = routing(2, 300, 3, 1)
    low = probs.detach().to(dtype)
    balance, z = balance_loss(low, expert, num_groups=2), z_loss(low)
    assert balance.dtype == z.dtype == torch.float32
    assert torch.equal(balance, balance_loss(low.float(), expert, num_groups=2)) and torch.equal(z, z_loss(low.float()))


@given(st.floats(0, 1e4), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_joining_a_loss_is_adding_it(scale: float, seed: int) -> None:
    """`join` does not change x, and every gradient equals that of final loss + scale * joined loss."""
    generator = torch.Generator().manual_seed(seed)
    x, w = torch.randn(5, 3, generator=generator, requires_grad=True), torch.randn(3, 4, generator=generator, requires_grad=True)

    def final(y: Tensor) -> Tensor:
        return y.sin().sum()

    def auxiliary() -> Tensor:
        return (x @ w).exp().mean() + w.square().sum()

    y = x @ w
    joined = join(y, auxiliary(), scale=scale)
    assert torch.equal(joined, y)
    got = torch.autograd.grad(final(joined), (x, w))
    want = torch.autograd.grad(final(x @ w) + scale * auxiliary(), (x, w))
    torch.testing.assert_close(got, want)


def test_joins_of_several_layers_add_up() -> None:
    w = torch.tensor([0.3, -0.7], requires_grad=True)
    x = torch.ones(2, requires_grad=True)
    y = join(join(x * w, w.pow(2).sum(), scale=3.0).exp(), w.pow(3).sum(), scale=0.5)
    got = torch.autograd.grad(y.sum(), w)
    want = torch.autograd.grad((x * w).exp().sum() + 3 * w.pow(2).sum() + 0.5 * w.pow(3).sum(), w)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("scale", [1.0, 0.25, 1024.0])
def test_a_layer_adds_its_weighted_losses_to_the_backward_pass(scale: float) -> None:
    """A layer's gradients are those of its output plus scale * weighted losses. In evaluation, no loss is added."""
    x_BLD = torch.randn(2, 10, 6, generator=torch.Generator().manual_seed(5))
    context = Context.of(x_BLD[..., 0], auxiliary_scale=scale)
    grads = {}
    for name, weights in {"joined": (0.3, 0.07), "none": (0.0, 0.0)}.items():
        layer = MoELayer(
            sections.Experts(num_experts=4),
            sections.Router(balance_weight=weights[0], z_weight=weights[1], capacity_factor=1.0, min_capacity=1),
            d_model=6,
            d_ff=9,
            ffn="gelu",
            layer=0,
        )
        for i, p in enumerate(layer.parameters()):
            p.data.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
        loss = layer(x_BLD, context)[0].square().mean() * scale
        if name == "none":
            routed = layer.router(x_BLD.flatten(0, 1), sequence_tokens=10, context=context)
            loss = loss + scale * (
                0.3 * balance_loss(routed.probs_TE, routed.expert_TK, num_groups=routed.num_groups) + 0.07 * z_loss(routed.logits_TE)
            )
        loss.backward()
        grads[name] = [p.grad / scale for p in layer.parameters() if p.grad is not None]
    torch.testing.assert_close(grads["joined"], grads["none"])

    layer.eval()
    layer.router.spec = layer.router.spec.model_copy(update={"balance_weight": 1e6})
    (quiet,) = torch.autograd.grad(layer(x_BLD, context)[0].square().mean(), layer.router.weight)
    layer.router.spec = layer.router.spec.model_copy(update={"balance_weight": 0.0})
    (same,) = torch.autograd.grad(layer(x_BLD, context)[0].square().mean(), layer.router.weight)
    assert torch.equal(quiet, same)


PADDED = [(3, [4, 0, 7]), (1, [5]), (2, [7, 7])]  # (number of groups of 7 tokens, valid tokens of each group)


def padded(lengths: list[int], k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (logits with gradient, experts, gates, bool validity) of groups of 7 tokens; `lengths`: valid tokens of each group."""
    logits = (torch.randn(7 * len(lengths), 5, generator=torch.Generator().manual_seed(8)) * 2).requires_grad_()
    probs = logits.softmax(-1)
    gate, expert = probs.topk(k)
    valid = torch.cat([torch.arange(7) < n for n in lengths])
    return logits, expert, gate, valid


def gathered(loss: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    return loss.detach(), torch.autograd.grad(loss, logits, retain_graph=True)[0]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("groups", "lengths"), PADDED)
def test_padding_does_not_count_in_losses(groups: int, lengths: list[int], k: int) -> None:
    """Each loss is a mean over groups, weighted by valid tokens, each computed from valid tokens only. Padding gets gradient 0."""
    logits, expert, gate, valid = padded(lengths, k)
    probs, importance = logits.softmax(-1), spread_gates(gate, expert, num_experts=5)
    per_group = [valid & (torch.arange(7 * groups) // 7 == g) for g in range(groups)]
    share = [rows.sum() / valid.sum() for rows in per_group]
    held = [(w, rows) for w, rows in zip(share, per_group, strict=True) if rows.any()]
    pairs = {
        "balance": (
            balance_loss(probs, expert, num_groups=groups, valid_T=valid),
            sum(w * balance_loss(probs[rows], expert[rows]) for w, rows in held),
        ),
        "importance": (
            importance_loss(importance, num_groups=groups, valid_T=valid),
            sum(w * importance_loss(importance[rows]) for w, rows in held),
        ),
        "z": (z_loss(logits, valid_T=valid), z_loss(logits[valid])),
    }
    for got, want in pairs.values():
        assert isinstance(want, Tensor)
        torch.testing.assert_close(gathered(got, logits), gathered(want, logits))
        assert not gathered(got, logits)[1][~valid].any()
    counts = count_choices(expert, num_groups=groups, num_experts=5, valid_T=valid)
    assert counts.sum(1).tolist() == [n * k for n in lengths]


def test_all_padding_gives_zero_and_no_nan() -> None:
    logits, expert, gate, _ = padded([3, 4], 2)
    nothing = torch.zeros(14, dtype=torch.bool)
    importance = spread_gates(gate, expert, num_experts=5)
    for loss in (
        balance_loss(logits.softmax(-1), expert, num_groups=2, valid_T=nothing),
        importance_loss(importance, num_groups=2, valid_T=nothing),
        z_loss(logits, valid_T=nothing),
    ):
        value, grad = gathered(loss, logits)
        assert value == 0 and torch.equal(grad, torch.zeros_like(grad))


def test_importance_is_the_squared_coefficient_of_variation_of_the_summed_gates() -> None:
    """Equals Shazeer et al., eq. 6 and 7. It is 0 for equal sums of gates, and E - 1 if one expert has all gates."""
    _, expert, gate, _ = padded([7, 7], 2)
    sums = [sum(float(gate.detach()[t, j]) for t in range(14) for j in range(2) if expert[t, j] == e) for e in range(5)]
    mean = sum(sums) / 5
    want = sum((s - mean) ** 2 for s in sums) / 5 / mean**2
    assert importance_loss(spread_gates(gate, expert, num_experts=5)).item() == pytest.approx(want, rel=1e-5)
    assert importance_loss(torch.full((6, 4), 0.25)).item() == 0
    assert importance_loss(torch.tensor([[0.0, 2.0, 0.0]]).repeat(5, 1)).item() == pytest.approx(2)


@pytest.mark.parametrize("counted", [1, 2])
@pytest.mark.parametrize("cut", [[0, 14], [0, 3, 14], [0, 5, 6, 14]])
def test_losses_of_micro_batches_add_up_to_the_global_batchs(cut: list[int], counted: int) -> None:
    """Micro-batches' losses with the step's sums, weighted by valid tokens, add up to the global batch's loss and gradient."""
    logits, expert, gate, valid = padded([6, 2], 2)
    probs, importance = logits.softmax(-1), spread_gates(gate, expert, num_experts=5)
    parts = [slice(a, b) for a, b in zip(cut, cut[1:], strict=False)]
    sums: list[Tensor] = []

    def note(mine: Tensor) -> Tensor:
        sums.append(mine)
        return mine

    for rows in parts:
        step_means(expert[rows, :counted], importance[rows], num_experts=5, valid_T=valid[rows], whole=note)
    total = torch.stack(sums).sum(0)
    got = torch.zeros(())
    for rows in parts:
        known = step_means(expert[rows, :counted], importance[rows], num_experts=5, valid_T=valid[rows], whole=lambda _: total)
        balance = balance_loss(probs[rows], expert[rows, :counted], valid_T=valid[rows], step=known)
        got = got + valid[rows].sum() / valid.sum() * (balance + importance_loss(importance[rows], valid_T=valid[rows], step=known))
    want = balance_loss(probs[valid], expert[valid, :counted]) + importance_loss(importance[valid])
    torch.testing.assert_close(gathered(got, logits), gathered(want, logits))


def test_balance_scope_decides_whether_uneven_sequences_count() -> None:
    """Each sequence has an expert of its own: uneven in the scope `sequence`, even in the scopes of a batch."""
    x_BLD = torch.eye(4).unsqueeze(1).repeat(1, 6, 1)
    found = {}
    for scope in ("sequence", "micro_batch", "global_batch"):
        settings_ = sections.Router(balance_scope=scope, capacity_factor=None)
        layer = MoELayer(sections.Experts(num_experts=4), settings_, d_model=4, d_ff=8, ffn="relu", layer=0)
        for p in layer.parameters():
            p.data.normal_(generator=torch.Generator().manual_seed(1))
        layer.router.weight.data.copy_(30 * torch.eye(4))
        found[scope] = layer(x_BLD, Context.of(x_BLD[..., 0]))[1].balance_loss.item()
    assert found == pytest.approx({"sequence": 4, "micro_batch": 1, "global_batch": 1}, rel=1e-4)


def test_balance_counts_unbiased_is_deepseeks_loss() -> None:
    """The balance loss counts the top k of unbiased scores over all experts (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20), although the
    router chooses by biased scores within 2 of 8 groups.
    """
    experts, k = 16, 4
    options = {"preset": "deepseek_v3", "num_choices": k, "expert_groups": 8, "top_groups": 2}
    router = router_of(num_experts=experts, **options)
    assert router.bias_E is not None
    router.bias_E.copy_(torch.linspace(0.4, -0.4, experts))
    routing = route(router, random(2 * L, D))
    scores = routing.logits_TE.sigmoid()
    losses = []
    for first in (0, L):
        sequence = scores[first : first + L].tolist()
        best = [sorted(range(experts), key=lambda e: -row[e])[:k] for row in sequence]
        share = [experts / (k * L) * sum(e in row for row in best) for e in range(experts)]
        mean = [sum(row[e] / sum(row) for row in sequence) / L for e in range(experts)]
        losses.append(sum(f * p for f, p in zip(share, mean, strict=True)))
    assert routing.load_TK is not None and not torch.equal(routing.load_TK.sort(1).values, routing.expert_TK.sort(1).values)
    got = balance_loss(routing.probs_TE, routing.load_TK, num_groups=routing.num_groups)
    assert got.item() == pytest.approx(sum(losses) / 2, rel=1e-5)
