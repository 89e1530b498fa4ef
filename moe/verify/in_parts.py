"""Makes one process sum partial results in the order of tensor-parallel ranks. In 16 bits, each partial result is rounded, so the sum
differs from that of a whole product; moe/verify/expected.py measures by how much.

    in parts     as 1D tensor parallelism: y = x W1_0 W2_0 + x W1_1 W2_1, in which each partial result has the compute dtype
    in blocks    as a q x q grid of ranks: y_j = sum over t of x_t W_tj, in which each term has the compute dtype

In the backward pass the gradients of x and of the encoder's output, which cross-attention reads, are summed in the same order.
"""

from __future__ import annotations

from copy import copy
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from moe.model.transformer import Transformer
from moe.nn.core import Bias
from moe.nn.linear import Linear
from moe.nn.vocabulary import Product, Rows, TiledRows
from moe.parallelize.plan import lay_out, plan_for
from moe.recipe.sections import Run
from parallel.mesh.layout import Box
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import sum_dtype
from parallel.tensor.style import fits


def in_parts(model: Transformer, run: Run, *, first: int) -> None:
    """Make the layers of a whole model, except MoE layers, sum the partial results that tp ranks have in the recipe `run`. The first is
    that of rank `first`.
    """
    degrees = run.mesh_degrees()
    layouts = lay_out(model, plan_for(run))
    for number, block in enumerate(model.layers):
        for name in ("attention", "cross", "ffn"):
            layer = getattr(block, name)
            if layer is not None:
                held = {n: layouts[f"layers.{number}.{name}.{n}"] for n, _ in layer.named_parameters()}
                meshes = [Mesh.of(degrees, rank % degrees.tp) for rank in range(first, first + degrees.tp)]
                regions = [{n: layout.region(mesh) for n, layout in held.items()} for mesh in meshes]
                layer.forward = partial(_summed, _without_hooks(layer), regions)


def _without_hooks(layer: nn.Module) -> nn.Module:
    """A shallow copy without hooks. It computes the partial results, so that the layer's own hooks see only their sum."""
    other = copy(layer)
    other._forward_hooks, other._forward_pre_hooks = type(layer._forward_hooks)(), type(layer._forward_pre_hooks)()
    return other


def _summed(layer: nn.Module, regions: list[dict[str, Box]], x: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Return the sum of the ranks' partial results. regions: for each rank, parameter -> its slice. Each partial result gets its own view
    of x and of the encoder's output, so that autograd also sums their gradients by rank.
    """
    held = dict(layer.named_parameters())
    shares = []
    for region in regions:
        part = {name: held[name][box] for name, box in region.items()}
        given = {name: _share_of(value, layer, region) for name, value in named.items()}
        shares.append(functional_call(layer, part, (x.view_as(x), *rest), given))
    total: Tensor = reduce(Tensor.add, shares)
    return total


def _share_of(given: Any, layer: nn.Module, region: dict[str, Box]) -> Any:
    """Return a layer's keyword argument for one rank: of a position bias only the rank's heads, of a tensor a new view."""
    if isinstance(given, Bias):
        rows = region["q.weight"][0]
        return given._replace(table_UH=given.table_UH[:, rows.start // layer.head_size : rows.stop // layer.head_size])
    return given.view_as(given) if isinstance(given, Tensor) else given


def in_blocks(model: Transformer, side: int) -> None:
    """Make the attention, dense networks and untied head of a whole model multiply in side x side blocks, but not its MoE layers."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and fits("layers.*.attention.*", name) | fits("layers.*.ffn.*", name):
            module.product = partial(_product, side=side)
    if isinstance(model.head, Rows | TiledRows):
        model.head.others = _Alone(side)


def _product(x: Tensor, weight_OI: Tensor, *, side: int) -> Tensor:
    """x W^T in side x side blocks. Each block of outputs gets its own view of x, so that its gradient is rounded before the sum."""
    outputs = []
    for rows in weight_OI.to(x.dtype).tensor_split(side, 0):
        pairs = zip(x.view_as(x).tensor_split(side, -1), rows.tensor_split(side, 1), strict=True)
        shares = torch.stack([F.linear(x_t, matrix) for x_t, matrix in pairs])
        outputs.append(shares.to(sum_dtype(x.dtype)).sum(0).to(x.dtype))
    return torch.cat(outputs, -1)


class _Alone:
    """An `Others` (moe/nn/vocabulary.py) of one process: sends nothing, and makes the head multiply in blocks."""

    def __init__(self, side: int) -> None:
        self.product: Product | None = partial(_product, side=side)

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    columns = rows = enter = targets = scores = loss = logits = tokens
