"""The experts' networks in blocks (moe/kernels/grouped.py): how experts are cut into blocks, and equality with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.kernels import cpu, grouped, reference
from moe.kernels.activation import GATED, activate, activate_backward
from moe.kernels.rows import Plan
from moe.recipe.sections import Swiglu
from tests.support.networks import network_of

# T tokens, K choices, R rows, E experts, D model, F hidden
D, F = 6, 10
COUNTS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 70), st.just(0)), min_size=1, max_size=9)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(COUNTS, st.sampled_from([torch.float32, torch.bfloat16]), st.integers(1, 400))
@settings(max_examples=200, deadline=None)
def test_blocks_hold_every_row_once_and_little_padding(counts: list[int], dtype: torch.dtype, most: int) -> None:
    """Each expert with rows is in one block, in order. Padding is at most a quarter of the rows or, in bf16, half of them plus 64 rows per
    expert.
    """
    found = grouped.blocks(counts, row_bytes=grouped._BLOCK_BYTES // most, dtype=dtype, device=torch.device("cpu"))
    covered = [e for b in found for e in range(b.first, b.last)]
    assert covered == sorted(set(covered)) and {e for e, n in enumerate(counts) if n} <= set(covered)
    begin = start = 0
    for b in found:
        rows = sum(counts[b.first : b.last])
        assert (b.begin, b.end, b.start) == (begin, begin + rows, start) and b.each >= max(counts[b.first : b.last])
        begin, start = b.end, start + b.size
        half = dtype == torch.bfloat16
        assert b.padding <= (max(0.5 * rows + 64 * (b.last - b.first), 0) if half else 0.25 * rows)
        assert not half or b.each % 32 == 0
    assert begin == sum(counts)


def routed(kernels: object, plan: Plan, inputs: list[Tensor], ffn: str, mask: Tensor | None) -> list[Tensor]:
    """Return routed_ffn's output, and the gradients of tokens, gates and weights that have one."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    x, gate, w1, w2, *w3 = leaves
    out = kernels.routed_ffn(x, gate, plan, network_of(ffn, w1, w2, *w3), dropped_RF=mask)  # type: ignore[attr-defined]
    out.backward(random(*out.shape, seed=9, dtype=out.dtype))
    return [out.detach(), *(t.grad for t in leaves if t.grad is not None)]


def close(got: list[Tensor], want: list[Tensor], bound: float) -> None:
    """Assert that the relative errors in the 2-norm are below the bound. Norms below 1 count as 1, because large terms may cancel."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and torch.isfinite(a).all()
        difference = (a.double() - b.double()).norm().item() if a.numel() else 0.0
        assert difference <= bound * max(b.double().norm().item(), 1.0), (difference, b.norm())


@given(
    st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 7), st.integers(1, 7), st.sampled_from(["relu", "gelu", "geglu", "swiglu"]),
    st.sampled_from(["even", "one expert", "few"]), st.sampled_from([0.0, 0.5, 1.0]), st.booleans(), st.sampled_from([40, 400, 10**7]),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_any_routing_equals_the_reference(
    seed: int, tokens: int, num_experts: int, k: int, ffn: str, load: str, dropped: float, dropout: bool, block_bytes: int
) -> None:
    """routed_ffn equals the reference for experts without rows, one expert with all rows, k = E, one token and small blocks.

    In float64: in fp32, a sum of terms that cancel would have no bounded relative error.
    """
    k = min(k, num_experts)
    scores = random(tokens, num_experts, seed=seed)
    scores[:, 0] += {"even": 0.0, "one expert": 100.0, "few": 2.0}[load]
    expert_TK = cpu.top_k(scores, k)
    kept_TK = torch.rand(expert_TK.shape, generator=torch.Generator().manual_seed(seed)) >= dropped
    plan = cpu.plan(expert_TK, kept_TK, num_experts=num_experts)
    shapes = [(tokens, D), (tokens, k), (num_experts, D, F), (num_experts, F, D), *([(num_experts, D, F)] if ffn in GATED else [])]
    inputs = [random(*shape, seed=seed + i).double() for i, shape in enumerate(shapes)]
    mask = (random(len(plan.choice_R), F, seed=seed) > 0).double() * 2 if dropout else None
    before = grouped._BLOCK_BYTES
    try:
        grouped._BLOCK_BYTES = block_bytes
        expected = routed(reference, plan, inputs, ffn, mask)
        close(routed(cpu, plan, inputs, ffn, mask), expected, 1e-13)
        with torch.no_grad():  # without gradients, few rows are one block
            x_TD, gate_TK, w1, w2, *w3 = inputs
            found = cpu.routed_ffn(x_TD, gate_TK, plan, network_of(ffn, w1, w2, *w3), dropped_RF=mask)
        close([found], expected[:1], 1e-13)
    finally:
        grouped._BLOCK_BYTES = before


@pytest.mark.parametrize("ffn", ["relu", "gelu", "geglu", "swiglu"])
@pytest.mark.parametrize("master", [torch.bfloat16, torch.float32])
def test_bf16_is_as_near_to_fp32_as_the_reference_in_bf16_is(ffn: str, master: torch.dtype) -> None:
    """In bf16, output and gradients are at most 1.5 times as far from the fp32 results as those of the reference."""
    tokens, num_experts, k = 90, 5, 2
    expert_TK = cpu.top_k(random(tokens, num_experts) + torch.tensor([2.0, 0, 0, 0, -9]), k)
    plan = cpu.plan(expert_TK, random(tokens, k, seed=5) > -1, num_experts=num_experts)
    shapes = [(tokens, D), (tokens, k), (num_experts, D, F), (num_experts, F, D), *([(num_experts, D, F)] if ffn in GATED else [])]
    rounded = [random(*shape, seed=i, dtype=torch.bfloat16).float() for i, shape in enumerate(shapes)]
    exact = routed(reference, plan, rounded, ffn, None)
    dtypes = [torch.bfloat16, torch.float32, *[master] * (len(shapes) - 2)]
    halves = [t.to(dtype) for t, dtype in zip(rounded, dtypes, strict=True)]
    for fast, plain, true in zip(routed(cpu, plan, halves, ffn, None), routed(reference, plan, halves, ffn, None), exact, strict=True):
        assert fast.dtype == plain.dtype
        far, near = (fast.float() - true).norm(), (plain.float() - true).norm()
        assert far <= 1.5 * near + 1e-6 * true.norm()


BOUNDED = Swiglu(alpha=1.7, limit=0.8, offset=0.5)


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 3), st.sampled_from([0.0, 0.4, 1.0]), st.sampled_from([40, 10**7]))
@settings(max_examples=20, deadline=None)
def test_biases_and_bounds_equal_plain_networks(seed: int, tokens: int, k: int, dropped: float, block_bytes: int) -> None:
    """relu and bounded swiglu with biases equal a loop over tokens and choices, in float64. Biases make padding rows nonzero."""
    num_experts, plan = 4, None
    expert_TK = cpu.top_k(random(tokens, num_experts, seed=seed), k)
    kept_TK = torch.rand(expert_TK.shape, generator=torch.Generator().manual_seed(seed)) >= dropped
    plan = cpu.plan(expert_TK, kept_TK, num_experts=num_experts)
    shapes = [(tokens, D), (tokens, k), (4, D, F), (4, F, D), (4, F), (4, D, F), (4, F)]
    before, grouped._BLOCK_BYTES = grouped._BLOCK_BYTES, block_bytes
    try:
        for ffn, count in (("relu", 5), ("swiglu", 7)):
            inputs = [random(*shape, seed=seed + i).double() for i, shape in enumerate(shapes[:count])]
            found = []
            for plainly in (True, False):
                x, gate, w1, w2, b1, *gated = leaves = [t.clone().requires_grad_() for t in inputs]
                w3, b3 = gated if gated else (None, None)
                if plainly:
                    out = torch.stack([_plain_token(t, x, gate, w1, w2, b1, w3, b3, expert_TK, kept_TK) for t in range(tokens)])
                else:
                    out = cpu.routed_ffn(x, gate, plan, network_of(ffn, w1, w2, w3, b1=b1, b3=b3, swiglu=BOUNDED))
                out.backward(random(tokens, D, seed=9).double())
                found.append([out.detach(), *(torch.zeros_like(t) if t.grad is None else t.grad for t in leaves)])
            close(found[1], found[0], 1e-13)
    finally:
        grouped._BLOCK_BYTES = before


def _plain_token(t, x, gate, w1, w2, b1, w3, b3, expert_TK, kept_TK):  # type: ignore[no-untyped-def]
    y = x[t] * 0
    for k in range(expert_TK.shape[1]):
        if kept_TK[t, k]:
            e = expert_TK[t, k]
            h = x[t] @ w1[e] + b1[e]
            if w3 is None:
                h = h.clamp(min=0)
            else:
                h, g = h.clamp(max=BOUNDED.limit), (x[t] @ w3[e] + b3[e]).clamp(-BOUNDED.bound, BOUNDED.bound)
                h = h / (1 + (-BOUNDED.alpha * h).exp()) * (g + BOUNDED.offset)
            y = y + gate[t, k] * (h @ w2[e])
    return y


@pytest.mark.parametrize("ffn", ["relu", "gelu", "geglu", "swiglu"])
def test_activate_backward_equals_autograd(ffn: str) -> None:
    hidden, gate = random(7, F).requires_grad_(), random(7, F, seed=1).requires_grad_()
    grad = random(7, F, seed=2)
    inputs = [hidden, gate] if ffn in GATED else [hidden]
    want = torch.autograd.grad(activate(hidden, gate if ffn in GATED else None, ffn), inputs, grad)
    got = activate_backward(grad.clone(), hidden.detach(), gate.detach() if ffn in GATED else None, ffn)
    torch.testing.assert_close(got[0], want[0])
    assert (got[1] is None) == (ffn not in GATED)
    if got[1] is not None:
        torch.testing.assert_close(got[1], want[1])


def test_only_tokens_and_pre_activations_are_saved() -> None:
    """For the backward pass, routed_ffn saves the tokens [T, D] and two pre-activations [R, F], but no rows [R, D]."""
    tokens, num_experts, k = 64, 4, 2
    plan = cpu.plan(
        torch.arange(tokens * k).view(tokens, k) % num_experts, torch.ones(tokens, k, dtype=torch.bool), num_experts=num_experts
    )
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
        x = random(tokens, D).requires_grad_()
        weights = [random(num_experts, D, F).requires_grad_(), random(num_experts, F, D).requires_grad_(), random(num_experts, D, F)]
        cpu.routed_ffn(x, random(tokens, k).requires_grad_(), plan, network_of("swiglu", *weights))
    rows = [shape for shape in saved if shape[0] == tokens * k and len(shape) == 2]
    assert rows == [(tokens * k, F)] * 2 and (tokens, D) in saved and (tokens * k, D) not in saved


def test_a_backward_pass_can_be_run_again() -> None:
    plan = cpu.plan(torch.arange(12).view(12, 1) % 3, torch.ones(12, 1, dtype=torch.bool), num_experts=3)
    leaves = [
        random(12, D).requires_grad_(),
        random(12, 1).requires_grad_(),
        random(3, D, F).requires_grad_(),
        random(3, F, D).requires_grad_(),
    ]
    out = cpu.routed_ffn(leaves[0], leaves[1], plan, network_of("relu", *leaves[2:])).sum()
    first, second = torch.autograd.grad(out, leaves, retain_graph=True), torch.autograd.grad(out, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_padding_rows_do_not_overflow() -> None:
    """Token 0 overflows in all experts but its own. All results stay finite, so no padding row copies token 0 into another expert."""
    tokens, num_experts = 40, 4
    expert_TK = torch.tensor([[0]] + [[1 + t % 3] for t in range(tokens - 1)])
    plan = cpu.plan(expert_TK, torch.ones(tokens, 1, dtype=torch.bool), num_experts=num_experts)
    x = random(tokens, D, dtype=torch.float16)
    x[0] = 100.0
    w1 = torch.full((num_experts, D, F), 300.0, dtype=torch.float16)
    w1[0] = 1e-3
    inputs = [x, random(tokens, 1), w1, random(num_experts, F, D, dtype=torch.float16) * 1e-4]
    inputs[0][1:] *= 1e-3
    assert not torch.isfinite(x[0] @ w1[1]).all()
    assert all(torch.isfinite(t).all() for t in routed(cpu, plan, inputs, "relu", None))


def test_without_gradients_hidden_rows_are_freed_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, hidden rows [R, F] exist for one block at a time."""
    monkeypatch.setattr(grouped, "_BLOCK_BYTES", 1)
    tokens, num_experts = 64, 8
    plan = cpu.plan((torch.arange(tokens) % num_experts).unsqueeze(1), torch.ones(tokens, 1, dtype=torch.bool), num_experts=num_experts)
    weights = [random(num_experts, D, F).requires_grad_(), random(num_experts, F, D).requires_grad_()]
    made: list[tuple[int, ...]] = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            made.append(tuple(out.shape) if isinstance(out, Tensor) else ())
            return out

    with torch.no_grad(), Shapes():
        cpu.routed_ffn(random(tokens, D), random(tokens, 1), plan, network_of("gelu", *weights))
    assert (tokens // num_experts, F) in made and (tokens, F) not in made
