"""A backward pass in two parts gives the gradients of one backward pass: I (inputs) and then W (weights), for all products that defer.

The model is the last pipeline stage: its input is a hidden state, its output a loss.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.experts.dispatch.steps import Steps
from moe.experts.experts import Experts, Routed
from moe.experts.layer import MoELayer
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.nn.linear import FeedForward, Linear, Norm
from moe.nn.vocabulary import summed_loss
from moe.parallelize.build import save_memory
from moe.recipe import sections
from parallel.mesh.mesh import Axis
from parallel.numerics.weight_gradient import PendingGradients, defer_gradients, gradient_or_later, linear, pending_for, splittable
from tests.moe.train.loop.test_recompute import Alive

# B sequences, L length, D model, V vocabulary, R rows, F hidden
B, L, D, V, HIDDEN = 3, 10, 16, 40, 27

SWITCH = {"preset": "switch", "capacity_factor": 1.0, "min_capacity": 1, "jitter": 0.2, "z_weight": 0.01}
GLAM = {"preset": "gshard", "capacity_factor": 1.25, "min_capacity": 1}
CASES: dict[str, dict[str, Any]] = {
    "dense": {"model": {"moe_every": 0, "ffn": "swiglu", "num_kv_heads": 1}},
    "switch": {"model": {"moe_every": 2, "ffn": "relu", "positions": "t5"}, "router": SWITCH},
    "glam": {"model": {"moe_every": 2, "ffn": "geglu", "tied_embeddings": False}, "router": GLAM},
    "shared": {"model": {"moe_every": 1, "ffn": "gelu"}, "experts": {"shared": 1, "shared_gate": True}, "router": GLAM},
    "residual": {"model": {"moe_every": 1, "ffn": "gelu"}, "experts": {"residual": True}, "router": GLAM},
}
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_of(
    case: str, *, compute: str = "fp32", recompute: str = "none", tiles: int = 1, chunks: int = 1, kernels: str = "auto"
) -> Transformer:
    sizes = {"num_layers": 2, "d_model": D, "num_heads": 2, "d_ff": HIDDEN, "max_length": L, "dropout": 0.1}
    parts = CASES[case]
    model = Transformer(
        sections.Model(**sizes | parts["model"]),
        sections.Experts(num_experts=4, dropout=0.1, kernels=kernels, **parts.get("experts", {})),
        sections.Router(**parts.get("router", SWITCH)),
        vocab_size=V,
        compute=PRECISIONS[compute],
        seed=3,
    )
    return save_memory(model, recompute=sections.Recompute(kind=recompute, loss_chunks=chunks), tiling=sections.Tiling(ffn=tiles, head=1))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Pass:
    """Runs the forward pass of one micro-batch. Methods run the whole backward pass, or its parts I and W."""

    def __init__(self, model: Transformer, microbatch: int = 0) -> None:
        tokens = (random(B, L + 1, seed=microbatch).abs() * V).long() % V
        context = Context.of(tokens[:, :-1], seed=5, step=2, first_sequence=B * microbatch, auxiliary_scale=0.5)
        if any(block.recompute != "none" for block in model.layers):
            context = context.remembering()
        self.x = random(B, L, D, seed=100 + microbatch).to(model.compute).requires_grad_()
        y = self.x
        for block in model.layers:
            y, _ = block(y, context)
        matrix = model.embedding if model.head is None else model.head
        loss = summed_loss(model.norm(y), tokens[:, 1:], matrix, chunks=model.loss_chunks, recast=model.recast)
        self.loss: Tensor | None = loss * 1e-3

    def backward(self) -> None:
        assert self.loss is not None
        torch.autograd.backward(self.loss)
        self.loss = None

    def inputs_alone(self) -> PendingGradients:
        with defer_gradients() as pending:
            self.backward()
        return pending


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def small(model: nn.Module) -> set[str]:
    """Return the names of small parameters, whose gradients are computed in I."""
    return {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Norm) or path.endswith("attention.bias")}


def equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) and got[name].dtype == want[name].dtype for name in want)


def halves_are_the_whole(**values: Any) -> None:
    whole, halves = model_of(**values), model_of(**values)
    for model in (whole, halves):
        splittable(model)
    b, i = Pass(whole), Pass(halves)
    b.backward()
    pending = i.inputs_alone()
    assert b.x.grad is not None and i.x.grad is not None and torch.equal(b.x.grad, i.x.grad) and b.x.grad.any()
    assert gradients(halves).keys() == small(halves)
    pending.compute()
    assert equal(gradients(halves), gradients(whole))
    unused = set() if whole.head is None else {"embedding"}  # this stage does not use the embedding
    assert {name for name, grad in gradients(halves).items() if grad.any()} == {name for name, _ in whole.named_parameters()} - unused


@pytest.mark.parametrize("compute", PRECISIONS)
@pytest.mark.parametrize("case", CASES)
def test_inputs_then_weights_are_the_backward_pass(case: str, compute: str) -> None:
    halves_are_the_whole(case=case, compute=compute)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("case", CASES)
def test_so_they_are_with_recompute(case: str, recompute: str) -> None:
    halves_are_the_whole(case=case, compute="bf16", recompute=recompute)


@pytest.mark.parametrize("case", ["dense", "glam"])
def test_so_they_are_with_tiles(case: str) -> None:
    halves_are_the_whole(case=case, tiles=3)


@pytest.mark.parametrize("case", ["switch", "glam"])
def test_so_they_are_with_the_plain_loops(case: str) -> None:
    halves_are_the_whole(case=case, kernels="reference", compute="bf16")


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("case", CASES)
def test_so_they_are_in_the_thread_of_a_gpu(case: str, compute: str) -> None:
    with torch.device("cuda"):
        halves_are_the_whole(case=case, compute=compute)


def test_a_loss_in_chunks_has_its_gradient_in_the_first_half() -> None:
    model = model_of("glam", chunks=3)
    splittable(model)
    pending = Pass(model).inputs_alone()
    assert gradients(model).keys() == small(model) | {"head.weight"}
    pending.compute()


@pytest.mark.parametrize("case", CASES)
def test_the_second_halves_come_in_any_order(case: str) -> None:
    whole, halves = model_of(case, compute="bf16"), model_of(case, compute="bf16")
    for model in (whole, halves):
        splittable(model)
    for b in [Pass(whole, 0), Pass(whole, 1)]:
        b.backward()
    passes = [Pass(halves, 0), Pass(halves, 1)]
    first, second = (i.inputs_alone() for i in passes)
    second.compute()
    first.compute()
    assert equal(gradients(halves), gradients(whole))  # bitwise, because a sum of two numbers has only one order


@pytest.mark.parametrize("case", CASES)
def test_the_products_that_can_put_off_are_the_plain_ones(case: str) -> None:
    plain, other = model_of(case), model_of(case)
    splittable(other)
    a, b = Pass(plain), Pass(other)
    torch.testing.assert_close(b.loss, a.loss, rtol=1e-6, atol=0)
    a.backward()
    b.backward()
    torch.testing.assert_close(b.x.grad, a.x.grad, rtol=2e-5, atol=1e-8)
    for name, want in gradients(plain).items():
        torch.testing.assert_close(gradients(other)[name], want, rtol=2e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("case", ["shared", "residual"])
def test_without_being_asked_products_are_torchs_own(case: str) -> None:
    model = model_of(case)
    assert not any(getattr(module, "recast", False) for module in model.modules())
    pending = Pass(model).inputs_alone()
    left = {name for name, _ in model.named_parameters()} - gradients(model).keys()
    beside = (".experts.w1", ".experts.w2", ".router.weight", ".shared_gate.weight", ".coefficient.weight")
    assert left and all(name.endswith(beside) for name in left)  # layers whose own autograd.Function defers gradients
    pending.compute()
    assert gradients(model).keys() == {name for name, _ in model.named_parameters()}


# --- experts ----------------------------------------------------------------------------------------------------------

COUNTS = [3, 0, 7, 2]


def experts_of(kernels: str, *, ffn: str = "swiglu", tiles: int = 1) -> Experts:
    experts = Experts(4, d_model=D, d_ff=HIDDEN, ffn=ffn, kernels=kernels, tiles=tiles)
    for n, p in enumerate(experts.parameters()):
        p.data.copy_(random(*p.shape, seed=n) / 5)
    return experts


def runs(experts: Experts, x: Tensor) -> Tensor:
    """Run the experts in two chunks, each with a view of the stacked matrices."""
    parts = zip(x.split([3, 9]), experts.chunks(2), [COUNTS[:2], COUNTS[2:]], strict=True)
    return torch.cat([experts(rows, counts=counts, weights=weights) for rows, weights, counts in parts])


def routed(experts: Experts, x: Tensor) -> Tensor:
    """Run the experts with two choices a token; expert 1 gets no token."""
    expert_TK = torch.tensor([[0, 2], [2, 3], [2, 0]]).repeat(4, 1)
    plan = experts.kernels.plan(expert_TK, torch.ones_like(expert_TK, dtype=torch.bool), num_experts=4)
    out: Tensor = experts(x, counts=Routed(random(12, 2, seed=6).sigmoid(), plan))
    return out


WAYS: dict[str, Callable[[Experts, Tensor], Tensor]] = {
    "rows": lambda experts, x: experts(x, counts=COUNTS),  # type: ignore[no-any-return]
    "masked": lambda experts, x: experts(x, counts=COUNTS, dropped_RF=(random(12, HIDDEN, seed=4) > 0).float()),  # type: ignore[no-any-return]
    "runs": runs,
    "routed": routed,
}


@pytest.mark.parametrize("ffn", ["relu", "gelu", "swiglu"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", ["reference", "cpu", "triton"])
def test_every_kind_of_kernels_puts_off(kernels: str, way: str, ffn: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
        importlib.import_module("tests.support.interpreted")
        if ffn == "gelu" or way == "masked":
            pytest.skip("its interpreter is slow, and the backward pass has no branch for it")
    found = []
    for split in (False, True):
        experts, x = experts_of(kernels, ffn=ffn), random(12, D, seed=8).requires_grad_()
        y = WAYS[way](experts, x).square().sum()
        if split:
            with defer_gradients() as pending:
                torch.autograd.backward(y)
            assert not gradients(experts)
            pending.compute()
        else:
            torch.autograd.backward(y)
        assert x.grad is not None
        found.append(gradients(experts) | {"x": x.grad})
    assert equal(*found)
    assert found[0].keys() == {"w1", "w2", "x"} | ({"w3"} if ffn == "swiglu" else set())


@pytest.mark.parametrize("tiles", [1, 3])
def test_so_do_experts_whose_rows_travel_in_runs(tiles: int) -> None:
    def passed(halves: bool) -> dict[str, Tensor]:
        layer = MoELayer(sections.Experts(num_experts=4), sections.Router(**GLAM), d_model=D, d_ff=HIDDEN, ffn="relu", layer=1)
        layer.experts = layer.experts.in_tiles(tiles) if tiles > 1 else layer.experts
        for n, p in enumerate(layer.parameters()):
            p.data.copy_(random(*p.shape, seed=n))
        layer.dispatcher = Steps((Axis("ep"),), kernels=layer.experts.kernels, chunks=2)
        tokens = torch.zeros(B, L, dtype=torch.int64)
        y, _ = layer(random(B, L, D, seed=2), Context.of(tokens))
        if not halves:
            torch.autograd.backward(y.square().sum())
            return gradients(layer)
        with defer_gradients() as pending:
            torch.autograd.backward(y.square().sum())
        assert not gradients(layer)
        pending.compute()
        return gradients(layer)

    assert equal(passed(True), passed(False))


# --- memory between I and W -------------------------------------------------------------------------------------------


def alive_between(network: Callable[[Tensor], Tensor], weights: nn.Module, rows: int) -> tuple[int, int]:
    """Return the bytes of tensors in memory (after I, after W), without weights, inputs, outputs and gradients."""
    x = random(rows, D, seed=1).requires_grad_()
    y_gradient = random(rows, D, seed=2)
    with Alive() as alive:
        y = network(x)
        with defer_gradients() as pending:
            torch.autograd.backward(y, y_gradient)
        del y
        others = [x, y_gradient, x.grad, *weights.parameters()]
        after_i = alive.bytes(but=others)  # type: ignore[arg-type]
        pending.compute()
        after_w = alive.bytes(but=[*others, *gradients(weights).values()])  # type: ignore[list-item]
    return after_i, after_w


@pytest.mark.parametrize("rows", [6, 50])
def test_inputs_and_output_gradients_are_kept_and_nothing_after(rows: int) -> None:
    """Between I and W, a network keeps its hidden units and their gradients; after W nothing."""
    network = FeedForward(D, HIDDEN, "relu", recast=True)
    for p in network.parameters():
        nn.init.normal_(p)
    assert alive_between(network, network, rows) == (2 * rows * HIDDEN * 4, 0)


@pytest.mark.parametrize(("ffn", "matrices"), [("relu", 2), ("gelu", 2), ("swiglu", 3)])
def test_memory_of_experts_between_i_and_w(ffn: str, matrices: int) -> None:
    """Between I and W, experts keep `matrices` tensors of hidden units, and 8 bytes a row for the row's expert; after W nothing."""
    experts = experts_of("cpu", ffn=ffn)
    kept = alive_between(lambda x: experts(x, counts=[5, 5, 5, 5]), experts, 20)  # type: ignore[arg-type,return-value]
    assert kept == (matrices * 20 * HIDDEN * 4 + 20 * 8, 0)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("case", CASES)
def test_a_paid_debt_leaves_nothing(case: str, recompute: str) -> None:
    model = model_of(case, compute="bf16", recompute=recompute)
    splittable(model)
    with Alive() as alive:
        i = Pass(model)
        pending = i.inputs_alone()
        ours = [*model.parameters(), i.x, i.x.grad]
        some = alive.bytes(but=[*ours, *gradients(model).values()])  # type: ignore[list-item]
        pending.compute()
        rest = alive.bytes(but=[*ours, *gradients(model).values()])  # type: ignore[list-item]
    assert rest == 0 < some


def saved(layer: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """Return the bytes of all storages that the forward pass saves for the backward pass."""
    storages: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        y = layer(x)
        total = sum(storages.values())
        del y
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_plain_product_saves_what_it_did_and_the_other_no_cast_weight(dtype: torch.dtype) -> None:
    plain, other = Linear(D, HIDDEN), Linear(D, HIDDEN, recast=True)
    x = random(5, D, seed=1).to(dtype).requires_grad_()
    size = x.numel() * dtype.itemsize
    assert saved(plain, x) == size + D * HIDDEN * dtype.itemsize
    assert saved(other, x) == size + D * HIDDEN * 4  # the saved weight is the parameter itself, no copy


# --- deferred gradients -----------------------------------------------------------------------------------------------


def layer_of(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, Tensor]:
    return nn.Parameter(random(*shape, seed=1).to(dtype)), random(5, shape[1], seed=2).to(dtype).requires_grad_()


def test_a_debt_is_paid_after_the_first_half_and_once() -> None:
    weight, x = layer_of(4, 3)
    with defer_gradients() as pending:
        torch.autograd.backward(linear(x, weight).sum())
        with pytest.raises(RuntimeError, match="after the backward pass"):
            pending.compute()
    assert weight.grad is None
    pending.compute()
    want = x.detach().sum(0).expand(4, 3)
    torch.testing.assert_close(weight.grad, want)
    pending.compute()
    torch.testing.assert_close(weight.grad, want)


def test_there_is_one_first_half_at_a_time_and_a_failed_one_leaves_none() -> None:
    with pytest.raises(RuntimeError, match="one backward pass at a time"), defer_gradients(), defer_gradients():
        pass
    with pytest.raises(ZeroDivisionError), defer_gradients():
        _ = 1 // 0
    weight, x = layer_of(4, 3)
    torch.autograd.backward(linear(x, weight).sum())
    assert weight.grad is not None


def test_a_16_bit_weight_with_an_fp32_gradient_gets_exact_sums() -> None:
    """Deferred gradients 2048 and 1 are added in the gradient's dtype. In 16 bits, 2048 + 1 would be rounded."""
    weight, _ = layer_of(4, 3, dtype=torch.bfloat16)
    weight.grad_dtype = torch.float32
    for value in (2048.0, 1.0):
        with defer_gradients() as pending:
            torch.autograd.backward(linear(torch.full((1, 3), value, dtype=torch.bfloat16).requires_grad_(), weight).float().sum())
        pending.compute()
    assert weight.grad is not None and weight.grad.dtype == torch.float32 and weight.grad.unique().tolist() == [2049.0]


def test_hooks_on_a_weight_see_its_gradient_with_the_second_half() -> None:
    weight, x = layer_of(4, 3)
    seen: list[Tensor] = []
    weight.register_hook(seen.append)
    with defer_gradients() as pending:
        torch.autograd.backward(linear(x, weight).sum())
    assert not [grad for grad in seen if grad is not None]
    pending.compute()
    assert weight.grad is not None and torch.equal(seen[-1], weight.grad)


def test_a_weight_that_is_computed_has_its_gradient_at_once() -> None:
    """Gradients of a weight computed from parameters are not deferred, because that would keep the graph of this computation in memory."""
    weight, x = layer_of(4, 3)
    with defer_gradients() as pending:
        assert (
            pending_for(weight) is pending is pending_for(weight[1:])
            and pending_for(weight * 2) is None
            and pending_for(x.detach()) is None
        )
        assert gradient_or_later(weight * 2, lambda: torch.ones(1)) is not None
        torch.autograd.backward(linear(x, weight.exp()).sum())
    assert weight.grad is not None
    before = weight.grad.clone()
    pending.compute()
    assert torch.equal(weight.grad, before) and pending_for(weight) is None


def test_a_frozen_weight_owes_nothing() -> None:
    weight, x = layer_of(4, 3)
    weight.requires_grad_(False)
    with defer_gradients() as pending:
        torch.autograd.backward(linear(x, weight).sum())
    pending.compute()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(5, 3))
    assert weight.grad is None
