"""The cpu kernels equal the reference: values and every gradient, for several routings. Memory grows with the number of routed rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe.experts.layer import MoELayer
from moe.kernels import choose, cpu, reference
from moe.kernels.activation import activate
from moe.kernels.rows import Plan
from moe.nn.context import Context
from moe.recipe import sections
from parallel.errors import BadInput
from tests.support.networks import network_of

# T tokens, K choices, R rows, E experts, D model, F hidden
T, E, D, F = 22, 5, 7, 11


@dataclass(frozen=True)
class Case:
    """A routing of T tokens: experts [T, K], and bool [T, K], True for the choices that have a slot."""

    expert_TK: Tensor
    kept_TK: Tensor

    def plan(self, kernels: ModuleType = cpu) -> Plan:
        return kernels.plan(self.expert_TK, self.kept_TK, num_experts=E)  # type: ignore[no-any-return]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def case(kind: str, k: int) -> Case:
    scores_TE = random(T, E, seed=len(kind))
    if kind == "one takes all":
        scores_TE[:, 3] += 100
    if kind == "empty experts":
        scores_TE[:, [0, 4]] -= 100
    expert_TK = scores_TE.topk(k).indices
    share = {"drops": 0.4, "nothing kept": 2.0}.get(kind, -1.0)
    return Case(expert_TK, torch.rand(T, k, generator=torch.Generator().manual_seed(9)) > share)


KINDS = ["even", "drops", "one takes all", "empty experts", "nothing kept"]
CASES = pytest.mark.parametrize("c", [pytest.param(case(kind, k), id=f"{kind}, k={k}") for kind in KINDS for k in (1, 2)])


def both(function: Callable[[ModuleType, list[Tensor]], Tensor], *inputs: Tensor, tolerance: float = 1e-6) -> None:
    """Assert that `function(kernels, inputs)` has the same value and gradients of all inputs with cpu and with reference."""
    found = []
    for kernels in (reference, cpu):
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = function(kernels, leaves)
        out.backward(random(*out.shape, seed=77, dtype=out.dtype))
        found.append([out.detach(), *(t.grad for t in leaves)])
    for want, got in zip(*found, strict=True):
        assert want is not None and got is not None and got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, want.abs().max().item() if want.numel() else 0.0))


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 12), st.integers(1, 6), st.integers(1, 3), st.floats(0, 1), st.floats(0, 4))
@settings(max_examples=60, deadline=None)
def test_drops_and_plans_are_the_references(
    seed: int, groups: int, each: int, num_experts: int, k: int, active: float, skew: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(groups * each, num_experts, generator=generator) - skew * torch.arange(num_experts) / num_experts
    expert_TK = scores.topk(min(k, num_experts)).indices
    active_TK = torch.rand(expert_TK.shape, generator=generator) <= active
    sizes = {"num_groups": groups, "num_experts": num_experts, "slots_each": 3}
    kept_TK, want_TK = (m.kept(expert_TK, active_TK, **sizes) for m in (cpu, reference))
    assert torch.equal(kept_TK, want_TK)
    every_TK = torch.ones_like(active_TK)
    assert all(torch.equal(cpu.kept(expert_TK, mask, **sizes), reference.kept(expert_TK, every_TK, **sizes)) for mask in (None, every_TK))
    got, want = (m.plan(expert_TK, kept_TK, num_experts=num_experts) for m in (cpu, reference))
    assert torch.equal(got.choice_R, want.choice_R) and got.choice_R.dtype == torch.int64
    assert torch.equal(got.row_TK, want.row_TK) and torch.equal(got.counts_E, want.counts_E)


@CASES
def test_a_plan_is_a_bijection_of_kept_choices_sorted_by_expert(c: Case) -> None:
    plan = c.plan()
    assert plan.counts_E.sum() == c.kept_TK.sum() == len(plan.choice_R)
    assert torch.equal(plan.row_TK >= 0, c.kept_TK)
    assert torch.equal(plan.row_TK.flatten()[plan.choice_R], torch.arange(len(plan.choice_R)))
    expert_R = c.expert_TK.flatten()[plan.choice_R]
    assert torch.equal(expert_R, torch.arange(E).repeat_interleave(plan.counts_E))


@CASES
def test_permute_equals_the_reference(c: Case) -> None:
    both(lambda kernels, t: kernels.permute(t[0], c.plan()), random(T, D))


@CASES
def test_combine_equals_the_reference(c: Case) -> None:
    rows = int(c.kept_TK.sum())
    both(lambda kernels, t: kernels.combine(t[0], t[1], c.plan()), random(rows, D), random(*c.expert_TK.shape, seed=1))
    both(lambda kernels, t: kernels.combine(t[0], None, c.plan()), random(rows, D))


@CASES
def test_combine_gives_exactly_zero_where_every_choice_was_dropped(c: Case) -> None:
    y_TD = cpu.combine(random(int(c.kept_TK.sum()), D), random(*c.expert_TK.shape, seed=1), c.plan())
    assert torch.equal((y_TD != 0).any(1), c.kept_TK.any(1))


@pytest.mark.parametrize("rows", [0, 1, 13])
def test_reorder_equals_the_reference_and_its_inverse_undoes_it(rows: int) -> None:
    order_R = torch.randperm(rows, generator=torch.Generator().manual_seed(4))
    both(lambda kernels, t: kernels.reorder(t[0], order_R), random(rows, D))
    x = random(rows, D)
    assert torch.equal(cpu.reorder(cpu.reorder(x, order_R), torch.argsort(order_R)), x)


@CASES
@pytest.mark.parametrize("ffn", ["relu", "gelu", "geglu", "swiglu"])
def test_grouped_ffn_equals_the_reference(c: Case, ffn: str) -> None:
    counts = c.plan().counts_E.tolist()
    weights = [random(E, D, F, seed=1), random(E, F, D, seed=2)] + ([random(E, D, F, seed=3)] if "glu" in ffn else [])
    dropped_RF = (random(sum(counts), F, seed=5) > 0).float() * 2

    def run(kernels: ModuleType, t: list[Tensor]) -> Tensor:
        return kernels.grouped_ffn(t[0], network_of(ffn, *t[1:]), counts=counts)  # type: ignore[no-any-return]

    def run_with_dropout(kernels: ModuleType, t: list[Tensor]) -> Tensor:
        return kernels.grouped_ffn(t[0], network_of(ffn, *t[1:]), counts=counts, dropped_RF=dropped_RF)  # type: ignore[no-any-return]

    for function in (run, run_with_dropout):
        both(function, random(sum(counts), D), *weights, tolerance=3e-6)


@pytest.mark.parametrize("kernels", [cpu, reference], ids=["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[0, 9, 0, 70, 0], [0, 0, 0, 0, 0]])
def test_an_expert_without_rows_has_a_gradient_of_zero(kernels: ModuleType, dtype: torch.dtype, counts: list[int]) -> None:
    """The gradient is zero, not None: ranks that all-reduce gradients wait for every parameter's."""
    rows = random(sum(counts), D, dtype=dtype).requires_grad_()
    weights = [random(*shape, seed=i).requires_grad_() for i, shape in enumerate([(E, D, F), (E, F, D), (E, D, F)])]
    kernels.grouped_ffn(rows, network_of("swiglu", *weights), counts=counts).sum().backward()
    for weight in weights:
        assert weight.grad is not None and weight.grad.shape == weight.shape and weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad.flatten(1).ne(0).any(1), torch.tensor(counts) > 0)


def test_gradients_pass_gradcheck() -> None:
    """gradcheck of permute, reorder and grouped_ffn in float64. combine sums in fp32, so it is compared with the reference instead."""
    c = case("drops", 2)
    plan = c.plan()
    counts, rows = plan.counts_E.tolist(), int(plan.counts_E.sum())
    wide: dict[str, Any] = {"dtype": torch.float64}
    x, r = random(T, 3, **wide).requires_grad_(), random(rows, 3, seed=1, **wide).requires_grad_()
    w1, w2, w3 = (random(*s, seed=i, **wide).requires_grad_() for i, s in enumerate([(E, 3, 4), (E, 4, 3), (E, 3, 4)]))
    assert torch.autograd.gradcheck(lambda t: cpu.permute(t, plan), x)
    assert torch.autograd.gradcheck(lambda t: cpu.reorder(t, torch.arange(rows).flip(0)), r)
    assert torch.autograd.gradcheck(lambda a, *w: cpu.grouped_ffn(a, network_of("gelu", *w), counts=counts), (r, w1, w2))
    assert torch.autograd.gradcheck(lambda a, *w: cpu.grouped_ffn(a, network_of("swiglu", *w), counts=counts), (r, w1, w2, w3))


def test_float64_stays_float64() -> None:
    """grouped_ffn in float64 equals the reference to 1e-13, so nothing inside is computed in fp32."""
    inputs = [random(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate([(265, D), (2, D, F), (2, F, D)])]
    both(lambda kernels, t: kernels.grouped_ffn(t[0], network_of("gelu", *t[1:]), counts=[65, 200]), *inputs, tolerance=1e-13)


def test_an_expanded_gradient_of_stride_0_is_accepted() -> None:
    """The gradient of sum() is one number expanded with stride 0, which torch.mm with `out=` does not accept."""
    plan = case("even", 1).plan()
    x = random(T, D).requires_grad_()
    gate = torch.ones(T, 1, requires_grad=True)
    w1, w2 = random(E, D, F, seed=1).requires_grad_(), random(E, F, D, seed=2).requires_grad_()
    rows = cpu.grouped_ffn(cpu.permute(x, plan), network_of("relu", w1, w2), counts=plan.counts_E.tolist())
    rows.sum().backward(retain_graph=True)
    rows_only = x.grad
    x.grad = None
    cpu.combine(rows, gate, plan).sum().backward()
    assert rows_only is not None and x.grad is not None
    torch.testing.assert_close(x.grad, rows_only)


@pytest.mark.parametrize("counts", [[1], [63], [64], [65], [200], [1, 0, 63, 64, 65, 200]], ids=str)
def test_bf16_rows_of_any_number_equal_fp32_within_bf16_rounding(counts: list[int]) -> None:
    """16-bit products are computed in blocks of 32 rows or multiples: values and gradients do not depend on the number of rows."""
    d, f = 24, 40
    rows, out_grad = random(sum(counts), d, dtype=torch.bfloat16), random(sum(counts), d, seed=8, dtype=torch.bfloat16)
    weights = [random(len(counts), d, f, seed=1, dtype=torch.bfloat16), random(len(counts), f, d, seed=2, dtype=torch.bfloat16)]
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x = rows.to(dtype).requires_grad_()
        w1, w2 = (w.float().requires_grad_() for w in weights)  # master weights: fp32, cast where they are used
        y = cpu.grouped_ffn(x, network_of("gelu", w1, w2), counts=counts)
        y.backward(out_grad.to(dtype))
        found.append([y, x.grad, w1.grad, w2.grad])
    assert [t.dtype for t in found[1] if t is not None] == [torch.bfloat16] * 2 + [torch.float32] * 2
    for want, got in zip(*found, strict=True):
        assert want is not None and got is not None
        error = (got.float() - want).norm() / want.norm()
        assert error < 2.0**-8  # the 2-norm averages over several roundings of at most 2^-9 each
        assert (got.float() - want).abs().max() < 2.0**-6 * want.abs().max()


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_bf16_row_does_not_depend_on_the_other_rows(count: int) -> None:
    """A row's result is the same, within rounding, alone and among 0 to 199 other rows."""
    rows = random(count, 24, dtype=torch.bfloat16)
    experts = network_of("relu", random(1, 24, 40, seed=1), random(1, 40, 24, seed=2))
    whole, plain = (kernels.grouped_ffn(rows, experts, counts=[count]) for kernels in (cpu, reference))
    torch.testing.assert_close(whole.float(), plain.float(), rtol=2.0**-7, atol=2.0**-7 * plain.abs().max().item())
    for first in {0, count // 2, count - 1}:
        one = cpu.grouped_ffn(rows[first : first + 1], experts, counts=[1])
        torch.testing.assert_close(one.float(), whole[first : first + 1].float(), rtol=2.0**-7, atol=2.0**-7 * plain.abs().max().item())


@pytest.mark.parametrize("kernels", [reference, cpu], ids=["reference", "cpu"])
def test_bf16_gradients_of_a_tokens_rows_are_added_in_fp32(kernels: ModuleType) -> None:
    """The sum 1 + 4 * 2^-8 is exact. A sum in bf16 would round away each of the four small terms."""
    experts = torch.arange(E).expand(3, E)
    plan = kernels.plan(experts, torch.ones_like(experts, dtype=torch.bool), num_experts=E)
    x = random(3, D, dtype=torch.bfloat16).requires_grad_()
    small = torch.where(plan.choice_R % E == 0, 1.0, 2.0**-8).unsqueeze(1).expand(-1, D).to(torch.bfloat16)
    kernels.permute(x, plan).backward(small)  # type: ignore[no-untyped-call]
    assert x.grad is not None and torch.equal(x.grad, torch.full_like(x, 1 + 2.0**-6))


def test_bf16_combine_weighs_and_sums_in_fp32() -> None:
    """256 (1 + 2^-9) + 1 = 257.5, which bf16 rounds to 258. With gate, product or sum in bf16, the result would be 256."""
    plan = cpu.plan(torch.tensor([[0, 1]]), torch.ones(1, 2, dtype=torch.bool), num_experts=2)
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16)
    for kernels in (cpu, reference):
        y = kernels.combine(rows, torch.tensor([[1.0 + 2.0**-9, 1.0]]), plan)
        assert y.dtype == torch.bfloat16 and y.item() == 258.0


class Largest(TorchDispatchMode):
    """Records the largest number of elements of a tensor that an operation returns, and that operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() > self.numel:
                self.numel, self.operation = tensor.numel(), str(func)
        return out


@pytest.mark.parametrize("preset", ["switch", "gshard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_grows_with_routed_rows(preset: str, dtype: torch.dtype) -> None:
    """No tensor has tokens * experts * capacity or tokens * experts * width elements, for 512 tokens and 64 experts."""
    b, length, num_experts, d, f = 4, 128, 64, 12, 20
    router = sections.Router(preset=preset, capacity_factor=2.0, min_capacity=8, jitter=0.1, z_weight=0.1, group=2)
    layer = MoELayer(sections.Experts(num_experts=num_experts), router, d_model=d, d_ff=f, ffn="geglu", layer=0)
    for i, p in enumerate(layer.parameters()):
        p.data.copy_(random(*p.shape, seed=i))
    x = random(b, length, d, dtype=dtype).requires_grad_()
    with Largest() as largest:
        y, report = layer(x, Context.of(x[..., 0]))
        y.float().square().sum().backward()
    tokens, k = b * length, router.num_choices
    assert report.dropped > 0 and report.kept > tokens / 2
    rows = tokens * k + 32 * num_experts  # in 16 bits, each expert is padded to at least 32 rows
    allowed = max(rows * max(d, f), num_experts * d * f, tokens * num_experts)
    assert allowed < tokens * num_experts * d / 4
    assert largest.numel <= allowed, f"{largest.operation} made {largest.numel} elements"


def test_a_dropped_row_costs_nothing() -> None:
    c = case("drops", 2)
    assert len(cpu.permute(random(T, D), c.plan())) == int(c.kept_TK.sum()) < T * 2


def test_kernels_are_chosen_by_name() -> None:
    assert choose("cpu") is cpu and choose("reference") is reference and choose() is choose("auto")
    with pytest.raises(BadInput, match="experts.kernels"):
        choose("fastest")


def test_gelu_is_the_tanh_form_of_t5() -> None:
    x = torch.linspace(-4, 4, 33)
    want = 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    torch.testing.assert_close(activate(x, None, "gelu"), want)
    torch.testing.assert_close(activate(x, x + 1, "geglu"), want * (x + 1))
    torch.testing.assert_close(activate(x, x + 1, "swiglu"), x * torch.sigmoid(x) * (x + 1))
    assert torch.equal(activate(x, None, "relu"), x.clamp(min=0))
