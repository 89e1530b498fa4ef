"""Moving rows by a plan. Forward and backward are gathers, never additions at an index, so sums have a fixed order.

permute   tokens [T, D] -> rows [R, D]       backward: each token sums the gradients of its rows, in fp32
reorder   rows -> rows, a permutation        backward: the inverse permutation
combine   rows -> tokens, times the gates    backward: each row gets its token's gradient times its gate
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.kernels.plan import Plan
from parallel.mesh.regions import in_region

# T tokens, K choices, R rows, D model


def _gather_or_zero(rows: Tensor, row_T: Tensor) -> Tensor:
    """Return rows[row_T], with zeros for row -1."""
    if rows.shape[0] == 0:
        return rows.new_zeros(len(row_T), rows.shape[1])
    return rows.index_select(0, row_T.clamp(min=0)).masked_fill_((row_T < 0).unsqueeze(1), 0)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: Plan) -> Tensor:
        ctx.plan = plan
        return x_TD.index_select(0, plan.token_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        row_TK = ctx.plan.row_TK
        grad_TD = _gather_or_zero(grad_RD, row_TK[:, 0])
        if row_TK.shape[1] == 1:
            return grad_TD, None
        sum_TD = grad_TD.to(torch.promote_types(grad_RD.dtype, torch.float32))
        for k in range(1, row_TK.shape[1]):
            sum_TD += _gather_or_zero(grad_RD, row_TK[:, k])
        return sum_TD.to(grad_RD.dtype), None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, index_R: Tensor) -> Tensor:
        ctx.index_R = index_R
        return rows_RD.index_select(0, index_R)

    @staticmethod
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None]:
        inverse_R = torch.empty_like(ctx.index_R)
        inverse_R[ctx.index_R] = torch.arange(len(inverse_R), device=inverse_R.device)
        return grad_RD.index_select(0, inverse_R), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> Tensor:
        ctx.save_for_backward(rows_RD, gate_TK)
        ctx.plan = plan
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        y_TD = _gather_or_zero(rows_RD, plan.row_TK[:, 0]).to(wide).mul_(gate_TK[:, :1])
        for k in range(1, gate_TK.shape[1]):
            y_TD.addcmul_(_gather_or_zero(rows_RD, plan.row_TK[:, k]).to(wide), gate_TK[:, k : k + 1])
        return y_TD.to(rows_RD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, gate_TK = ctx.saved_tensors
        choice_R = ctx.plan.choice_R
        wide = torch.promote_types(rows_RD.dtype, torch.float32)
        grad_RD = grad_TD.index_select(0, ctx.plan.token_R).to(wide)
        grad_gate = torch.zeros_like(gate_TK).view(-1)
        grad_gate[choice_R] = torch.linalg.vecdot(grad_RD, rows_RD.to(wide)).to(grad_gate.dtype)
        grad_rows = grad_RD.mul_(gate_TK.view(-1)[choice_R].unsqueeze(1)).to(rows_RD.dtype)
        return grad_rows, grad_gate.view_as(gate_TK), None


@in_region("dispatch")
def permute(x_TD: Tensor, plan: Plan) -> Tensor:
    """Copy tokens [T, D] to rows [R, D]. Backward: each token sums the gradients of its rows, in fp32 or wider."""
    out: Tensor = _Permute.apply(x_TD, plan)
    return out


@in_region("dispatch")
def reorder(rows_RD: Tensor, index_R: Tensor) -> Tensor:
    """Return rows_RD[index_R]; index_R is a permutation."""
    out: Tensor = _Reorder.apply(rows_RD, index_R)
    return out


@in_region("combine")
def combine(rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> Tensor:
    """Sum gate * row over each token's kept choices, in fp32 or wider: [R, D] to [T, D]. A token without kept choices gets zeros."""
    out: Tensor = _Combine.apply(rows_RD, gate_TK, plan)
    return out
