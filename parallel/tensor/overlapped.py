"""1D tensor parallelism in chunks: the collective of one chunk overlaps with the products of the next.

    row, forward        link     |         | sum 0   | sum 1   | sum 2   | sum 3 |        4 chunks: the last sum overlaps with nothing
                        compute  | h_0 W2  | h_1 W2  | h_2 W2  | h_3 W2  |

                        forward                                     backward
    row                 sum of h_i W2 during h_i+1 W2               nothing to send
    row, sliced         reduce-scatter instead of sum               dy_i+1 is gathered during dy_i W2^T
    columns             nothing to send                             sum of dy_i W1^T during dy_i+1 W1^T, then during the gradients of W1
    columns, sliced     x_i+1 is gathered during x_i W1             reduce-scatter instead of sum

row: row-parallel product, columns: column-parallel products, sum: all-reduce, sliced: with sequence parallelism. In the backward pass of
columns one chunk is enough, because its sum overlaps with the products that give the weights' gradients. If sliced, a chunk has some
positions of each rank's shard, so each rank gets its own positions of each chunk. Results equal linear_1d.py up to rounding. Costs:
docs/parallel/tensor_1d.md. Source: Wang et al., Overlap communication with dependent computation (ASPLOS 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from parallel.mesh.collectives import Started, start_gather, start_scatter_sum, start_sum
from parallel.mesh.layout import cut
from parallel.mesh.mesh import Axis
from parallel.numerics.precision import sum_dtype
from parallel.numerics.weight_gradient import gradient_of, gradients_of_trained

# B sequences, L length, l length of a shard, I inputs and O outputs on this rank, T tokens, R ranks, n positions of a chunk


def row_product(h_BLI: Tensor, weight_OI: Tensor, *, axis: Axis, chunks: int, sliced: bool) -> Tensor:
    """Return the sum over the axis of h W^T, in h's dtype: [B, L, O], or if `sliced` this rank's [B, l, O], computed in `chunks` chunks."""
    product = _SlicedRow if sliced else _Row
    y: Tensor = product.apply(h_BLI, weight_OI, axis, chunks)
    return y


def column_products(
    x: Tensor,
    weights_OI: Sequence[Tensor],
    narrow_rI: Sequence[Tensor] = (),
    *,
    axis: Axis,
    chunks: int = 1,
    sliced: bool = False,
    recast: bool = False,
) -> tuple[Tensor, ...]:
    """Return x W^T [B, L, O] for each W, then x A^T [B, L, r] for each LoRA matrix A [r, I] of `narrow_rI`, in x's dtype. Each rank holds
    all of A. x is [B, L, I], equal on all ranks, or if `sliced` each rank's [B, l, I].

    The gradient of x is summed over the axis. recast: save no cast weights for the backward pass, but cast them again (moe/nn/linear.py).
    chunks: largest number of chunks of positions; the collective of one chunk overlaps with the products of the next."""
    products = _SlicedColumns if sliced else _Columns
    found: tuple[Tensor, ...] = products.apply(x, axis, chunks, recast, len(weights_OI), *weights_OI, *narrow_rI)
    return found


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BLI: Tensor, weight_OI: Tensor, axis: Axis, chunks: int) -> Tensor:
        ctx.save_for_backward(h_BLI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.weight = weight_OI
        matrix, h_TI = weight_OI.to(h_BLI.dtype), h_BLI.flatten(0, -2)
        y_TO = h_TI.new_empty(len(h_TI), len(matrix))
        sums = [start_sum(torch.mm(h_TI[chunk], matrix.t(), out=y_TO[chunk]), axis) for chunk in cut(len(h_TI), chunks)]
        for started in sums:
            started.wait()
        return y_TO.view(*h_BLI.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h_BLI, weight_OI = ctx.saved_tensors
        return grad @ weight_OI.to(grad.dtype), *_weight_gradients((ctx.weight,), [grad], h_BLI), None, None


class _SlicedRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BLI: Tensor, weight_OI: Tensor, axis: Axis, chunks: int) -> Tensor:
        ctx.save_for_backward(h_BLI if ctx.needs_input_grad[1] else None, weight_OI)
        ctx.weight, ctx.axis, ctx.chunks = weight_OI, axis, chunks
        matrix, h_RBlI = weight_OI.to(h_BLI.dtype), rearrange(h_BLI, "b (r l) i -> r b l i", r=axis.size)
        cuts = cut(h_RBlI.shape[2], chunks)
        sums = [start_scatter_sum(F.linear(h_RBlI[:, :, chunk], matrix), axis) for chunk in cuts]
        return torch.cat([started.wait().squeeze(0) for started in sums], 1)

    @staticmethod
    def backward(ctx: Any, grad_BlO: Tensor) -> tuple[Tensor | None, ...]:
        h_BLI, weight_OI = ctx.saved_tensors
        matrix = weight_OI.to(grad_BlO.dtype)
        grads, shares = [], []
        for grad_RBnO in _gathered(grad_BlO, ctx.axis.backward(), ctx.chunks):
            grads.append(grad_RBnO)
            shares.append(grad_RBnO @ matrix)
        return _joined(shares), *_weight_gradients((ctx.weight,), [_joined(grads)], h_BLI), None, None


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLI: Tensor, axis: Axis, chunks: int, recast: bool, wide: int, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        matrices = [weight.to(x_BLI.dtype) for weight in weights_OI]
        ctx.save_for_backward(x_BLI if any(ctx.needs_input_grad[5:]) else None, *(weights_OI if recast else matrices))
        ctx.weights, ctx.axis, ctx.chunks, ctx.wide = weights_OI, axis, chunks, wide
        return tuple(F.linear(x_BLI, matrix) for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BLI, *saved = ctx.saved_tensors
        axis, matrices = ctx.axis.backward(), [weight.to(grads[0].dtype) for weight in saved]
        grads_TO = [grad.flatten(0, -2) for grad in grads]
        share_TI = grads_TO[0].new_empty(len(grads_TO[0]), matrices[0].shape[1])
        sums = []
        for chunk in cut(len(share_TI), ctx.chunks) if ctx.needs_input_grad[0] else ():
            sums.append(start_sum(_share([grad_TO[chunk] for grad_TO in grads_TO], matrices, out=share_TI[chunk]), axis))
        later = _weight_gradients(ctx.weights, grads, x_BLI, wide=ctx.wide)
        for started in sums:
            started.wait()
        return share_TI.view(*grads[0].shape[:-1], -1) if sums else None, None, None, None, None, *later


class _SlicedColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BlI: Tensor, axis: Axis, chunks: int, recast: bool, wide: int, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        matrices = [weight.to(x_BlI.dtype) for weight in weights_OI]
        inputs, products = [], []
        for x_RBnI in _gathered(x_BlI, axis, chunks):
            inputs.append(x_RBnI)
            products.append([F.linear(x_RBnI, matrix) for matrix in matrices])
        x_BLI = _joined(inputs) if any(ctx.needs_input_grad[5:]) else None
        ctx.save_for_backward(x_BLI, *(weights_OI if recast else matrices))
        ctx.weights, ctx.axis, ctx.chunks, ctx.wide = weights_OI, axis, chunks, wide
        return tuple(_joined(parts) for parts in zip(*products, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BLI, *saved = ctx.saved_tensors
        axis, matrices = ctx.axis.backward(), [weight.to(grads[0].dtype) for weight in saved]
        wide = sum_dtype(grads[0].dtype)
        grads_BRlO = [rearrange(grad, "b (r l) o -> b r l o", r=axis.size) for grad in grads]
        sums = []
        for chunk in cut(grads_BRlO[0].shape[2], ctx.chunks) if ctx.needs_input_grad[0] else ():
            share_TI = _share([grad_BRlO[:, :, chunk].flatten(0, -2) for grad_BRlO in grads_BRlO], matrices)
            share_RBnI = rearrange(share_TI, "(b r n) i -> r b n i", b=len(grads[0]), r=axis.size)
            sums.append(start_scatter_sum(share_RBnI.to(wide), axis))
        later = _weight_gradients(ctx.weights, grads, x_BLI, wide=ctx.wide)
        grad_BlI = torch.cat([started.wait().squeeze(0) for started in sums], 1).to(grads[0].dtype) if sums else None
        return grad_BlI, None, None, None, None, *later


def _gathered(mine_BlI: Tensor, axis: Axis, chunks: int) -> Iterator[Tensor]:
    """Start to gather `mine` in chunks. Return an iterator over the gathered chunks [R, B, n, I]; [1, B, L, I] for a single chunk."""
    gathers: list[Started] = [start_gather(mine_BlI[:, chunk].unsqueeze(0), axis) for chunk in cut(mine_BlI.shape[1], chunks)]
    if len(gathers) == 1:
        return iter([rearrange(gathers[0].wait(), "r b l i -> 1 b (r l) i")])
    return (started.wait() for started in gathers)


def _joined(chunks_RBnI: Sequence[Tensor]) -> Tensor:
    """Join gathered chunks to [B, L, I], with positions in the sequence's order."""
    whole_RBlI = chunks_RBnI[0] if len(chunks_RBnI) == 1 else torch.cat(list(chunks_RBnI), 2)
    return rearrange(whole_RBlI, "r b l i -> b (r l) i")


def _share(grads_TO: Sequence[Tensor], matrices_OI: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Return the gradient of x, [T, I], before it is summed over ranks: the sum of grads_TO[i] @ matrices_OI[i] over the products."""
    found = torch.mm(grads_TO[0], matrices_OI[0], out=out)
    for grad_TO, matrix_OI in zip(grads_TO[1:], matrices_OI[1:], strict=True):
        torch.addmm(found, grad_TO, matrix_OI, out=found)
    return found


def _weight_gradients(
    weights_OI: tuple[Tensor, ...], grads: Sequence[Tensor], x: Tensor | None, *, wide: int | None = None
) -> Sequence[Tensor | None]:
    """Return the weights' gradients; None for a frozen weight, and for a gradient deferred to a later W pass (weight_gradient.py). grads:
    gradient of each product's output. x: input of the products; None if all weights are frozen. wide: only the first `wide` weights'
    gradients may be deferred; None: all."""
    if x is None:
        return [None] * len(weights_OI)
    return gradients_of_trained(weights_OI, lambda which: [gradient_of(weights_OI[i], grads[i], x) for i in which], wide=wide)
