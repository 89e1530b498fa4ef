"""2D, 2.5D and 3D tensor parallelism equal the whole layer in outputs and gradients. Shards and bytes sent equal the formulas."""

from __future__ import annotations

import math
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.nn.linear import Linear, Norm
from moe.nn.vocabulary import PADDING, Rows, look_up, summed_loss
from parallel.data.tiling import Products, one_by_one
from parallel.errors import BadInput
from parallel.mesh.gradients import sum_gradients
from parallel.mesh.grids import GRIDS as GRIDS_OF
from parallel.mesh.grids import grid_of
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.weight_gradient import defer_gradients
from parallel.process import process
from parallel.process.process import World
from parallel.tensor.grid import ChannelsNorm, Exchanged
from parallel.tensor.linear_2d import Block
from parallel.tensor.linear_3d import Cube
from parallel.tensor.style import Plan, Style, apply, lay_out
from parallel.tensor.vocabulary import VocabularyBlock, VocabularyCube
from tests.support.ranks import each_case, run_on_ranks

# B sequences, L length, D model, V vocabulary
B, L, D, HIDDEN, V = 12, 3, 12, 36, 11
GRIDS = {
    "2d": Degrees(tp=4, tp_col=2),
    "2d of 9": Degrees(tp=9, tp_col=3),
    "2.5d": Degrees(tp=8, tp_col=2, tp_depth=2),
    "3d": Degrees(tp=8, tp_col=2, tp_depth=2),
}


def drawn(shape: tuple[int, ...], name: str) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, name))), dtype=torch.float64)


class PlainNorm(nn.Module):
    """The model's norm, computed in fp64."""

    def __init__(self, norm: Norm) -> None:
        super().__init__()
        self.kind, self.weight = norm.kind, norm.weight

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True) if self.kind == "layernorm" else x
        return centered / (centered.square().mean(-1, keepdim=True) + (1e-5 if self.kind == "layernorm" else 1e-6)).sqrt() * self.weight


class Network(nn.Module):
    """A layer with two products of x, and one product of their result. Each of the `gates` outputs of the second product multiplies
    several hidden units, as a key-value head serves several query heads."""

    def __init__(self, gates: int) -> None:
        super().__init__()
        self.one, self.gate, self.two = Linear(D, HIDDEN), Linear(D, gates), Linear(HIDDEN, D)
        self.products: Products = one_by_one

    def forward(self, x: Tensor) -> Tensor:
        one, gate = self.products(x, [self.one, self.gate])
        return self.two(F.silu(one) * gate.repeat_interleave(one.shape[-1] // gate.shape[-1], dim=-1))


class Small(nn.Module):
    def __init__(self, gates: int) -> None:
        super().__init__()
        self.norm, self.network = Norm(D, "layernorm"), Network(gates)
        self.table, self.last = Rows(slice(0, V), D), Norm(D, "rmsnorm")

    def forward(self, tokens_BL: Tensor, targets_BL: Tensor, chunks: int) -> tuple[Tensor, Tensor]:
        x = look_up(tokens_BL, self.table)
        x = x + self.network(self.norm(x))
        return x, summed_loss(self.last(x), targets_BL, self.table, chunks=chunks)


def plan(kind: str) -> Plan:
    cube = kind == "3d"
    rows: tuple[tuple[str, Style], ...] = (
        ("network.two.weight", Cube("second") if cube else Block()),
        ("network.gate.weight", Cube("first", copied=True) if cube else Block("tp_col_heads")),
        ("network.one.weight", Cube("first") if cube else Block()),
        ("table.weight", VocabularyCube() if cube else VocabularyBlock()),
        ("norm.weight", ChannelsNorm()),
        ("last.weight", ChannelsNorm()),
    )
    return Plan(rows)


def held(kind: str, mesh: Mesh, gates: int) -> tuple[Small, dict[str, Layout]]:
    with torch.device("meta"):
        model = Small(gates)
    layouts = lay_out(model, plan(kind), tiled_dim=lambda _: 0)
    if mesh.degrees.tp > 1:
        apply(model, plan(kind), layouts, mesh)
    for name, layout in layouts.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, nn.Parameter(0.3 * drawn(layout.shape, name)[layout.region(mesh)].clone()))
    if mesh.degrees.tp == 1:
        model.norm, model.last = PlainNorm(model.norm), PlainNorm(model.last)  # type: ignore[assignment]
    return model, layouts


TOKENS = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(V, (B, L), generator=torch.Generator().manual_seed(2)).index_fill_(0, torch.tensor([5]), PADDING)
WEIGHTS = drawn((B, L, D), "weights of outputs")


def part_of(mesh: Mesh) -> tuple[slice, slice]:
    """Return the slices of the batch and of the channels that this rank has."""
    place = mesh.axis("tp_depth", "tp_row")
    each, width = B // place.size, D // mesh.axis("tp_col").size
    column = mesh.axis("tp_col").index
    return slice(place.index * each, (place.index + 1) * each), slice(column * width, (column + 1) * width)


# kind, gates (if fewer than the ranks of a side, ranks hold copies), chunks of the loss, whether gradients of weights are deferred
MODELS = [
    ("2d", 12, 1, True),
    ("2d of 9", 12, 2, False),
    ("2.5d", 1, 1, False),
    ("3d", 12, 1, True),
    ("2d of 9", 1, 1, True),
    ("3d", 1, 2, False),
]


@cache
def whole_one(gates: int) -> tuple[Small, Tensor, Tensor]:
    """Return the whole model with its gradients, its output, and its loss."""
    whole, _ = held("2d", Mesh.of(Degrees()), gates)
    x, _ = whole(TOKENS, TARGETS, 1)
    logits = whole.last(x) @ whole.table.weight.t()
    loss = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum", ignore_index=PADDING)
    ((x * WEIGHTS).sum() + loss).backward()
    return whole, x.detach(), loss.detach()


def on_grid(rank: int, kind: str, gates: int, chunks: int, waits: bool) -> tuple[Any, ...]:
    copies = {f"{'tp_row' if kind == '3d' else 'tp_col'}_copies": GRIDS[kind].tp_col if gates == 1 else 1}
    degrees = replace(GRIDS[kind], **copies)
    mesh = process.connect(degrees, World(rank, degrees.tp))
    model, layouts = held(kind, mesh, gates)
    sequences, channels = part_of(mesh)
    x, loss = model(TOKENS[sequences], TARGETS[sequences], chunks)
    with defer_gradients() if waits else nullcontext() as pending:
        ((x * WEIGHTS[sequences, :, channels]).sum() + loss).backward()
    if pending is not None:
        assert model.network.one.weight.grad is None and model.network.gate.weight.grad is None
        pending.compute()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    sum_gradients(grads, layouts, mesh)
    boxes = {name: [(run.start, run.stop) for run in layouts[name].region(mesh)] for name in grads}
    where = [(run.start, run.stop) for run in (sequences, channels)]
    return x.detach(), where, loss.detach(), grads, boxes


@pytest.mark.parametrize("ranks", [4, 8, 9])
def test_a_model_on_a_grid_is_the_whole_one(ranks: int) -> None:
    """A rank's output and gradients equal its shards of the whole model's: embedding, norms, products and loss."""
    cases = [case for case in MODELS if GRIDS[case[0]].tp == ranks]
    for case, found in zip(cases, each_case(on_grid, ranks, cases), strict=True):
        whole, x, loss = whole_one(case[1])
        total = torch.zeros((), dtype=torch.float64)
        for x_here, (sequences, channels), loss_here, grads, boxes in found:
            torch.testing.assert_close(x_here, x[slice(*sequences), :, slice(*channels)], rtol=1e-12, atol=1e-12, msg=str(case))
            total += loss_here if channels[0] == 0 else 0
            assert grads.keys() == {name for name, _ in whole.named_parameters()}, case
            for name, parameter in whole.named_parameters():
                assert parameter.grad is not None
                part = parameter.grad[tuple(slice(*run) for run in boxes[name])]
                torch.testing.assert_close(grads[name], part, rtol=1e-12, atol=1e-12, msg=f"{case} {name}")
        torch.testing.assert_close(total, loss, rtol=1e-12, atol=0, msg=str(case))


def test_tokens_come_to_one_rank_whole_and_go_back() -> None:
    """Exchanged exchanges shards of the channels for runs of tokens, whose lengths may differ, and back, with correct gradients."""
    x = drawn((7, 6), "tokens")

    def work(rank: int) -> None:
        axis = process.connect(Degrees(tp=4, tp_col=2), World(rank, 4)).axis("tp_col")
        mine, exchange = x[:, 3 * axis.index : 3 * axis.index + 3].clone().requires_grad_(), Exchanged(axis)
        assert torch.equal(exchange.cut(mine), x.tensor_split(2)[axis.index])
        back = exchange.join(exchange.cut(mine).sin(), total=7)
        assert torch.equal(back, mine.sin())
        back.sum().backward()
        torch.testing.assert_close(mine.grad, mine.detach().cos(), rtol=1e-12, atol=0)

    run_on_ranks(work, 4)


@pytest.mark.parametrize(
    ("kind", "tp", "depth", "grid"),
    [("2d", 9, None, (1, 3, 3)), ("3d", 64, None, (4, 4, 4)), ("2.5d", 8, None, (2, 2, 2)), ("2.5d", 36, 4, (4, 3, 3))],
)
def test_grids_multiply_to_the_ranks(kind: str, tp: int, depth: int | None, grid: tuple[int, int, int]) -> None:
    assert made(kind, tp, depth=depth) == grid


def test_every_number_that_a_refusal_names_makes_a_grid() -> None:
    for kind in GRIDS_OF:
        for tp in range(2, 70):
            try:
                made(kind, tp)
            except BadInput as refused:
                named = [int(n) for n in re.findall(r"\d+", str(refused.fix).split(", or")[0])]
                assert named and all(math.prod(made(kind, n)) == n for n in named), (kind, tp, refused)


def made(kind: str, tp: int, *, depth: int | None = None) -> tuple[int, int, int]:
    found = grid_of(kind, tp, depth, sides=range(2, 12))
    return found.depth, found.rows, found.columns
