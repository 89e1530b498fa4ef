"""The experts' networks with torch's grouped product (F.grouped_mm): one launch for all experts, by CUTLASS on Hopper and later GPUs.

The steps are: permute; rows x w1 and rows x w3; activation; hidden units x w2; combine. The result of each step is written to memory and
kept for the backward pass. All other operations are as with `experts.kernels: auto`. The size of a row must be a multiple of 16 bytes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels import check_widths
from moe.kernels.auto import combine, kept, kernels_of, permute, plan, reorder, top_k
from moe.kernels.network import Counts, Network, aligned_start
from moe.kernels.rows import Plan
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.host import on_device
from parallel.numerics.precision import gradient_dtype
from parallel.numerics.weight_gradient import gradient_or_later, if_deferrable

__all__ = ["combine", "grouped_ffn", "kept", "kernels_of", "permute", "plan", "reorder", "routed_ffn", "top_k"]

# R rows, E experts, D model, F hidden, I and O a matrix's in and out

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Product(torch.autograd.Function):
    """Multiply each row by the matrix of its expert, cast to the rows' dtype. Rows are sorted by expert. `ends_E` int32: the end of each
    expert's rows."""

    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(rows_RI, weight_EIO, ends_E)
        ctx.weights = if_deferrable(weight_EIO)
        return F.grouped_mm(rows_RI, aligned_start(weight_EIO.to(rows_RI.dtype)), offs=ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows_RI, weight_EIO, ends_E = ctx.saved_tensors
        grad_RO = aligned_start(grad_RO.contiguous())
        of_rows = of_weight = None
        if ctx.needs_input_grad[1]:
            weight = (ctx.weights or (weight_EIO,))[0]
            of_weight = gradient_or_later(weight, partial(_weight_gradient, rows_RI, grad_RO, ends_E, gradient_dtype(weight)))
        if ctx.needs_input_grad[0]:
            of_rows = F.grouped_mm(grad_RO, aligned_start(weight_EIO.to(grad_RO.dtype)).mT, offs=ends_E)
        return of_rows, of_weight, None


def _weight_gradient(rows_RI: Tensor, grad_RO: Tensor, ends_E: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows^T grad of each expert. Experts without rows get zeros, which torch's product does not write on every GPU."""
    empty_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
    return F.grouped_mm(rows_RI.t(), grad_RO, offs=ends_E).masked_fill_(empty_E.view(-1, 1, 1), 0).to(dtype)


def _check(rows_RD: Tensor, network: Network) -> None:
    """Raise BadInput for a dtype or for widths that torch's grouped product does not support."""
    if rows_RD.dtype not in _DTYPES:
        got, needed = f"grouped_mm for {rows_RD.dtype}", "float32, bfloat16 or float16"
        raise BadInput("experts.kernels", got=got, needed=needed, fix=Set("it", "auto", "reference"))
    width, hidden = network.w1.shape[1:]
    check_widths("grouped_mm", {"d_model": width, "d_ff": hidden}, dtype=str(rows_RD.dtype), element_bytes=rows_RD.dtype.itemsize)


def _compute(rows_RD: Tensor, network: Network, counts_E: Tensor, dropped_RF: Tensor | None) -> Tensor:
    _check(rows_RD, network)
    ends_E = counts_E.cumsum(0, dtype=torch.int32)

    def multiply(_: str, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None) -> Tensor:
        out: Tensor = _Product.apply(rows, weight_EIO, ends_E)
        if bias_EO is None:
            return out
        expert_R = torch.searchsorted(ends_E, torch.arange(len(rows), device=rows.device), right=True)
        return out + F.pad(bias_EO, (0, 0, 0, 1)).to(out.dtype)[expert_R]  # rows beyond the counts have index E: a bias of zeros

    return network.compute(aligned_start(rows_RD.contiguous()), multiply, dropped_RF=dropped_RF)


def grouped_ffn(rows_RD: Tensor, network: Network, *, counts: Counts, dropped_RF: Tensor | None = None) -> Tensor:
    counts_E = on_device(torch.tensor(counts), rows_RD.device) if isinstance(counts, list) else counts
    return _compute(rows_RD, network, counts_E, dropped_RF)


def routed_ffn(x_TD: Tensor, gate_TK: Tensor, plan: Plan, network: Network, *, dropped_RF: Tensor | None = None) -> Tensor:
    """Return combine(grouped_ffn(permute(x))), [T, D]. `dropped_RF`: dropout's factors of the hidden units. Rows beyond the plan's counts
    have undefined results, which `combine` does not read."""
    combined: Tensor = combine(_compute(permute(x_TD, plan), network, plan.counts_E, dropped_RF), gate_TK, plan)
    return combined
