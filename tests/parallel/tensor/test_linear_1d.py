"""1D tensor parallelism equals the whole layer, and torch's own styles, in outputs and gradients. Bytes equal the formula."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from moe.model.initialize import tiled_dim
from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.core import softmax_core
from moe.nn.linear import FeedForward
from moe.nn.rotary import rotate
from moe.recipe import sections
from parallel.data.tiling import without_tiles
from parallel.mesh.gradients import sum_gradients
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process import process
from parallel.process.process import World
from parallel.tensor.grid import Channels
from parallel.tensor.linear_1d import Column, Row
from parallel.tensor.style import Plan, apply, lay_out
from tests.support.ranks import run_on_ranks

# B sequences, L length, D model, H heads, C channels of a head, F hidden units
B, L, D, H, C, HIDDEN = 3, 5, 12, 4, 6, 20
PLAN = Plan(
    (
        ("layer.q.weight", Column()),
        ("layer.k.weight", Column("tp_row_heads")),
        ("layer.v.weight", Column("tp_row_heads")),
        ("layer.bias.weight", Channels("tp", dim=1)),
        ("layer.out.weight", Row()),
        ("layer.w1.weight", Column()),
        ("layer.w3.weight", Column()),
        ("layer.w2.weight", Row()),
    )
)


def attention(kv_heads: int, positions: str = "rotary") -> Attention:
    return Attention(sections.Model(d_model=D, num_heads=H, head_size=C, num_kv_heads=kv_heads, positions=positions))  # type: ignore[arg-type]


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: attention(H),
    "grouped heads": lambda: attention(2),
    "one key-value head, T5": lambda: attention(1, "t5"),
    "gated network": lambda: FeedForward(D, HIDDEN, "swiglu"),
    "network in tiles": lambda: FeedForward(D, HIDDEN, "gelu").in_tiles(5),
}


def drawn(shape: tuple[int, ...], name: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + 7 * sum(map(ord, name))), dtype=torch.float64)


def weight(shape: tuple[int, ...], name: str) -> Tensor:
    """Return random weights, scaled so that a layer's outputs are about as large as its inputs."""
    return 0.3 * drawn(shape, name)


def held(make: Callable[[], nn.Module], mesh: Mesh) -> tuple[nn.Module, dict[str, Layout], dict[str, Tensor]]:
    """Return (the layer with this rank's shards, its layouts, name -> whole value of each parameter)."""
    with torch.device("meta"):
        model = nn.ModuleDict({"layer": make()})
    layouts = lay_out(model, PLAN, tiled_dim=tiled_dim)
    apply(model, PLAN, layouts, mesh)
    values = {name: weight(layout.shape, without_tiles(name)) for name, layout in layouts.items()}
    for name, layout in layouts.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(values[name][layout.region(mesh)].clone()))
    return model, layouts, values


def computed(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Return (output, gradient of the input), and leave the parameters' gradients in .grad."""
    x = drawn((B, L, D), "x").requires_grad_()
    layer = model.layer
    assert isinstance(layer, nn.Module)
    y = layer(x, Context.of(torch.zeros(B, L, dtype=torch.long))) if isinstance(layer, Attention) else layer(x)
    (y * drawn((B, L, D), "weights of outputs")).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def degrees_of(tp: int, kv_heads: int) -> Degrees:
    return Degrees(tp=tp, tp_row_copies=tp // kv_heads if kv_heads < tp else 1)


@pytest.mark.parametrize(
    ("kind", "tp", "kv_heads"),
    [("attention", 2, H), ("grouped heads", 4, 2), ("one key-value head, T5", 2, 1), ("gated network", 4, H), ("network in tiles", 2, H)],
)
def test_a_cut_layer_is_the_whole_one(kind: str, tp: int, kv_heads: int) -> None:
    """Every rank has the whole layer's output and gradient of the input. Gradients of weights, summed over copies, equal its shards."""
    alone, _, whole = held(LAYERS[kind], Mesh.of(Degrees()))
    y, x_grad = computed(alone)
    want: dict[str, Tensor] = {}
    for name, parameter in alone.named_parameters():
        assert parameter.grad is not None
        want.setdefault(without_tiles(name), torch.zeros_like(whole[name]))[lay_out_alone(alone)[name].region(Mesh.of(Degrees()))] = (
            parameter.grad
        )

    def work(rank: int) -> tuple[Tensor, Tensor, dict[str, Any], list[tuple[int, int]]]:
        mesh = process.connect(degrees_of(tp, kv_heads), World(rank, tp))
        model, layouts, _ = held(LAYERS[kind], mesh)
        got = computed(model)
        counts = mesh.communicator.counts()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        sum_gradients(grads, layouts, mesh)
        parts = {name: [grad, [(part.start, part.stop) for part in layouts[name].region(mesh)]] for name, grad in grads.items()}
        return *got, parts, [(c.calls, c.bytes) for (axis, call), c in counts.items() if (axis, call) == ("tp", "all_reduce")]

    for y_here, x_grad_here, parts, counts in run_on_ranks(work, tp):
        torch.testing.assert_close(y_here, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x_grad_here, x_grad, rtol=1e-12, atol=1e-12)
        assert parts.keys() == {name for name, _ in alone.named_parameters()}
        for name, (grad, region) in parts.items():
            part = want[without_tiles(name)][tuple(slice(start, stop) for start, stop in region)]
            torch.testing.assert_close(grad, part, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
        assert counts == [(2, 2 * B * L * D * 8)]  # one sum in the backward pass of `enter`, one in the forward pass of `leave`


def lay_out_alone(model: nn.Module) -> dict[str, Layout]:
    return lay_out(model, PLAN, tiled_dim=tiled_dim)


def test_copies_of_a_key_value_head_are_named_by_their_layout() -> None:
    """With two key-value heads on four ranks, ranks 0 and 1 hold the first and sum its gradients, ranks 2 and 3 the second."""
    layout = Column("tp_row_heads").layout("layer.k.weight", (2 * C, D))
    meshes = [Mesh.of(degrees_of(4, 2), rank) for rank in range(4)]
    assert [layout.region(mesh)[0] for mesh in meshes] == [slice(0, C)] * 2 + [slice(C, 2 * C)] * 2
    assert [mesh.axis(*layout.summed_over()).ranks for mesh in meshes] == [(0, 1)] * 2 + [(2, 3)] * 2
    assert [layout.is_owner(mesh) for mesh in meshes] == [True, False, True, False]


# --- torch's own styles -----------------------------------------------------------------------------------------------


class Theirs(nn.Module):
    """Attention and feed-forward network of torch's linears, to which torch's styles are applied. The number of heads follows from the
    shards."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {
            "q": (D, H * C),
            "k": (D, 2 * C),
            "v": (D, 2 * C),
            "out": (H * C, D),
            "w1": (D, HIDDEN),
            "w3": (D, HIDDEN),
            "w2": (HIDDEN, D),
        }
        for name, (into, out) in sizes.items():
            setattr(self, name, nn.Linear(into, out, bias=False, dtype=torch.float64))

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = (rearrange(linear(x_BLD), "b l (h c) -> b h l c", c=C) for linear in (self.q, self.k, self.v))  # type: ignore[operator]
        place_L = torch.arange(L)
        mixed = softmax_core(rotate(q, place_L), rotate(k, place_L), v, context=Context.of(torch.zeros(B, L, dtype=torch.long)), bias=None)
        x_BLD = x_BLD + self.out(rearrange(mixed, "b h l c -> b l (h c)"))  # type: ignore[operator]
        return x_BLD + self.w2(F.silu(self.w1(x_BLD)) * self.w3(x_BLD))  # type: ignore[operator]


def test_torchs_styles_give_the_same() -> None:
    """Outputs, gradients and shards equal those of torch's parallelize_module with ColwiseParallel and RowwiseParallel."""

    def work(rank: int) -> None:
        mesh = process.connect(Degrees(tp=2), World(rank, 2))
        warnings.filterwarnings("ignore", category=FutureWarning)
        theirs = Theirs()
        first, _, _ = held(lambda: attention(2), mesh)
        second, _, _ = held(LAYERS["gated network"], mesh)
        ours = {**dict(first.named_parameters()), **dict(second.named_parameters())}
        for name, parameter in theirs.named_parameters():
            parameter.data = weight(tuple(parameter.shape), f"layer.{name}")
        columns = {name: ColwiseParallel() for name in ("q", "k", "v", "w1", "w3")}
        parallelize_module(
            theirs, DeviceMesh.from_group(mesh.axis("tp").group, "cpu"), columns | {name: RowwiseParallel() for name in ("out", "w2")}
        )
        x, y = (drawn((B, L, D), "x").requires_grad_() for _ in range(2))
        want = theirs(x)
        middle = y + first.layer(y, Context.of(torch.zeros(B, L, dtype=torch.long)))  # type: ignore[operator]
        got = middle + second.layer(middle)  # type: ignore[operator]
        for out in (want, got):
            (out * drawn((B, L, D), "weights of outputs")).sum().backward()
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(y.grad, x.grad, rtol=1e-12, atol=1e-12)
        for name, parameter in theirs.named_parameters():
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            torch.testing.assert_close(ours[f"layer.{name}"].grad, grad.to_local(), rtol=1e-12, atol=1e-12)

    run_on_ranks(work, 2)
