"""2D tensor parallelism: x and every weight lie in blocks on a grid of q x q ranks, and products go by SUMMA.

    x = [ x_00 x_01 ]    sequences by row       W^T = [ W_00 W_01 ]    inputs by row         y_ij = sum over t of x_it W_tj
        [ x_10 x_11 ]    channels by column           [ W_10 W_11 ]    outputs by column

    step t      x_it goes along row i, W_tj along column j, both multiply; those of step t + 1 are on their way meanwhile
    backward    dx_it = sum over j of dy_ij W_tj^T, summed to column t       dW_tj = sum over i of x_it^T dy_ij, summed to row t

The outputs lie as the inputs do, so nothing is gathered between layers: 1/q^2 of the weights, of their gradients and of all activations
a rank, and one block of another rank's beside them at a time (two, with the one on its way). Several products of one x (q, k and v; w1
and w3) are one, of their matrices together, so x travels once for all.

Cost of a product, sent by a rank: (q - 1) of its blocks of x and W forward, twice as much backward. A row's ranks have the same tokens,
a column's have others: the loss is summed over rows. Sources: SUMMA (van de Geijn and Watts, 1997); Optimus (arXiv 2104.05343).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import start_broadcast, start_sum_to
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh, view_of
from parallel.precision import gradient_dtype
from parallel.tensor.grid import apart, fill_products, together
from parallel.tensor.style import Shape
from parallel.weight_gradient import gradients_or_later

# N tokens of this rank's row, I inputs and O outputs of this rank's block; X, Y the same of others


@dataclass(frozen=True)
class Block:
    """A weight [out, in] in blocks: outputs over tp_col, inputs over tp_row. Fills `product` of its module and `products` of its layer.

    `outputs` tp_col_heads: of fewer key-value heads than columns, neighbours in a row hold the same block. A product sees no difference.
    """

    outputs: str = "tp_col"

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: self.outputs, 1: "tp_row"}, view_of(self.outputs, "tp_row"), alike=())

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for name in layouts:
            fill_products(model, name.rpartition(".")[0], partial(products_of, mesh))


def products_of(mesh: Mesh, label: str) -> partial[Sequence[Tensor]]:
    """`products` on this rank's row and column of the grid."""
    row, column = (replace(mesh.axis(axis), label=label) for axis in ("tp_col", "tp_row"))  # ranks of a row differ in their column
    return partial(products, row=row, column=column)


def products(x: Tensor, weights_OI: Sequence[Tensor], *, row: Axis, column: Axis) -> Sequence[Tensor]:
    """Of each W x W^T [..., O] in x's dtype, of blocks x [..., I] and W [O, I] in any dtype; `row`, `column`: the ranks of this rank's.

    Partial products are added up in fp32 at least. Kept for the backward pass are the rank's own blocks.
    """
    found: tuple[Tensor, ...] = _Summa.apply(x, row, column, *weights_OI)
    return found


class _Summa(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, row: Axis, column: Axis, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, *weights_OI)
        ctx.weights, ctx.row, ctx.column = weights_OI, row, column
        total: Tensor | None = None
        for x_NI, matrix_OI in zip(blocks(x, row), blocks(together(weights_OI, dtype=x.dtype), column), strict=True):
            share = F.linear(x_NI, matrix_OI)
            total = share.to(torch.promote_types(x.dtype, torch.float32)) if total is None else total.add_(share)
        assert total is not None
        return apart(total.to(x.dtype), [len(weight) for weight in weights_OI])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights_OI = ctx.saved_tensors
        row, column = (replace(axis, label=f"{axis.label} backward") for axis in (ctx.row, ctx.column))
        dtype, grad = gradient_dtype(ctx.weights[0]), together(grads, dim=-1)
        grad_x = summed((grad @ matrix_OI for matrix_OI in blocks(together(weights_OI, dtype=grad.dtype), column)), row)
        sizes = [len(weight) for weight in weights_OI]

        def of_weights() -> Sequence[Tensor]:
            grad_ON = grad.flatten(0, -2).t()
            found = summed(((grad_ON @ x_NI.flatten(0, -2)).to(dtype) for x_NI in blocks(x, row)), column)
            return torch.split(found, sizes)

        return grad_x, None, None, *gradients_or_later(ctx.weights, of_weights)


def blocks(mine: Tensor, axis: Axis) -> Iterator[Tensor]:
    """The tensors of the axis's ranks in turn, the next one on its way while one is used."""
    coming = start_broadcast(mine, axis, root=0)
    for place in range(axis.size):
        block = coming.wait()
        if place + 1 < axis.size:
            coming = start_broadcast(mine, axis, root=place + 1)
        yield block


def summed(shares: Iterable[Tensor], axis: Axis) -> Tensor:
    """Of one share for each rank of the axis the sum of all ranks' shares for this one, each sum on its way while the next is computed."""
    mine = before = None
    for place, share in enumerate(shares):
        if before is not None:
            before.wait()
        before = start_sum_to(share.contiguous(), axis, root=place)
        mine = before if place == axis.index else mine
    assert mine is not None and before is not None
    before.wait()
    return mine.wait()
