"""2D tensor parallelism: x and every weight are split into blocks on a grid of q x q ranks; SUMMA computes the products.

    x = [ x_00 x_01 ]    sequences by row       W^T = [ W_00 W_01 ]    inputs by row         y_ij = sum over t of x_it W_tj
        [ x_10 x_11 ]    channels by column           [ W_10 W_11 ]    outputs by column

    step t      broadcast x_it along row i and W_tj along column j, then multiply; meanwhile the blocks of step t + 1 are sent
    backward    dx_it = sum over j of dy_ij W_tj^T, on rank (i, t)           dW_tj = sum over i of x_it^T dy_ij, on rank (t, j)

Outputs are split like inputs, so nothing is gathered between layers. Several products of one x (q, k and v; w1 and w3) are computed as
one, with concatenated matrices, so x is sent once. Ranks of a row have the same tokens; the loss is summed over rows.
Costs: docs/parallel/tensor_2d.md. Sources: SUMMA (van de Geijn and Watts, 1997); Optimus (arXiv 2104.05343).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.mesh.collectives import start_broadcast, start_sum_to
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh, view_of
from parallel.numerics.precision import sum_dtype
from parallel.numerics.weight_gradient import gradient_of, gradients_of_trained
from parallel.tensor.grid import apart, fill_products, together
from parallel.tensor.style import Shape, Style

# N tokens of this rank's row, I inputs and O outputs of this rank's block


@dataclass(frozen=True)
class Block(Style):
    """A weight [out, in] in blocks: outputs over tp_col, inputs over tp_row. Fills two slots (replaceable functions, style.py): `product`
    of its module, and `products` of its layer.

    outputs: mesh axis that splits the outputs, tp_col or tp_col_heads. Projections to keys and values take tp_col_heads: with fewer
    key-value heads than grid columns, adjacent columns share a head and hold copies of its block."""

    outputs: str = "tp_col"

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: self.outputs, 1: "tp_row"}, view_of(self.outputs, "tp_row"), alike=())

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for name in layouts:
            fill_products(model, name.rpartition(".")[0], partial(products_of, mesh))


def products_of(mesh: Mesh, label: str) -> partial[Sequence[Tensor]]:
    """Return `products` as a function of x and the weights, for this rank's row and column of the grid. label: for error messages."""
    row, column = (mesh.axis(axis, label=label) for axis in ("tp_col", "tp_row"))  # ranks of a row differ in their column
    return partial(products, row=row, column=column)


def products(x: Tensor, weights_OI: Sequence[Tensor], narrow_rI: Sequence[Tensor] = (), *, row: Axis, column: Axis) -> Sequence[Tensor]:
    """Return x W^T [..., O] for each W, in x's dtype, given this rank's blocks x [..., I] and W [O, I] of any dtype; then x A^T [..., r]
    for each LoRA matrix A [r, I] of `narrow_rI`, which is cut along its inputs, but not along r.

    `row`, `column`: the ranks in this rank's row and column of the grid. Partial products are summed in fp32 or wider. Blocks of other
    ranks are not saved for the backward pass."""
    found: tuple[Tensor, ...] = _Summa.apply(x, row, column, len(weights_OI), *weights_OI, *narrow_rI)
    return found


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Axis, column: Axis, wide: int, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[4:]) else None, *weights_OI)
        ctx.weights, ctx.row, ctx.column, ctx.wide = weights_OI, row, column, wide
        total: Tensor | None = None
        for x_NI, matrix_OI in zip(blocks(x, row), blocks(together(weights_OI, dtype=x.dtype), column), strict=True):
            share = F.linear(x_NI, matrix_OI)
            total = share.to(sum_dtype(x.dtype)) if total is None else total.add_(share)
        assert total is not None
        return apart(total.to(x.dtype), [len(weight) for weight in weights_OI])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights_OI = ctx.saved_tensors
        row, column = ctx.row.backward(), ctx.column.backward()
        weights, grad = ctx.weights, together(grads, dim=-1)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = summed((grad @ matrix_OI for matrix_OI in blocks(together(weights_OI, dtype=grad.dtype), column)), row)

        def of_weights(which: Sequence[int]) -> Sequence[Tensor]:
            mine = grad if len(which) == len(grads) else together([grads[i] for i in which], dim=-1)
            found = summed((gradient_of(weights[which[0]], mine, x_NI) for x_NI in blocks(x, row)), column)
            return torch.split(found, [len(weights[i]) for i in which])

        return grad_x, None, None, None, *gradients_of_trained(weights, of_weights, wide=ctx.wide)


def blocks(mine: Tensor, axis: Axis) -> Iterator[Tensor]:
    """Yield the tensor `mine` of rank 0, 1, ... of the axis. The next one is broadcast while the caller uses this one. Collective."""
    following = start_broadcast(mine, axis, root=0)
    for place in range(axis.size):
        block = following.wait()
        if place + 1 < axis.size:
            following = start_broadcast(mine, axis, root=place + 1)
        yield block


def summed(shares: Iterable[Tensor], axis: Axis) -> Tensor:
    """Sum over ranks: rank i gets the sum of all ranks' i-th tensor of `shares`. Each sum overlaps with computing the next tensor."""
    mine = before = None
    for place, share in enumerate(shares):
        if before is not None:
            before.wait()
        before = start_sum_to(share.contiguous(), axis, root=place)
        mine = before if place == axis.index else mine
    assert mine is not None and before is not None
    before.wait()
    return mine.wait()
