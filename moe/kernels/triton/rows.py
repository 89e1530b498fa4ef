"""Moving tokens to rows and rows to tokens, each direction by one gather: every byte is read and written once, sums are fp32.

permute   rows = x[token]              backward   total of the rows of each token
combine   total of gate * rows         backward   gate * grad[token] and <grad[token], row>, in one kernel
reorder   rows[index]                  backward   out[index] = grad
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.plan import Plan
from moe.kernels.triton import moves
from moe.kernels.triton.device import check_dtype, on
from parallel.mesh.regions import in_region

# T tokens, K choices, R rows, D width

_ELEMENTS = 4096  # per program, 32 per thread: enough loads in flight to saturate memory bandwidth


def _blocks(width: int) -> tuple[int, int]:
    """Return rows and columns per program."""
    columns = min(1024, max(16, triton.next_power_of_2(width)))
    return _ELEMENTS // columns, columns


def move(source: Tensor, index_R: Tensor, *, choices: int = 1, scatter: bool = False) -> Tensor:
    """Return source[index // choices]. With `scatter`: out[index] = source; index is then a permutation."""
    source, index_R, width = source.contiguous(), index_R.contiguous(), source.shape[1]
    out = source.new_empty(len(index_R), width)
    block_r, block_d = _blocks(width)
    with on(source):
        moves.gather[(triton.cdiv(len(index_R), block_r), triton.cdiv(width, block_d))](
            source, index_R, out, len(index_R), width, choices, SCATTER=scatter, BLOCK_R=block_r, BLOCK_D=block_d
        )
    return out


def total(rows_RD: Tensor, row_TK: Tensor, gate_TK: Tensor | None) -> Tensor:
    """Sum each token's rows, weighted by the gates if given: [T, D] in the rows' dtype, summed in fp32."""
    check_dtype(rows_RD)
    rows_RD, row_TK, gate_TK = rows_RD.contiguous(), row_TK.contiguous(), None if gate_TK is None else gate_TK.contiguous()
    (tokens, choices), width = row_TK.shape, rows_RD.shape[1]
    out_TD = rows_RD.new_empty(tokens, width)
    block_t, block_d = _blocks(width)
    with on(rows_RD):
        moves.total[(triton.cdiv(tokens, block_t), triton.cdiv(width, block_d))](
            rows_RD, gate_TK, row_TK, out_TD, tokens, width, choices, BLOCK_T=block_t, BLOCK_D=block_d
        )
    return out_TD


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return move(x_TD, plan.choice_R, choices=plan.row_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return total(grad_RD, ctx.plan.row_TK, None), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, index_R: Tensor) -> Tensor:
        ctx.index_R = index_R
        return move(rows_RD, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        return move(grad_RD, ctx.index_R, scatter=True), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> Tensor:
        ctx.save_for_backward(rows_RD, gate_TK)
        ctx.plan = plan
        return total(rows_RD, plan.row_TK, gate_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, gate_TK = (t.contiguous() for t in ctx.saved_tensors)
        grad_TD = grad_TD.contiguous()
        grad_rows, grad_gate = torch.empty_like(rows_RD), torch.zeros_like(gate_TK)
        (rows, width), choices = rows_RD.shape, gate_TK.shape[1]
        block_r, block_d = _blocks(width)
        with on(rows_RD):
            moves.combine_backward[(triton.cdiv(rows, block_r),)](
                grad_TD,
                rows_RD,
                gate_TK,
                ctx.plan.choice_R,
                grad_rows,
                grad_gate,
                rows,
                width,
                choices,
                BLOCK_R=block_r,
                BLOCK_D=block_d,
            )
        return grad_rows, grad_gate, None


@in_region("dispatch")
def permute(x_TD: Tensor, plan: Plan) -> Tensor:
    """Copy tokens [T, D] to rows [R, D]. Backward: each token sums the gradients of its rows, in fp32."""
    out: Tensor = _Permute.apply(x_TD, plan)
    return out


@in_region("dispatch")
def reorder(rows_RD: Tensor, index_R: Tensor) -> Tensor:
    """Return rows_RD[index_R]; index_R is a permutation."""
    out: Tensor = _Reorder.apply(rows_RD, index_R)
    return out


@in_region("combine")
def combine(rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> Tensor:
    """Sum gate * row over each token's kept choices, in fp32: [R, D] to [T, D]. A token without kept choices gets zeros."""
    out: Tensor = _Combine.apply(rows_RD, gate_TK, plan)
    return out
