"""A new way to compute experts' matrix products (such as 8-bit operands) is one `Products` object and one line in the catalog. A made-up
one then works in kernels, K-FAC, checks, planner, model, layouts and verify.

Only the plain twin of `moe verify` gets its own function, since it shares no code with the kernels.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.experts.experts import Experts, Routed
from moe.kernels import choose
from moe.kernels.products import PRODUCTS, Products
from moe.parallelize.curvature import Seen
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster
from moe.plan.memory.kept import cast_weights, casts_kept, layer_kept, recompute_of
from moe.plan.memory.memory import peak
from moe.plan.memory.stack import OURS, OURS_ON_CPU
from moe.plan.time.cost import step_time
from moe.recipe.load import load
from moe.recipe.sections import Run
from moe.verify import layouts
from moe.verify.cases import Case
from moe.verify.expected import Expected, alone, twin_of
from moe.verify.plain import layer as plain_layer
from moe.verify.verify import judged
from parallel.errors import BadInput
from tests.laws.test_architecture import check, python_files, tree, where
from tests.moe.plan.job.test_activations import kept_by_blocks, planned, run_of

# --- the made-up products ---------------------------------------------------------------------------------------------

PLAIN = PRODUCTS["plain"]


def rounded(values: Tensor) -> Tensor:
    """Return the values rounded to 8 bits, with one scale for each row (along the last dim)."""
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (values / scale).round() * scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows_RI, weight_EIO)
        ctx.counts = counts
        return PLAIN.product(rounded(rows_RI), rounded(weight_EIO.mT).mT, counts)

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RI, weight_EIO = ctx.saved_tensors
        pairs = zip(rows_RI.split(ctx.counts), grad_RO.split(ctx.counts), strict=True)
        grad_EIO = torch.stack([rows.t() @ grad for rows, grad in pairs]).to(weight_EIO.dtype)
        return PLAIN.product(rounded(grad_RO), rounded(weight_EIO).mT, ctx.counts), grad_EIO, None


class EightBits(Products):
    """8-bit operands in the forward pass and for gradients of rows; full precision for gradients of weights."""

    name = "eight_bits"
    kind = "fp8"
    whole_rows = "a scale is for a whole row"

    def product(self, rows_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
        out: Tensor = _Product.apply(rows_RI, weight_EIO, counts)
        return out


# --- the twin's products of one expert --------------------------------------------------------------------------------


class _Twin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return coarse(x, 1) @ coarse(w, 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return coarse(grad, 1) @ coarse(w, 1).t(), x.t() @ grad


def coarse(x: Tensor, dim: int) -> Tensor:
    """Return `x` rounded to 8 bits, with one scale for each vector along `dim`, the dim that the product sums over."""
    if not x.numel():
        return x
    most = x.abs().max(dim, keepdim=True).values + 1e-30
    return torch.round(127 * x / most) / 127 * most


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRODUCTS, EightBits.name, EightBits())
    monkeypatch.setitem(plain_layer.PRODUCTS, EightBits.name, _Twin.apply)


def with_it(run: Run) -> Run:
    """Return the recipe with the made-up products, set without validation, which accepts only `plain`."""
    return run.model_copy(update={"experts": run.experts.model_copy(update={"products": EightBits.name})})


# --- the code that uses them ------------------------------------------------------------------------------------------


def test_all_kernels_and_kfac_compute_it() -> None:
    """Kernels `cpu` and `reference` give equal outputs and gradients. K-FAC gets the rows that enter each product."""
    counts, generator = [3, 0, 5], torch.Generator().manual_seed(1)
    x, expert_TK = torch.randn(8, 6, generator=generator), torch.tensor([[0]] * 3 + [[2]] * 5)
    found = []
    for kernels in ("reference", "cpu"):
        torch.manual_seed(2)
        experts = Experts(3, d_model=6, d_ff=10, ffn="geglu", kernels=kernels, biases=True, products=EightBits.name)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter)
        plan = choose(kernels).plan(expert_TK, expert_TK >= 0, num_experts=3)
        y = experts(x, counts=Routed(torch.ones(8, 1), plan))
        y.square().sum().backward()
        found.append([y.detach(), *(p.grad for p in experts.parameters())])
        torch.testing.assert_close(experts(x, counts=counts), y)
    torch.testing.assert_close(found[0], found[1])
    seen: dict[str, Tensor] = {}
    kfac: Any = SimpleNamespace(records=True, watch=lambda name, rows, *_: seen.update({name: rows}))
    experts.kernels = Seen(experts, kfac, "layers.1")
    torch.testing.assert_close(experts(x, counts=counts), y)
    assert list(seen) == ["layers.1.w3", "layers.1.w1", "layers.1.w2"] and seen["layers.1.w1"] is x
    weights = {f"experts.0.{name}": p[0] for name, p in experts.named_parameters()}
    given: dict[str, Any] = {"ffn": "geglu", "cast": lambda t: t, "multiply": _Twin.apply}
    torch.testing.assert_close(plain_layer.network(x[:3], weights, "experts.0", **given), y[:3])


def test_checks_refuse_what_it_refuses() -> None:
    run = with_it(load("switch_tiny", {"train.global_batch": "8"})[0])
    check_run(run, 2)
    for section, key in (("degrees", "etp"), ("tiling", "ffn")):
        split = run.model_copy(update={section: getattr(run, section).model_copy(update={key: 2})})
        with pytest.raises(BadInput, match=f"{section}.{key}: got 2, needed 1 with eight_bits .*: a scale is for a whole row; fix: set"):
            check_run(split, 2)
    adapted = run.model_copy(update={"lora": run.lora.model_copy(update={"rank": 2, "targets": ("attention", "experts")})})
    with pytest.raises(BadInput, match="lora.targets: got experts with eight_bits products, .*; fix: set it to .attention."):
        check_run(adapted, 2)


@pytest.mark.parametrize("case", ["relu", "gelu", "swiglu", "expert dropout"])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_planner_counts_the_bytes_that_it_keeps(case: str, compute: str) -> None:
    run = with_it(run_of(case, compute))
    (layer,) = run.model.layers_with_experts()
    network, plan = planned(run)
    said = layer_kept(network, plan, OURS_ON_CPU, layer, recompute_of(plan, layer))
    said += cast_weights(network, plan, layer) if casts_kept(plan, OURS_ON_CPU) else 0.0
    assert kept_by_blocks(run)[layer] == pytest.approx(said, rel=0.03)


def test_planner_takes_its_rate_and_its_bytes() -> None:
    """Planned 8-bit products are faster than plain ones on H100 and slower on A100, which has no 8-bit products. They need more bytes."""
    sizes = {"model.d_model": "4096", "model.d_ff": "14336", "train.global_batch": "512", "precision.compute": "bf16"}
    plain = check_run(load("switch_tiny", sizes)[0], 1)
    runs = [(network_of(run), plan_of(run)) for run in (plain, with_it(plain))]
    fast, slow = ([step_time(*run, load_cluster(name)).forward for run in runs] for name in ("h100-8", "a100-80-8"))
    assert fast[1] < fast[0] and slow[1] > slow[0]
    bytes_held = [peak(*run, OURS).allocated for run in runs]
    assert bytes_held[1] > bytes_held[0]


def test_layouts_equal_the_plain_twin(monkeypatch: pytest.MonkeyPatch, two_steps: None) -> None:
    """Two ranks with ep 2 equal the twin within the bound that verify measures for rounding. 7-bit operands exceed this bound."""
    real = Case.run
    monkeypatch.setattr(Case, "run", lambda case: with_it(real(case)))
    monkeypatch.setattr("moe.verify.expected.CUTS", (2,))
    first = Case("switch", "ddp", 2, 2, 1, "fp32", batch=4)
    cases = [first, replace(first, kind="fsdp", recompute="full", rows="overlapped")]
    expected = Expected.of(twin_of(first))
    assert expected.bound is not None
    for case, ran in layouts.run_world(cases, 2):
        assert not isinstance(ran, str), ran
        row = judged(case, ran, expected)
        assert row["passed"], row
    monkeypatch.setattr("tests.laws.test_products.rounded", lambda values: rounded_to(values, 63))
    assert expected.bound.share(layouts.compute(alone(twin_of(first))))[0] > 1


def rounded_to(values: Tensor, steps: int) -> Tensor:
    scale = values.abs().amax(-1, keepdim=True).clamp(min=1e-30) / steps
    return (values / scale).round() * scale


def test_functions_of_kernels_and_experts_take_few_arguments() -> None:
    """At most 8 arguments. Constructors, and Triton kernels, whose arguments are pointers, may have more."""
    wrong = [
        f"{where(path, node.lineno)} {node.name}: {count}"
        for path in python_files("moe/kernels", "moe/experts")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef) and node.name != "__init__" and not any("jit" in ast.unparse(d) for d in node.decorator_list)
        if (count := sum(a.arg not in ("self", "ctx") for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs))) > 8
    ]
    check(wrong, "a function with more than 8 arguments: some of them belong together as one value")
