"""The kernels `grouped_mm` equal the reference in values and all gradients. On a CPU, torch's grouped product runs expert by expert."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe.kernels import choose, cpu, grouped_mm, reference
from moe.kernels.network import ByProduct, Network
from moe.kernels.products import PRODUCTS
from moe.kernels.rows import Plan
from moe.plan.job.of_recipe import network_of as network_of_recipe
from moe.recipe import sections
from moe.recipe.load import load
from parallel.errors import BadInput
from parallel.numerics.weight_gradient import defer_gradients
from tests.support.networks import network_of

T, E, K, D, F = 22, 5, 2, 24, 40


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).float()


def planned(kind: str) -> Plan:
    scores_TE = random(T, E, seed=3)
    scores_TE[:, {"first and last empty": [0, 4], "one has all": [0, 1, 2, 4]}.get(kind, [])] -= 100
    kept_TK = torch.arange(T * K).view(T, K) % 3 > 0
    kept_TK &= kind != "nothing kept"
    if kind == "one has all":
        kept_TK[:, 1] = False
    plan = cpu.plan(scores_TE.topk(K).indices, kept_TK, num_experts=E)
    return replace(plan, choice_R=torch.cat((plan.choice_R, torch.zeros(3, dtype=torch.int64)))) if kind == "further rows" else plan


def matrices(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [(random(E, i, o, seed=i + o) * i**-0.5).to(dtype) for i, o in ((D, F), (F, D), (D, F))]


def results(kernels: ModuleType, plan: Plan, inputs: list[Tensor], *, fused: bool, dropped_RF: Tensor | None = None) -> list[Tensor]:
    """Return the output, and the gradients of x, gates, three matrices and two biases."""
    x, gate, w1, w2, w3, b1, b3 = leaves = [t.clone().requires_grad_() for t in inputs]
    network = network_of("swiglu", w1, w2, w3, b1=b1, b3=b3, swiglu=sections.Swiglu(alpha=1.7, limit=0.8, offset=0.5))
    if fused:
        out = kernels.routed_ffn(x, gate, plan, network, dropped_RF=dropped_RF)
    else:
        rows = kernels.grouped_ffn(kernels.permute(x, plan), network, counts=plan.counts_E.tolist(), dropped_RF=dropped_RF)
        out = kernels.combine(rows, gate, plan)
    out.backward(random(*out.shape, seed=7).to(out.dtype))
    assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", ["even", "first and last empty", "one has all", "nothing kept", "further rows"])
def test_values_and_gradients_equal_the_reference(kind: str, fused: bool) -> None:
    plan = planned(kind)
    dropped_RF = (random(len(plan.choice_R), F, seed=5) > 0).float() * 2
    inputs = [random(T, D), random(T, K, seed=6), *matrices(), random(E, F, seed=8), random(E, F, seed=9)]
    found = [results(kernels, plan, inputs, fused=fused, dropped_RF=dropped_RF) for kernels in (reference, grouped_mm)]
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6 * max(1.0, want.abs().max().item()))


BY_PRODUCT = ByProduct(cpu, lambda _, *operands: PRODUCTS["plain"].product(*operands))


@pytest.mark.parametrize("kernels", [grouped_mm, cpu, BY_PRODUCT], ids=["grouped_mm", "cpu", "by product"])
def test_rows_beyond_all_counts_change_nothing(kernels: ModuleType | ByProduct) -> None:
    found = []
    for further in (0, 3):
        rows, w1, w2, w3, b1, b3 = leaves = [t.requires_grad_() for t in (random(9, D), *matrices(), random(E, F), random(E, F, seed=1))]
        given = torch.cat((rows, torch.full((further, D), torch.inf)))
        out = kernels.grouped_ffn(given, network_of("swiglu", w1, w2, w3, b1=b1, b3=b3), counts=torch.tensor([4, 0, 2, 3, 0]))
        assert len(out) == 9 + further
        found.append([out[:9].detach(), *torch.autograd.grad(out[:9].square().sum(), leaves)])
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_bf16_rows_with_fp32_weights_round_no_more_than_the_reference_does() -> None:
    plan, inputs = planned("even"), [random(T, D), random(T, K, seed=6), *matrices(), random(E, F, seed=8), random(E, F, seed=9)]
    half, exact = [inputs[0].bfloat16(), *inputs[1:]], results(reference, plan, inputs, fused=True)
    twin, ours = (
        [(got.float() - want).norm() for want, got in zip(exact, results(kernels, plan, half, fused=True), strict=True)]
        for kernels in (reference, grouped_mm)
    )
    assert all(0 < error <= 1.25 * other for error, other in zip(ours, twin, strict=True))


def test_weight_gradients_are_deferred_and_experts_without_rows_get_zeros() -> None:
    plan, found = planned("first and last empty"), []
    for deferred in (False, True):
        weights = [w.requires_grad_() for w in matrices()]
        loss = grouped_mm.routed_ffn(random(T, D), random(T, K, seed=6), plan, network_of("swiglu", *weights)).square().sum()
        if deferred:
            with defer_gradients() as pending:
                loss.backward()
            assert all(w.grad is None for w in weights)
            pending.compute()
        else:
            loss.backward()
        found.append([w.grad for w in weights])
        assert all(w.grad is not None and not w.grad[[0, 4]].any() and w.grad[1].any() for w in weights)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "width", "hidden", "words"),
    [
        (torch.bfloat16, 24, 44, "grouped_mm for d_ff 44, needed a multiple of 8 in torch.bfloat16, such as 40 or 48; fix: set it to auto"),
        (torch.float32, 3, 44, "grouped_mm for d_model 3, needed a multiple of 4 in torch.float32, such as 4; fix: set it to auto"),
        (torch.float64, 24, 44, "grouped_mm for torch.float64, needed float32, bfloat16 or float16; fix: set it to one of"),
    ],
)
def test_what_torch_does_not_multiply_is_refused_with_the_nearest_sizes(dtype: torch.dtype, width: int, hidden: int, words: str) -> None:
    network: Network = network_of("relu", torch.zeros(1, width, hidden), torch.zeros(1, hidden, width))
    with pytest.raises(BadInput, match=words):
        choose("grouped_mm").grouped_ffn(torch.zeros(3, width, dtype=dtype), network, counts=[3])


def test_the_planner_counts_the_tensors_that_it_keeps() -> None:
    fused, apart = (network_of_recipe(load("switch_tiny", {"experts.kernels": kernels})[0]).experts for kernels in ("auto", "grouped_mm"))
    assert fused is not None and apart is not None and (fused.fused, apart.fused) == (True, False)
