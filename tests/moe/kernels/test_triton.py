"""The Triton kernels equal the reference in values and gradients: compiled on a GPU, and in Triton's interpreter on other machines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe.experts.dispatch.dispatcher import Local, Sizes
from moe.experts.dispatch.padded import Slots
from moe.experts.experts import Experts
from moe.experts.layer import MoELayer
from moe.kernels import auto, choose, cpu, grouped_mm, reference
from moe.kernels.network import Network
from moe.kernels.rows import Plan
from moe.nn.context import Context
from moe.recipe import sections
from moe.router.capacity import kept_choices
from moe.router.routing import Routing
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process.deterministic import deterministic
from tests.support.networks import network_of

pytest.importorskip("triton", reason="Triton's package is not installed; it has none for this system", exc_type=ImportError)

import tests.support.interpreted  # noqa: E402, F401
from moe.kernels import triton, triton_persistent  # noqa: E402
from moe.kernels.triton import network  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [pytest.mark.gpu] if DEVICE.type == "cuda" else []
# T tokens, K choices, R rows, E experts, D model, F hidden. T, F and WIDE are more than one tile and no multiple of one, D is less than
# one, because the interpreter's time grows with the number of tiles.
T, E, D, F, WIDE = 37, 5, 12, 44, 36
FFNS = ["relu", "gelu", "geglu", "swiglu"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).to(DEVICE)


def planned(kind: str, k: int, *, tokens: int = T, num_experts: int = E) -> Plan:
    scores_TE = random(tokens, num_experts, seed=len(kind))
    if kind == "one takes all":
        scores_TE[:, 3] += 100
    if kind == "empty experts":
        scores_TE[:, [0, num_experts - 1]] -= 100
    share = {"drops": 0.4, "nothing kept": 2.0}.get(kind, -1.0)
    kept_TK = (torch.rand(tokens, k, generator=torch.Generator().manual_seed(9)) > share).to(DEVICE)
    return cpu.plan(scores_TE.topk(k).indices, kept_TK, num_experts=num_experts)


def weights(ffn: str, *, num_experts: int = E, d: int = D, f: int = F, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = [(num_experts, d, f), (num_experts, f, d), (num_experts, d, f)][: 3 if "glu" in ffn else 2]
    return [random(*shape, seed=i, dtype=dtype) * shape[1] ** -0.5 for i, shape in enumerate(shapes, 1)]


Function = Callable[[ModuleType, list[Tensor]], Tensor]


def results(kernels: ModuleType, function: Function, inputs: list[Tensor]) -> list[Tensor]:
    """Return [value of `function(kernels, inputs)`, gradient of each input]."""
    leaves = [t.clone().requires_grad_() for t in inputs]
    out = function(kernels, leaves)
    out.backward(random(*out.shape, seed=77, dtype=out.dtype))
    assert all(leaf.grad is not None and leaf.grad.dtype == leaf.dtype for leaf in leaves)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def both(function: Function, *inputs: Tensor, tolerance: float = 1e-6) -> None:
    for want, got in zip(*(results(kernels, function, list(inputs)) for kernels in (reference, triton)), strict=True):
        assert got.dtype == want.dtype
        largest = want.abs().max().item() if want.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * max(1.0, largest))


def errors(function: Function, *inputs: Tensor) -> list[float]:
    """Return the relative errors (2-norm) of the Triton kernels' value and gradients, compared with the reference on fp32 inputs."""
    found = [results(reference, function, [t.float() for t in inputs]), results(triton, function, list(inputs))]
    return [((got.float() - want).norm() / want.norm()).item() for want, got in zip(*found, strict=True)]


def layer_of(ffn: str, *, plan: Plan, dropped_RF: Tensor | None = None) -> Function:
    """Return a function of (kernels, [x, gates, w1, w2, w3 if gated]) that calls routed_ffn."""

    def run(kernels: ModuleType, t: list[Tensor]) -> Tensor:
        dropped = None if dropped_RF is None else dropped_RF.to(t[0].dtype)
        return kernels.routed_ffn(t[0], t[1], plan, network_of(ffn, *t[2:]), dropped_RF=dropped)  # type: ignore[no-any-return]

    return run


@given(st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 70), st.integers(1, 70), st.integers(1, 4), st.floats(0, 1))
@settings(max_examples=25)
def test_routing_is_the_references(seed: int, groups: int, each: int, num_experts: int, k: int, active: float) -> None:
    generator, k = torch.Generator().manual_seed(seed), min(k, num_experts)
    scores_TE = torch.rand(groups * each, num_experts, generator=generator)
    scores_TE = torch.where(scores_TE < 0.3, -torch.inf, (4 * scores_TE).round()).to(DEVICE)  # many ties, and some experts masked out
    expert_TK = triton.top_k(scores_TE, k)
    assert torch.equal(expert_TK, reference.top_k(scores_TE, k)) and expert_TK.dtype == torch.int64
    active_TK = (torch.rand(expert_TK.shape, generator=generator) <= active).to(DEVICE)
    sizes = {"num_groups": groups, "num_experts": num_experts, "slots_each": 3}
    for mask in (None, active_TK):
        kept_TK = triton.kept(expert_TK, mask, **sizes)
        assert torch.equal(kept_TK, reference.kept(expert_TK, mask, **sizes)) and kept_TK.dtype == torch.bool
    got, want = (m.plan(expert_TK, kept_TK, num_experts=num_experts) for m in (triton, reference))
    rows = len(want.choice_R)
    assert torch.equal(got.cut(rows).choice_R, want.choice_R) and not got.choice_R[rows:].any() and len(got.choice_R) == active_TK.numel()
    assert torch.equal(got.row_TK, want.row_TK) and torch.equal(got.counts_E, want.counts_E)
    assert got.choice_R.dtype == got.row_TK.dtype == got.counts_E.dtype == torch.int64


def test_scores_that_are_not_numbers_still_choose_experts_that_exist_each_once() -> None:
    scores_TE = random(6, E)
    scores_TE[1], scores_TE[2, 3], scores_TE[3], scores_TE[4] = torch.nan, torch.nan, -torch.inf, torch.inf
    expert_TK = triton.top_k(scores_TE, E)
    assert torch.equal(expert_TK.sort(-1).values, torch.arange(E, device=DEVICE).expand(6, E)) and expert_TK[2, 0] == 3


@given(st.lists(st.integers(0, 100), min_size=1, max_size=9))
@settings(max_examples=15)
def test_tiles_cover_every_row_once_each_with_one_expert(counts: list[int]) -> None:
    rows = network.arrange(torch.tensor(counts, device=DEVICE), rows=sum(counts), dtype=torch.float32, plan=None)
    used = [tile for tile in rows.tiles.tolist() if tile[0] >= 0]
    starts = torch.tensor(counts).cumsum(0) - torch.tensor(counts)
    want = [
        [expert, first, int(starts[expert]) + count]
        for expert, count in enumerate(counts)
        for first in range(int(starts[expert]), int(starts[expert]) + count, rows.tile_rows)
    ]
    assert used == want == rows.tiles.tolist()[: len(want)] and rows.used_tiles.tolist() == [len(want)]


@pytest.mark.parametrize(
    ("kind", "k"), [("even", 1), ("drops", 2), ("one takes all", 1), ("empty experts", 3), ("nothing kept", 2), ("even", E)]
)
def test_permute_and_combine_equal_the_reference(kind: str, k: int) -> None:
    plan = planned(kind, k)
    rows = len(plan.choice_R)
    both(lambda kernels, t: kernels.permute(t[0], plan), random(T, WIDE))
    both(lambda kernels, t: kernels.combine(t[0], t[1], plan), random(rows, WIDE), random(*plan.row_TK.shape, seed=1))
    both(lambda kernels, t: kernels.combine(t[0], None, plan), random(rows, WIDE))


@pytest.mark.parametrize("rows", [0, 1, 300])
def test_reorder_equals_the_reference(rows: int) -> None:
    order_R = torch.randperm(rows, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    for undo in (False, True):
        both(lambda kernels, t, undo=undo: kernels.reorder(t[0], order_R, undo=undo), random(rows, D))
    there = triton.reorder(random(rows, D), order_R)
    assert torch.equal(triton.reorder(there, order_R, undo=True), random(rows, D))


@pytest.mark.parametrize(("ranks", "bins", "most"), [(1, 1, 9), (3, 5, 4), (4, 40, 2), (2, 3, 0)])
def test_received_rows_are_sorted_by_bin_as_by_torch_operations(ranks: int, bins: int, most: int) -> None:
    counts_PB = torch.randint(most + 1, (ranks, bins), generator=torch.Generator().manual_seed(ranks)).to(DEVICE)
    total = int(counts_PB.sum())
    assert torch.equal(triton.by_bin(counts_PB, total=total), cpu.by_bin(counts_PB, total=total))


def test_bf16_combine_weighs_and_sums_in_fp32() -> None:
    """256 (1 + 2^-9) + 1 = 257.5, which bf16 rounds to 258. With gate, product or sum in bf16, the result would be 256."""
    plan = triton.plan(torch.tensor([[0, 1]], device=DEVICE), torch.ones(1, 2, dtype=torch.bool, device=DEVICE), num_experts=2)
    rows = torch.tensor([[256.0], [1.0]], dtype=torch.bfloat16, device=DEVICE)
    assert triton.combine(rows, torch.tensor([[1.0 + 2.0**-9, 1.0]], device=DEVICE), plan).item() == 258.0


@pytest.mark.parametrize(("kind", "k", "d"), [("drops", 2, WIDE), ("one takes all", 1, D), ("empty experts", 3, D), ("nothing kept", 2, D)])
def test_routed_ffn_equals_the_reference(kind: str, k: int, d: int) -> None:
    inputs = random(T, d), random(T, k, seed=6), *weights("swiglu", d=d)
    both(layer_of("swiglu", plan=planned(kind, k)), *inputs, tolerance=3e-6)


def test_rows_of_dropped_choices_at_the_end_of_a_plan_are_not_read() -> None:
    """The host does not know how many choices were dropped, so their rows stay in the plan. Results are those of the plan without them."""
    short, dropped_RF = planned("drops", 2, num_experts=3), random(2 * T, 20, seed=5)
    long = replace(short, choice_R=torch.cat((short.choice_R, short.choice_R.new_zeros(2 * T - len(short.choice_R)))))
    inputs = [random(T, D), random(T, 2, seed=6), *weights("swiglu", num_experts=3, f=20)]
    want = results(triton, layer_of("swiglu", plan=short, dropped_RF=dropped_RF[: len(short.choice_R)]), inputs)
    got = results(triton, layer_of("swiglu", plan=long, dropped_RF=dropped_RF), inputs)
    assert len(long.choice_R) > len(short.choice_R) and all(map(torch.equal, want, got))


@pytest.mark.parametrize("ffn", FFNS)
def test_every_activation_equals_the_reference_with_dropout_inside(ffn: str) -> None:
    plan = planned("drops", 2)
    rows = len(plan.choice_R)
    dropped_RF = (random(rows, F, seed=5) > 0).float() * 2
    if ffn == "swiglu":
        both(layer_of(ffn, plan=plan, dropped_RF=dropped_RF), random(T, D), random(T, 2, seed=6), *weights(ffn), tolerance=3e-6)

    def grouped(kernels: ModuleType, t: list[Tensor]) -> Tensor:
        return kernels.grouped_ffn(t[0], network_of(ffn, *t[1:]), counts=plan.counts_E.tolist(), dropped_RF=dropped_RF)  # type: ignore[no-any-return]

    both(grouped, random(rows, D), *weights(ffn), tolerance=3e-6)


@pytest.mark.parametrize(("ffn", "kind"), [("relu", "drops"), ("swiglu", "empty experts")])
def test_biases_and_bounds_equal_the_reference(ffn: str, kind: str) -> None:
    """routed_ffn and grouped_ffn with biases and bounded swiglu. test_grouped.py compares the reference with plain networks."""
    plan, swiglu = planned(kind, 2), sections.Swiglu(alpha=1.7, limit=0.8, offset=0.5)
    biases = [random(E, F, seed=i) for i in (11, 12)[: 2 if ffn == "swiglu" else 1]]

    def experts(t: list[Tensor]) -> Network:
        if ffn == "relu":
            return network_of(ffn, *t[1:3], b1=t[3])
        return network_of(ffn, *t[1:4], b1=t[4], b3=t[5], swiglu=swiglu)

    def routed(kernels: ModuleType, t: list[Tensor]) -> Tensor:
        return kernels.routed_ffn(t[0], t[-1], plan, experts(t))  # type: ignore[no-any-return]

    inputs, counts = [*weights(ffn), *biases], plan.counts_E.tolist()
    both(routed, random(T, D), *inputs, random(T, 2, seed=6), tolerance=3e-6)
    both(lambda kernels, t: kernels.grouped_ffn(t[0], experts(t), counts=counts), random(sum(counts), D), *inputs, tolerance=3e-6)
    if kind != "nothing kept":
        halves = [t.bfloat16() for t in (random(T, WIDE), *weights(ffn, d=WIDE), *biases)]
        assert max(errors(routed, *halves, random(T, 2, seed=6))) < 2.0**-6


@given(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.integers(1, 50), st.integers(1, 50))
@settings(max_examples=8)
def test_grouped_ffn_of_any_shape_equals_the_reference(counts: list[int], d: int, f: int) -> None:
    inputs = random(sum(counts), d), *weights("geglu", num_experts=len(counts), d=d, f=f)
    both(lambda kernels, t: kernels.grouped_ffn(t[0], network_of("geglu", *t[1:]), counts=counts), *inputs, tolerance=3e-6)


@pytest.mark.parametrize(("dtype", "bound", "master"), [(torch.bfloat16, 2.0**-7, "fp32"), (torch.float16, 2.0**-10, "own")], ids=str)
def test_half_precision_rounds_a_few_times_and_sums_in_fp32(dtype: torch.dtype, bound: float, master: str) -> None:
    """Errors stay below 4 roundings to nearest (measured: 0.6 of that). Sums in 16 bits would exceed it."""
    plan = planned("drops", 2)
    matrices = [w if master == "fp32" else w.to(dtype) for w in weights("swiglu", d=WIDE, dtype=dtype)]
    if master == "fp32":
        matrices = [w.float() for w in matrices]
    found = errors(layer_of("swiglu", plan=plan), random(T, WIDE, dtype=dtype), random(T, 2, seed=6), *matrices)
    assert max(found) < bound, found


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_an_infinite_gradient_stays_with_its_expert() -> None:
    """Rows of other experts are zeros in both operands of a weight's gradient. If only one were zero, 0 * infinity would give NaN."""
    counts, x = [20, 13, 7], random(40, D)
    x[19], x[33] = torch.inf, torch.nan
    w1, w2 = (w.requires_grad_() for w in weights("relu", num_experts=3))
    triton.grouped_ffn(x, network_of("relu", w1, w2), counts=counts).sum().backward()
    assert [bool(w1.grad[e].isfinite().all()) for e in range(3)] == [False, True, False]  # type: ignore[index]


@pytest.mark.parametrize(
    ("counts", "gathered", "held", "dtype"),
    [
        ([0, 33, 1, 0], "left", (1, False), torch.bfloat16),
        ([5, 64, 31, 3], "right", (2, False), torch.float32),
        ([0, 0, 77, 0], "left", (1, True), torch.float32),
        ([0, 0, 0, 0], "right", (1, False), torch.bfloat16),
        ([7, 0, 2, 40], "neither", (2, True), torch.bfloat16),
    ],
)
def test_weight_gradients_in_any_order_of_tiles_equal_plain_products(
    counts: list[int], gathered: str, held: tuple[int, bool], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three by two tiles of each expert's gradient, of which `held` says how many are computed together, and whether side by side."""
    monkeypatch.setattr(network, "held_tiles", lambda *_, **__: held)
    k, height, width, number = 2, 80, 48, sum(counts)
    choice_R = torch.randperm(2 * number, generator=torch.Generator().manual_seed(3))[:number].to(DEVICE)
    plan = Plan(choice_R, torch.zeros(number, k, dtype=torch.int64), torch.tensor(counts, device=DEVICE))
    left, right = random(number, height), random(number, width, seed=1)
    rows = network.arrange(plan.counts_E, rows=number, dtype=torch.float32, plan=plan)
    like = torch.empty(len(counts), height, width, dtype=dtype, device=DEVICE)
    got = network.weight_gradient(left, right, like, rows, gathered=gathered)
    left, right = left[choice_R // k] if gathered == "left" else left, right[choice_R // k] if gathered == "right" else right
    want = torch.stack([a.T @ b for a, b in zip(left.split(counts), right.split(counts), strict=True)])
    assert got.dtype == dtype and got.shape == like.shape
    torch.testing.assert_close(got.float(), want, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-5, atol=2e-5)


def test_frozen_weights_and_tokens_without_gradient_are_left_out() -> None:
    plan = planned("drops", 2, num_experts=3)
    inputs = [random(T, D), random(T, 2, seed=6), *weights("swiglu", num_experts=3, f=20)]
    whole = results(triton, layer_of("swiglu", plan=plan), inputs)
    for wanted in (0, 3, 4):  # the tokens; w1 and w2, of which w1 shares a kernel with w3
        leaves = [t.clone().requires_grad_(i == wanted) for i, t in enumerate(inputs)]
        out = layer_of("swiglu", plan=plan)(triton, leaves)
        out.backward(random(*out.shape, seed=77))
        assert [leaf.grad is not None for leaf in leaves] == [i == wanted for i in range(len(inputs))]
        assert torch.equal(leaves[wanted].grad, whole[1 + wanted])  # type: ignore[arg-type]
    with torch.no_grad():
        assert torch.equal(layer_of("swiglu", plan=plan)(triton, inputs), whole[0])


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_only_tokens_and_pre_activations_are_saved(ffn: str) -> None:
    """For the backward pass, routed_ffn saves tokens [T, D], gates and the pre-activations [R, F], but no rows [R, D]."""
    plan, saved, d, f = planned("even", 3), [], 48, 32
    x, gate, matrices = random(T, d), random(T, 3, seed=6), [w.requires_grad_() for w in weights(ffn, d=d, f=f)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)), lambda _: None):
        layer_of(ffn, plan=plan)(triton, [x.requires_grad_(), gate, *matrices])
    activations = [shape for shape in saved if len(shape) == 2]
    assert activations == [(T, d), (T, 3), *[(3 * T, f)] * (len(matrices) - 1)]


def test_torchs_grouped_product_can_replace_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper in bf16, torch's grouped product computes the products with w2. The results stay within rounding."""
    plan, d, f = planned("empty experts", 2), 48, 64
    inputs = random(T, d, dtype=torch.bfloat16), random(T, 2, seed=6), *weights("gelu", d=d, f=f)
    seen: list[bool] = []
    monkeypatch.setattr(network, "torch_multiplies", lambda rows: seen.append(True) or True)
    assert max(errors(layer_of("gelu", plan=plan), *inputs)) < 2.0**-7
    assert len(seen) == 2  # the product with w2 forward, and its transpose backward


@pytest.mark.parametrize("counts", [[0, 33, 1, 0, 40], [0, 0]])
@pytest.mark.parametrize(("turned", "too"), [(False, False), (True, False), (True, True)])
def test_a_persistent_grid_multiplies_to_the_same_bits(counts: list[int], turned: bool, too: bool) -> None:
    """Three programs compute up to 15 tiles. Neither inner dim nor columns are a multiple of a tile, and 7 rows belong to no expert."""
    number, inner, columns = sum(counts) + 7, 48, 80
    given = [random(number, inner, seed=i, dtype=torch.bfloat16) for i in (1, 2)]
    shape = (len(counts), columns, inner) if turned else (len(counts), inner, columns)
    w, w_too = (random(*shape, seed=i, dtype=torch.bfloat16) for i in (3, 4))
    rows = network.arrange(torch.tensor(counts, device=DEVICE), rows=number, dtype=torch.bfloat16, plan=None)
    more = {"a_too": given[1], "w_too": w_too} if too else {}
    want, got = (f(given[0], w, rows, turned=turned, **more)[: sum(counts)] for f in (network.product, triton_persistent.product))
    if DEVICE.type == "cpu":  # on a GPU, `product` may be torch's
        assert torch.equal(got, want)
    torch.testing.assert_close(got.float(), want.float(), rtol=2.0**-7, atol=2.0**-7)


def test_a_layer_with_a_persistent_grid_equals_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies twice: once forward, and once for the input's gradient. fp32 rows take the plain kernel."""
    seen: list[torch.dtype] = []
    run, plan = triton_persistent.persistent_product.run, planned("empty experts", 2, tokens=20)
    monkeypatch.setattr(
        triton_persistent.persistent_product, "run", lambda a, *more, **named: seen.append(a.dtype) or run(a, *more, **named)
    )
    inputs = [random(20, D, dtype=torch.bfloat16), random(20, 2, seed=6), *weights("swiglu", dtype=torch.bfloat16)]
    want = results(reference, layer_of("swiglu", plan=plan), [t.float() for t in inputs])
    got = results(triton_persistent, layer_of("swiglu", plan=plan), inputs)
    assert all((a.float() - b).norm() < 2.0**-7 * b.norm() for a, b in zip(got, want, strict=True))
    layer_of("relu", plan=plan)(triton_persistent, [t.float() for t in inputs[:4]])
    assert seen == [torch.bfloat16] * 2


def test_a_persistent_grid_is_refused_on_a_gpu_without_tma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_persistent, "has_tma", lambda _: False)
    inputs = [random(T, D, dtype=torch.bfloat16), random(T, 1, seed=6), *weights("relu", dtype=torch.bfloat16)]
    with pytest.raises(BadInput, match="triton_persistent on .*, needed compute capability 9.0 or later.*set it to triton"):
        layer_of("relu", plan=planned("even", 1))(triton_persistent, inputs)


@pytest.mark.parametrize("kernels", [triton, triton_persistent, grouped_mm], ids=lambda module: module.__name__.rpartition(".")[2])
def test_weights_that_start_at_an_odd_address_are_copied(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight may be a part of a flat buffer. Torch's grouped product, which `triton` takes on Hopper, refuses an odd address, and TMA
    fails."""
    multiply, d, f = torch.nn.functional.grouped_mm, 16, 32

    def strict(*operands: Tensor, offs: Tensor) -> Tensor:
        assert all(t.data_ptr() % 16 == 0 for t in operands)
        return multiply(*operands, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", strict)
    monkeypatch.setattr(network, "torch_multiplies", lambda rows: True)
    inputs = [random(9, d, dtype=torch.bfloat16), random(9, 1, seed=6), *weights("gelu", d=d, f=f, dtype=torch.bfloat16)]
    found, run = [], layer_of("gelu", plan=planned("even", 1, tokens=9))
    for odd in (0, 1):
        leaves = [torch.cat((t.new_zeros(odd), t.flatten())).requires_grad_() for t in inputs]
        views = [leaf[odd:].view_as(t) for leaf, t in zip(leaves, inputs, strict=True)]
        out = run(kernels, views)
        found.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), views)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("preset", ["switch", "gshard"])
def test_a_layer_is_the_same_with_both_kernels(preset: str) -> None:
    found = []
    for kernels in ("reference", "triton"):
        settings = sections.Router(preset=preset, capacity_factor=1.0, jitter=0.1)
        layer = MoELayer(sections.Experts(num_experts=E, kernels=kernels, dropout=0.3), settings, d_model=D, d_ff=F, ffn="geglu", layer=1)
        layer.to(DEVICE)
        for i, p in enumerate(layer.parameters()):
            p.data.copy_(random(*p.shape, seed=i) * 0.2)
        x = random(2, 20, D).requires_grad_()
        y, report = layer(x, Context.of(x[..., 0], seed=3))
        y.square().sum().backward()
        found.append([y.detach(), x.grad, report.kept, *(p.grad for p in layer.parameters())])
    assert 0 < int(found[0][2]) < 2 * 20 * (1 if preset == "switch" else 2)
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * max(1.0, want.abs().max().item()))


def test_kernels_are_chosen_by_name_and_by_the_device_of_the_tensors() -> None:
    assert choose("triton") is triton and choose() is choose("auto") is auto
    assert auto.kernels_of(torch.zeros(1)) is cpu
    both(lambda kernels, t: (auto if kernels is triton else kernels).permute(t[0], planned("drops", 2)), random(T, D))


WITHOUT_GPU = """
import sys
from moe.kernels import choose
from parallel.errors import BadInput

choose("auto")
import moe.experts.layer
print("triton" in sys.modules)
for gone in (False, True):
    if gone:
        for name in [name for name in sys.modules if name.partition(".")[0] == "triton" or name.startswith("moe.kernels.triton")]:
            del sys.modules[name]
        sys.modules["triton"] = None
        sys.meta_path.clear()
    try:
        choose("triton")
    except BadInput as refused:
        print(refused)
"""


def test_triton_is_imported_only_when_asked_for_and_only_where_it_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run([sys.executable, "-c", WITHOUT_GPU], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    loaded, no_gpu, not_installed = ran.stdout.splitlines()
    assert loaded == "False"
    assert "experts.kernels: got triton, but torch sees no GPU, needed a GPU; fix: set it to auto" in no_gpu
    assert "got triton, which is not installed" in not_installed


def test_dtypes_without_a_kernel_are_refused() -> None:
    with pytest.raises(BadInput, match="float64.*float32, bfloat16 or float16"):
        triton.grouped_ffn(random(3, D, dtype=torch.float64), network_of("relu", *weights("relu")), counts=[3, 0, 0, 0, 0])


REAL = pytest.mark.parametrize(
    ("tokens", "d", "f", "num_experts", "k"),
    [(4096, 1024, 3584, 8, 2), (4096, 2048, 768, 128, 8), (8192, 768, 3072, 128, 1), (1000, 200, 328, 16, 2)],
    ids=["few wide experts", "many narrow experts", "top-1", "nothing a multiple of a tile"],
)


@pytest.mark.gpu
@REAL
@pytest.mark.parametrize("kind", ["drops", "one takes all"])
def test_real_sizes_equal_the_reference(tokens: int, d: int, f: int, num_experts: int, k: int, kind: str) -> None:
    plan = planned(kind, k, tokens=tokens, num_experts=num_experts)
    inputs = random(tokens, d), random(tokens, k, seed=6), *weights("swiglu", num_experts=num_experts, d=d, f=f)
    both(layer_of("swiglu", plan=plan), *inputs, tolerance=1e-5)
    half = [t if i == 1 else t.bfloat16() for i, t in enumerate(inputs)]
    assert max(errors(layer_of("swiglu", plan=plan), *half)) < 2.0**-7


@pytest.mark.gpu
@REAL
def test_two_runs_give_the_same_bits(tokens: int, d: int, f: int, num_experts: int, k: int) -> None:
    plan = planned("drops", k, tokens=tokens, num_experts=num_experts)
    matrices = weights("geglu", num_experts=num_experts, d=d, f=f, dtype=torch.bfloat16)
    inputs = [random(tokens, d, dtype=torch.bfloat16), random(tokens, k, seed=6), *matrices]
    first, second = (results(triton, layer_of("geglu", plan=plan), inputs) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.gpu
@REAL
def test_routing_of_real_sizes_is_the_cpu_kernels(tokens: int, d: int, f: int, num_experts: int, k: int) -> None:
    scores_TE = random(tokens, num_experts)
    expert_TK = triton.top_k(scores_TE, k)
    assert torch.equal(expert_TK, cpu.top_k(scores_TE, k))
    active_TK = random(tokens, k, seed=1) > -1
    sizes = {"num_groups": 4, "num_experts": num_experts, "slots_each": tokens * k // num_experts // 4}
    assert torch.equal(triton.kept(expert_TK, active_TK, **sizes), cpu.kept(expert_TK, active_TK, **sizes))
    got, want = (m.plan(expert_TK, active_TK, num_experts=num_experts) for m in (triton, cpu))
    rows = len(want.choice_R)
    assert torch.equal(got.cut(rows).choice_R, want.choice_R) and not got.choice_R[rows:].any() and len(got.choice_R) == active_TK.numel()
    assert torch.equal(got.row_TK, want.row_TK) and torch.equal(got.counts_E, want.counts_E)


@pytest.mark.gpu
def test_addresses_beyond_32_bits() -> None:
    """permute, combine and grouped_ffn on tensors of more than 2^31 elements."""
    tokens, wide = 2**19 + 5, 4100
    if torch.cuda.get_device_properties(DEVICE).total_memory < 2**35:
        pytest.skip("needs a GPU of 32 GiB")
    expert_TK = torch.arange(tokens, device=DEVICE).unsqueeze(1) % 2
    plan = triton.plan(expert_TK, torch.ones_like(expert_TK, dtype=torch.bool), num_experts=2)
    x = torch.randn(tokens, wide, device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(triton.combine(triton.permute(x, plan), torch.ones(tokens, 1, device=DEVICE), plan), x)
    del x
    counts, x = [5, tokens - 5], random(tokens, 64, dtype=torch.bfloat16)
    w1, w2 = weights("relu", num_experts=2, d=64, f=wide, dtype=torch.bfloat16)
    y = triton.grouped_ffn(x, network_of("relu", w1, w2), counts=counts)
    want = reference.grouped_ffn(x[-99:].float(), network_of("relu", w1[1:].float(), w2[1:].float()), counts=[99])
    assert (y[-99:].float() - want).norm() < 2.0**-7 * want.norm()


def test_empty_slots_change_no_result_and_no_gradient() -> None:
    """`padded` moves blocks of slots, of which some are empty, and has further rows that no kernel writes. It equals the plain layer,
    even if all memory begins as NaN."""
    ffn, k = "swiglu", 2
    expert_TK, logits_TE = random(T, E, seed=4).topk(k).indices, random(T, E)
    kept_TK = kept_choices(expert_TK, expert_TK >= 0, num_groups=1, num_experts=E, slots_each=9, kernels=reference)
    assert not kept_TK.all()

    def run(kernels: ModuleType, t: list[Tensor]) -> Tensor:
        experts = Experts(E, d_model=D, d_ff=F, ffn=ffn)
        experts.kernels = kernels
        experts._network = lambda part: network_of(ffn, *t[2:])  # type: ignore[method-assign]
        routing = Routing(expert_TK, t[1], kept_TK, logits_TE, logits_TE, capacity=3, num_groups=3)
        exchange = Local() if kernels is reference else Slots.over(("ep",), Mesh.of(Degrees()), Sizes(D, E, k, kernels))
        return exchange.run(t[0], routing, experts)

    with deterministic(True):
        torch.utils.deterministic.fill_uninitialized_memory = True  # with NaN
        assert torch.empty(3).isnan().all()
        both(
            run,
            random(T, D, seed=8),
            torch.rand(T, k, generator=torch.Generator().manual_seed(3)).to(DEVICE),
            *weights(ffn),
            tolerance=3e-6,
        )


@pytest.mark.gpu
def test_auto_takes_triton_on_a_gpu() -> None:
    assert auto.kernels_of(torch.zeros(1, device=DEVICE)) is triton
    assert auto.kernels_of(torch.zeros(1, device=DEVICE, dtype=torch.float64)) is cpu
    with pytest.raises(BadInput, match="triton for a tensor on cpu"):
        triton.top_k(torch.zeros(2, 3), 1)


@pytest.mark.long
def test_every_kernel_compiles_for_hopper_without_spilling(tmp_path: Path) -> None:
    """Triton compiles each kernel to machine code for a GPU that is not here: shared memory, spilled registers, warnings of ptxas, tensor
    cores, no TF32. `python -m tests.measured kernels` compiles more shapes for more GPUs.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DISABLE_LINE_INFO": "1"}
    command = [sys.executable, "-m", "tests.support.compiled", "90"]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    moves = {"top_k", "count", "scan", "rank", "tile_map", "gather", "total", "combine_backward", "gate_gradient", "by_bin", "cast"}
    moves |= {"choose", "finish", "backward", "jitter", "norm_forward", "norm_backward"}
    splits = {"wide_product", "wide_back", "wide_weights"}
    assert {f["kernel"] for f in found} == moves | splits | {"up", "product", "persistent_product", "back", "weights"}
    assert {f["out"] for f in found if f["kernel"] == "weights"} == {"torch.float32", "torch.bfloat16"}
    for f in found:
        fast = f["kernel"] not in moves | splits and f["dtype"] == "torch.bfloat16"
        assert f["shared"] <= 227 * 1024 and not f["tf32"] and not f["warnings"], f
        assert f["spilled"] <= 32, f  # bytes per thread; its registers hold about 1,000
        assert f["tensor_cores"] == (fast or f["kernel"] in splits), f
        assert not fast or (f["buffers"] == 4 and f["asynchronous"] and not f["narrow_loads"]), f
