"""1D by DTensor equals the whole layer, and torch's own styles applied to torch's modules, also in the collectives that torch counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from moe.checks.together import check_run
from moe.model.initialize import tiled_dim
from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.core import softmax_core
from moe.nn.linear import FeedForward
from moe.nn.rotary import rotate
from moe.parallelize.shown import plan_rows
from moe.recipe import sections
from moe.verify.cases import Case
from parallel.data.tiling import without_tiles
from parallel.mesh.gradients import sum_gradients
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.process import process
from parallel.process.process import World
from parallel.tensor.dtensor import DTensorColumn, DTensorRow
from parallel.tensor.grid import Channels
from parallel.tensor.sliced import SlicedNorm
from parallel.tensor.style import Plan, apply, lay_out
from tests.support.ranks import run_on_ranks

# B sequences, L length, D model, H heads, K key-value heads, C channels of a head
B, L, D, H, K, C, HIDDEN = 3, 8, 12, 4, 2, 6, 20
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "grouped heads": lambda: Attention(sections.Model(d_model=D, num_heads=H, head_size=C, num_kv_heads=K)),
    "T5": lambda: Attention(sections.Model(d_model=D, num_heads=H, head_size=C, positions="t5")),
    "gated network": lambda: FeedForward(D, HIDDEN, "swiglu"),
    "network in tiles": lambda: FeedForward(D, HIDDEN, "gelu").in_tiles(5),
}
ALONE = Mesh.of(Degrees())


def plan(*, sliced: bool) -> Plan:
    column, row, table = DTensorColumn(sliced=sliced), DTensorRow(sliced=sliced), Channels("tp", dim=1)
    columns = tuple((f"**.{name}.weight", column) for name in ("q", "k", "v", "w1", "w3"))
    norms = (("*_norm.weight", SlicedNorm()),) if sliced else ()
    return Plan((*columns, ("**.bias.weight", table), ("**.out.weight", row), ("**.w2.weight", row), *norms))


def drawn(shape: tuple[int, ...], name: str) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + 7 * sum(map(ord, name)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def weight(shape: tuple[int, ...], name: str) -> Tensor:
    """Return random weights, scaled so that a layer's outputs are about as large as its inputs."""
    return 0.3 * drawn(shape, without_tiles(name))


def context() -> Context:
    return Context.of(torch.zeros(B, L, dtype=torch.long))


def of_rank(whole: Tensor, mesh: Mesh, *, sliced: bool) -> Tensor:
    """Return this rank's shard of the sequences' positions if `sliced`, else all."""
    return (whole.chunk(mesh.axis("tp").size, 1)[mesh.axis("tp").index] if sliced else whole).clone()


def held(model: nn.Module, mesh: Mesh, *, sliced: bool) -> dict[str, Layout]:
    """Apply the plan to a model on the meta device, and set the rank's shards of the weights. Return the layouts."""
    layouts = lay_out(model, plan(sliced=sliced), tiled_dim=tiled_dim)
    if mesh.axis("tp").size > 1:
        apply(model, plan(sliced=sliced), layouts, mesh)
    for name, layout in layouts.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(weight(layout.shape, name)[layout.region(mesh)].clone()))
    return layouts


def both_ways(forward: Callable[[Tensor], Tensor], mesh: Mesh, *, sliced: bool) -> tuple[Tensor, Tensor]:
    """Return (output, gradient of the input) of this rank."""
    x = of_rank(drawn((B, L, D), "x"), mesh, sliced=sliced).requires_grad_()
    y = forward(x)
    (y * of_rank(drawn((B, L, D), "weights of outputs"), mesh, sliced=sliced)).sum().backward()
    assert x.grad is not None and type(y) is Tensor and type(x.grad) is Tensor
    return y.detach(), x.grad


def computed(kind: str, mesh: Mesh, *, sliced: bool) -> tuple[Tensor, Tensor, dict[str, tuple[Layout, Tensor]]]:
    """Return (output, gradient of the input, name -> (layout, gradient) of each parameter) of this rank."""
    with torch.device("meta"):
        model = nn.ModuleDict({"layer": LAYERS[kind]()})
    layouts, layer = held(model, mesh, sliced=sliced), model.get_submodule("layer")
    got = both_ways((lambda x: layer(x, context())) if isinstance(layer, Attention) else layer, mesh, sliced=sliced)
    return *got, {name: (layouts[name], p.grad) for name, p in model.named_parameters() if p.grad is not None}


def joined(grads: dict[str, tuple[Layout, Tensor]]) -> dict[str, Tensor]:
    """Return name of each whole parameter -> gradient, joined from its tiles. grads: computed on one process."""
    whole: dict[str, Tensor] = {}
    for name, (layout, grad) in grads.items():
        whole.setdefault(without_tiles(name), torch.zeros(layout.shape, dtype=grad.dtype))[layout.region(ALONE)] = grad
    return whole


@pytest.mark.parametrize("sliced", [False, True])
def test_a_cut_layer_is_the_whole_one(sliced: bool) -> None:
    """A rank's output and gradients equal its shards of the whole layer's, without further sums. Parameters are plain tensors."""
    whole = {kind: computed(kind, ALONE, sliced=False) for kind in LAYERS}

    def work(rank: int) -> None:
        mesh = process.connect(Degrees(tp=2), World(rank, 2))
        for kind, (y, x_grad, grads) in whole.items():
            y_here, x_grad_here, grads_here = computed(kind, mesh, sliced=sliced)
            torch.testing.assert_close(y_here, of_rank(y, mesh, sliced=sliced), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(x_grad_here, of_rank(x_grad, mesh, sliced=sliced), rtol=1e-12, atol=1e-12)
            assert grads_here.keys() == grads.keys()
            for name, (layout, grad) in grads_here.items():
                part = joined(grads)[without_tiles(name)][layout.region(mesh)]
                torch.testing.assert_close(grad, part, rtol=1e-12, atol=1e-12)
                assert type(grad) is Tensor and layout.summed_over() == ("dp", "sp")

    run_on_ranks(work, 2)


# --- torch's own styles -----------------------------------------------------------------------------------------------

SIZES = {"q": (H * C, D), "k": (K * C, D), "v": (K * C, D), "out": (D, H * C), "w1": (HIDDEN, D), "w3": (HIDDEN, D), "w2": (D, HIDDEN)}


class Theirs(nn.Module):
    """A Transformer layer of torch's modules, to which torch's styles are applied. The number of heads follows from the shards."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.ffn = nn.Module(), nn.Module()
        for name, (out, into) in SIZES.items():
            setattr(self.ffn if name.startswith("w") else self.attention, name, nn.Linear(into, out, bias=False, dtype=torch.float64))
        self.attention.forward, self.ffn.forward = self._attend, self._feed
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(D, dtype=torch.float64) for _ in range(2))

    def _attend(self, x_BLD: Tensor) -> Tensor:
        a: Any = self.attention
        q, k, v = (rearrange(linear(x_BLD), "b l (h c) -> b h l c", c=C) for linear in (a.q, a.k, a.v))
        mixed = softmax_core(rotate(q, torch.arange(L)), rotate(k, torch.arange(L)), v, context=context(), bias=None)
        return a.out(rearrange(mixed, "b h l c -> b l (h c)"))  # type: ignore[no-any-return]

    def _feed(self, x_BLD: Tensor) -> Tensor:
        f: Any = self.ffn
        return f.w2(F.silu(f.w1(x_BLD)) * f.w3(x_BLD))  # type: ignore[no-any-return]

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD))
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))  # type: ignore[no-any-return]


def styles(*, sliced: bool) -> dict[str, ParallelStyle]:
    """Return the plan of torch's tutorial of tensor parallelism: path of a module -> style."""
    columns: dict[str, ParallelStyle] = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
    columns |= {f"ffn.{name}": ColwiseParallel() for name in ("w1", "w3")}
    between = Shard(1) if sliced else Replicate()
    enter = {path: PrepareModuleInput(input_layouts=between, desired_input_layouts=Replicate()) for path in ("attention", "ffn")}
    rows = {path: RowwiseParallel(output_layouts=between) for path in ("attention.out", "ffn.w2")}
    norms = {path: SequenceParallel(use_local_output=True) for path in ("attention_norm", "ffn_norm")} if sliced else {}
    return columns | enter | rows | norms


class Ours(nn.Module):
    """The layer of `Theirs` made of the project's modules, with torch's norm, which computes in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention, self.ffn_norm, self.ffn = (
            nn.RMSNorm(D),
            LAYERS["grouped heads"](),
            nn.RMSNorm(D),
            FeedForward(D, HIDDEN, "swiglu"),
        )

    def forward(self, x_BLD: Tensor) -> Tensor:
        x_BLD = x_BLD + self.attention(self.attention_norm(x_BLD), context())
        return x_BLD + self.ffn(self.ffn_norm(x_BLD))  # type: ignore[no-any-return]


@pytest.mark.parametrize("sliced", [False, True])
def test_torchs_styles_give_the_same_by_the_same_collectives(sliced: bool) -> None:
    """Outputs, gradients and collectives equal those of torch's ColwiseParallel, RowwiseParallel and SequenceParallel: for a layer 4 sums,
    or 4 gathers and 4 reduce-scatters."""

    def work(rank: int) -> None:
        mesh = process.connect(Degrees(tp=2), World(rank, 2))
        theirs = Theirs()
        with torch.device("meta"):
            ours = Ours()
        layouts = held(ours, mesh, sliced=sliced)
        for name, parameter in theirs.named_parameters():
            parameter.data = weight(tuple(parameter.shape), name)
        parallelize_module(theirs, DeviceMesh.from_group(mesh.axis("tp").group, "cpu"), styles(sliced=sliced))
        found, calls = [], []
        for layer in (theirs, ours):
            with CommDebugMode() as debug:
                found.append(both_ways(layer, mesh, sliced=sliced))
            calls.append({str(call).rpartition(".")[2]: number for call, number in debug.get_comm_counts().items() if number})
        torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)
        assert calls[0] == calls[1] == ({"all_gather_into_tensor": 4, "reduce_scatter_tensor": 4} if sliced else {"all_reduce": 4})
        grads = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
        sum_gradients(grads, layouts, mesh)
        for name, parameter in theirs.named_parameters():
            grad = parameter.grad
            whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert whole is not None
            torch.testing.assert_close(grads[name], whole[layouts[name].region(mesh)], rtol=1e-12, atol=1e-12)

    run_on_ranks(work, 2)


# --- the whole model --------------------------------------------------------------------------------------------------


def test_the_plan_is_laid_out_without_processes_and_as_1d() -> None:
    """The table of `moe show --plan` has the same shards and copies for `dtensor` as for `1d`."""
    for one, other in (("1d", "dtensor"), ("sliced", "dtensor_sliced")):
        rows = [plan_rows(check_run(Case("gshard", "ddp", 2, 2, 1, "fp32", tp=2, tensor=t).run(), 2), rank=1) for t in (one, other)]
        assert {row["style"] for row in rows[1]} >= {"DTensorColumn", "DTensorRow", "VocabularyRows", "SpreadExperts"}
        alike = ("parameter", "tile", "whole", "here", "copies", "summed_over", "bytes")
        assert [[row[key] for key in alike] for row in rows[0]] == [[row[key] for key in alike] for row in rows[1]]
