"""1D's collectives beside its products: what is summed or gathered over the ranks travels while other products are computed.

    row, forward        link     |         | sum 0   | sum 1   | sum 2   | sum 3 |        of 4 runs the last sum has nothing to hide behind
                        compute  | h_0 W2  | h_1 W2  | h_2 W2  | h_3 W2  |

    columns, forward    link     |  x_0   |  x_1   |  x_2   |  x_3   |                    slices: nor has the first gather
                        compute  |        | x_0 W1 | x_1 W1 | x_2 W1 | x_3 W1 |

                        forward                                     backward
    row                 sum of h_i W2 during h_i+1 W2               nothing to send
    row, slices         its reduce-scatter                          dy_i+1 is gathered during dy_i W2^T
    columns             nothing to send                             sum of dy_i W1^T during dy_i+1 W1^T, then during the gradients of W1
    columns, slices     x_i+1 is gathered during x_i W1             its reduce-scatter

In the backward pass of columns one run is enough: its sum has the weights' gradients to hide behind, which nobody else waits for. The
sums have the same parts, so results are those of linear_1d.py up to the order in which a product adds up. With slices a run is some
places of every rank's slice, so each rank gets its own places of each run. What is gathered is kept whole for the weights' gradients,
as it is without runs. Cost: the same bytes in n calls; products of 1/n of the tokens, which should not be too small.
Sources: Wang et al., Overlap communication with dependent computation via decomposition (ASPLOS 2023), which decomposes the collective;
Megatron-LM (arXiv 1909.08053), whose sum of the input's gradient goes on during the weights'.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from parallel.collectives import Started, start_gather, start_scatter_sum, start_sum
from parallel.layout import Tile
from parallel.mesh import Axis
from parallel.precision import gradient_dtype
from parallel.weight_gradient import gradients_or_later

# B sequences, L length, l length of a slice, I inputs here, O outputs here, T tokens, R ranks, n places of a run


def row_product(h_BLI: Tensor, weight_OI: Tensor, *, axis: Axis, chunks: int, sliced: bool) -> Tensor:
    """The sum over the axis of h W^T, in h's dtype: [B, L, O], or `sliced` this rank's [B, l, O]; in so many runs, or as many as tokens."""
    product = _SlicedRow if sliced else _Row
    y: Tensor = product.apply(h_BLI, weight_OI, axis, chunks)
    return y


def column_products(
    x: Tensor, weights_OI: Sequence[Tensor], *, axis: Axis, chunks: int = 1, sliced: bool = False, recast: bool = False
) -> tuple[Tensor, ...]:
    """Of each W x W^T [B, L, O] in x's dtype, of x [B, L, I] that all ranks have, or `sliced` of each one's [B, l, I].

    The gradient of x is summed over the axis. `recast` as in moe/nn/linear.py: cast weights are not kept. Runs as above.
    """
    products = _SlicedColumns if sliced else _Columns
    found: tuple[Tensor, ...] = products.apply(x, axis, chunks, recast, *weights_OI)
    return found


def _runs(count: int, chunks: int) -> Iterator[slice]:
    return (run for i in range(chunks) if (run := Tile(0, i, chunks).run(count)).stop > run.start)


def _backward(axis: Axis) -> Axis:
    return replace(axis, label=f"{axis.label} backward".lstrip())


# --- the second product -------------------------------------------------------------------------------------------------------


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BLI: Tensor, weight_OI: Tensor, axis: Axis, chunks: int) -> Tensor:
        ctx.save_for_backward(h_BLI, weight_OI)
        ctx.weight = weight_OI
        matrix, h_TI = weight_OI.to(h_BLI.dtype), h_BLI.flatten(0, -2)
        y_TO = h_TI.new_empty(len(h_TI), len(matrix))
        coming = [start_sum(torch.mm(h_TI[run], matrix.t(), out=y_TO[run]), axis) for run in _runs(len(h_TI), chunks)]
        for run in coming:
            run.wait()
        return y_TO.view(*h_BLI.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        h_BLI, weight_OI = ctx.saved_tensors
        return grad @ weight_OI.to(grad.dtype), *_weight_gradients((ctx.weight,), [grad], h_BLI), None, None


class _SlicedRow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_BLI: Tensor, weight_OI: Tensor, axis: Axis, chunks: int) -> Tensor:
        ctx.save_for_backward(h_BLI, weight_OI)
        ctx.weight, ctx.axis, ctx.chunks = weight_OI, axis, chunks
        matrix, h_RBlI = weight_OI.to(h_BLI.dtype), rearrange(h_BLI, "b (r l) i -> r b l i", r=axis.size)
        runs = list(_runs(h_RBlI.shape[2], chunks))
        coming = [start_scatter_sum(F.linear(h_RBlI[:, :, run], matrix), axis) for run in runs]
        return torch.cat([run.wait().squeeze(0) for run in coming], 1)

    @staticmethod
    def backward(ctx: Any, grad_BlO: Tensor) -> tuple[Tensor | None, ...]:
        h_BLI, weight_OI = ctx.saved_tensors
        matrix = weight_OI.to(grad_BlO.dtype)
        grads, shares = [], []
        for grad_RBnO in _gathered(grad_BlO, _backward(ctx.axis), ctx.chunks):
            grads.append(grad_RBnO)
            shares.append(grad_RBnO @ matrix)
        return _joined(shares), *_weight_gradients((ctx.weight,), [_joined(grads)], h_BLI), None, None


# --- the first products -------------------------------------------------------------------------------------------------------


class _Columns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLI: Tensor, axis: Axis, chunks: int, recast: bool, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        matrices = [weight.to(x_BLI.dtype) for weight in weights_OI]
        ctx.save_for_backward(x_BLI, *(weights_OI if recast else matrices))
        ctx.weights, ctx.axis, ctx.chunks = weights_OI, axis, chunks
        return tuple(F.linear(x_BLI, matrix) for matrix in matrices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BLI, *saved = ctx.saved_tensors
        axis, matrices = _backward(ctx.axis), [weight.to(grads[0].dtype) for weight in saved]
        grads_TO, share_TI = [grad.flatten(0, -2) for grad in grads], torch.empty_like(x_BLI).flatten(0, -2)
        coming = []
        for run in _runs(len(share_TI), ctx.chunks):
            coming.append(start_sum(_share([grad_TO[run] for grad_TO in grads_TO], matrices, out=share_TI[run]), axis))
        later = _weight_gradients(ctx.weights, grads, x_BLI)
        for started in coming:
            started.wait()
        return share_TI.view(x_BLI.shape), None, None, None, *later


class _SlicedColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BlI: Tensor, axis: Axis, chunks: int, recast: bool, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        matrices = [weight.to(x_BlI.dtype) for weight in weights_OI]
        runs, products = [], []
        for x_RBnI in _gathered(x_BlI, axis, chunks):
            runs.append(x_RBnI)
            products.append([F.linear(x_RBnI, matrix) for matrix in matrices])
        x_BLI = _joined(runs)
        ctx.save_for_backward(x_BLI, *(weights_OI if recast else matrices))
        ctx.weights, ctx.axis, ctx.chunks = weights_OI, axis, chunks
        return tuple(_joined(parts) for parts in zip(*products, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_BLI, *saved = ctx.saved_tensors
        axis, matrices = _backward(ctx.axis), [weight.to(grads[0].dtype) for weight in saved]
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        grads_BRlO = [rearrange(grad, "b (r l) o -> b r l o", r=axis.size) for grad in grads]
        coming = []
        for run in _runs(grads_BRlO[0].shape[2], ctx.chunks):
            share_TI = _share([grad_BRlO[:, :, run].flatten(0, -2) for grad_BRlO in grads_BRlO], matrices)
            share_RBnI = rearrange(share_TI, "(b r n) i -> r b n i", b=len(grads[0]), r=axis.size)
            coming.append(start_scatter_sum(share_RBnI.to(wide), axis))
        later = _weight_gradients(ctx.weights, grads, x_BLI)
        grad_BlI = torch.cat([run.wait().squeeze(0) for run in coming], 1)
        return grad_BlI.to(x_BLI.dtype), None, None, None, *later


def _gathered(mine_BlI: Tensor, axis: Axis, chunks: int) -> Iterator[Tensor]:
    """Of each run of places all ranks' [R, B, n, I], those of later runs on their way meanwhile; of one run [1, B, L, I]."""
    coming: list[Started] = [start_gather(mine_BlI[:, run].unsqueeze(0), axis) for run in _runs(mine_BlI.shape[1], chunks)]
    if len(coming) == 1:
        return iter([rearrange(coming[0].wait(), "r b l i -> 1 b (r l) i")])
    return (run.wait() for run in coming)


def _joined(runs_RBnI: Sequence[Tensor]) -> Tensor:
    """[B, L, I] of all runs."""
    whole_RBlI = runs_RBnI[0] if len(runs_RBnI) == 1 else torch.cat(list(runs_RBnI), 2)
    return rearrange(whole_RBlI, "r b l i -> b (r l) i")


def _share(grads_TO: Sequence[Tensor], matrices_OI: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """What this rank's outputs have of the gradient of x [T, I]."""
    found = torch.mm(grads_TO[0], matrices_OI[0], out=out)
    for grad_TO, matrix_OI in zip(grads_TO[1:], matrices_OI[1:], strict=True):
        found.addmm_(grad_TO, matrix_OI)
    return found


def _weight_gradients(weights_OI: tuple[Tensor, ...], grads: Sequence[Tensor], x: Tensor) -> Sequence[Tensor | None]:
    dtypes = [gradient_dtype(weight) for weight in weights_OI]

    def computed() -> list[Tensor]:
        x_TI = x.flatten(0, -2)
        return [(grad.flatten(0, -2).t() @ x_TI).to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)]

    return gradients_or_later(weights_OI, computed)
