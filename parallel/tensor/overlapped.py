"""The second product of a layer in runs of tokens: while one run's shares are summed over the ranks, the next run is computed.

    link     |         | sum 0   | sum 1   | sum 2   | sum 3 |          of 4 runs only the last sum has nothing to hide behind
    compute  | h_0 W2  | h_1 W2  | h_2 W2  | h_3 W2  |

    forward     y_i = h_i W2, then its sum over the ranks, on its way during h_i+1 W2       slices: its reduce-scatter
    backward    1D has nothing to send here                                                 slices: dy_i+1 is gathered during dy_i W2^T

The sums have the same parts, so results are those of linear_1d.py up to the order in which a product adds up. With slices a run is
some places of every rank's slice, so each rank gets its own places of each run. The gathered dy is kept whole for the weight's
gradient, as it is without runs. Cost: the same bytes in n calls; products of 1/n of the tokens, which should not be too small.
Source: Wang et al., Overlap communication with dependent computation via decomposition (ASPLOS 2023), which decomposes the collective.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from parallel.weight_gradient import gradient_or_later

# B sequences, L length, l length of a slice, I inputs here, O outputs, R ranks, n places of a run


def row_product(h_BLI: Tensor, weight_OI: Tensor, *, axis: Axis, chunks: int, sliced: bool) -> Tensor:
    """The sum over the axis of h W^T, in h's dtype: [B, L, O], or `sliced` this rank's [B, l, O]; in so many runs, or as many as tokens."""
    product = _Sliced if sliced else _Whole
    y: Tensor = product.apply(h_BLI, weight_OI, axis, chunks)
    return y


def _runs(count: int, chunks: int) -> Iterator[slice]:
    return (run for i in range(chunks) if (run := Tile(0, i, chunks).run(count)).stop > run.start)


class _Whole(torch.autograd.Function):
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
        return grad @ weight_OI.to(grad.dtype), _weight_gradient(ctx.weight, grad, h_BLI), None, None


class _Sliced(torch.autograd.Function):
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
        axis = replace(ctx.axis, label=f"{ctx.axis.label} backward".lstrip())
        matrix, runs = weight_OI.to(grad_BlO.dtype), list(_runs(grad_BlO.shape[1], ctx.chunks))
        coming: list[Started] = [start_gather(grad_BlO[:, run].unsqueeze(0), axis) for run in runs]
        grads, shares = [], []
        for run in coming:
            grad_RBnO = run.wait()
            grads.append(grad_RBnO)
            shares.append(grad_RBnO @ matrix)
        whole = rearrange(torch.cat(grads, 2), "r b l o -> b (r l) o")
        return rearrange(torch.cat(shares, 2), "r b l i -> b (r l) i"), _weight_gradient(ctx.weight, whole, h_BLI), None, None


def _weight_gradient(weight_OI: Tensor, grad: Tensor, h: Tensor) -> Tensor | None:
    dtype = gradient_dtype(weight_OI)
    return gradient_or_later(weight_OI, lambda: (grad.flatten(0, -2).t() @ h.flatten(0, -2)).to(dtype))
