"""Copies tokens to rows, one for each kept choice of an expert, and sums rows back into tokens, as a `Plan` says. Neither the forward nor
the backward pass adds at an index (index_add), so sums have a fixed order.

permute   tokens [T, D] -> rows [R, D]       backward: each token sums the gradients of its rows, in fp32
reorder   rows -> rows, a permutation        backward: the inverse permutation
combine   rows -> tokens, times the gates    backward: each row gets its token's gradient times its gate (no gates: 1)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from parallel.mesh.regions import in_region
from parallel.numerics.precision import sum_dtype

# T tokens, K choices, R rows (kept choices), E experts, D model


@dataclass(frozen=True)
class Plan:
    """Rows of the kept choices, sorted by expert, then by token.

    `choice_R` int64: the flat choice t * K + k of each row. `row_TK` int64: the row of each choice, -1 if the choice is dropped.
    `counts_E` int64: the number of rows of each expert. For four tokens with one choice each, the third dropped:

        experts 1 0 1 1        choice_R 1 0 3        row_TK 1 0 -1 2        counts_E 1 2

    On a GPU, `choice_R` may be padded with zeros to length T K, so that the host need not know the number of rows. Rows may also be slots,
    some of them empty (moe/experts/dispatch/padded.py). Padding and empty slots copy some token; `row_TK` leaves them out.
    """

    choice_R: Tensor
    row_TK: Tensor
    counts_E: Tensor

    @property
    def token_R(self) -> Tensor:
        """The token of each row, int64 [R]."""
        return self.choice_R // self.row_TK.shape[1]

    def cut(self, rows: int) -> Plan:
        """Return the plan with only the first `rows` entries of `choice_R`."""
        return self if rows == len(self.choice_R) else replace(self, choice_R=self.choice_R[:rows])


def gather(source: Tensor, index_R: Tensor, choices: int = 1) -> Tensor:
    """Return source[index // choices]. With `choices` = K, the index holds flat choices t * K + k, and each copies token t."""
    return source.index_select(0, index_R if choices == 1 else index_R // choices)


def scatter(source: Tensor, index_R: Tensor) -> Tensor:
    """Return rows `out` with out[index] = source, where index is a permutation."""
    inverse_R = torch.empty_like(index_R)
    inverse_R[index_R] = torch.arange(len(index_R), device=index_R.device)
    return source.index_select(0, inverse_R)


def total(rows_RD: Tensor, row_TK: Tensor, gate_TK: Tensor | None) -> Tensor:
    """Sum each token's rows, times their gates if given, in fp32 or wider: [T, D] in the rows' dtype. A -1 in `row_TK` adds nothing."""
    sum_TD = _gather_or_zero(rows_RD, row_TK[:, 0])
    if gate_TK is None and row_TK.shape[1] == 1:
        return sum_TD
    sum_TD = sum_TD.to(sum_dtype(rows_RD.dtype))
    sum_TD = sum_TD if gate_TK is None else sum_TD.mul_(gate_TK[:, :1])
    for k in range(1, row_TK.shape[1]):
        found_TD = _gather_or_zero(rows_RD, row_TK[:, k])
        if gate_TK is None:
            sum_TD += found_TD
        else:
            sum_TD.addcmul_(found_TD.to(sum_TD.dtype), gate_TK[:, k : k + 1])
    return sum_TD.to(rows_RD.dtype)


def _gather_or_zero(rows: Tensor, row_T: Tensor) -> Tensor:
    if rows.shape[0] == 0:
        return rows.new_zeros(len(row_T), rows.shape[1])
    return rows.index_select(0, row_T.clamp(min=0)).masked_fill_((row_T < 0).unsqueeze(1), 0)


def combine_backward(grad_TD: Tensor, rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return (gradient of the rows [R, D], gradient of the gates [T, K]), given the gradient of the tokens' sums [T, D]."""
    wide = sum_dtype(rows_RD.dtype)
    grad_RD = grad_TD.index_select(0, plan.token_R).to(wide)
    grad_gate = _gather_or_zero(torch.linalg.vecdot(grad_RD, rows_RD.to(wide)).unsqueeze(1), plan.row_TK.view(-1)).view_as(gate_TK)
    grad_rows = grad_RD.mul_(gate_TK.view(-1)[plan.choice_R].unsqueeze(1)).to(rows_RD.dtype)
    return grad_rows, grad_gate.to(gate_TK.dtype)


class Moves(NamedTuple):
    """One implementation of gather, scatter, total and combine_backward: in torch operations, or as Triton kernels."""

    gather: Callable[..., Tensor]
    scatter: Callable[[Tensor, Tensor], Tensor]
    total: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    combine_backward: Callable[[Tensor, Tensor, Tensor, Plan], tuple[Tensor, Tensor]]


TORCH = Moves(gather, scatter, total, combine_backward)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, plan: Plan, moves: Moves) -> Tensor:
        ctx.plan, ctx.moves = plan, moves
        return moves.gather(x_TD, plan.choice_R, plan.row_TK.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None]:
        return ctx.moves.total(grad_RD, ctx.plan.row_TK, None), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, index_R: Tensor, moves: Moves, undo: bool) -> Tensor:
        ctx.index_R, (there, ctx.back) = index_R, (moves.scatter, moves.gather) if undo else (moves.gather, moves.scatter)
        return there(rows_RD, index_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(grad_RD, ctx.index_R), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, gate_TK: Tensor | None, plan: Plan, moves: Moves) -> Tensor:
        if gate_TK is not None:
            ctx.save_for_backward(rows_RD, gate_TK)
        ctx.plan, ctx.moves = plan, moves
        return moves.total(rows_RD, plan.row_TK, gate_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once, because activation checkpointing allows no second read
        if not saved:
            return ctx.moves.gather(grad_TD, ctx.plan.choice_R, ctx.plan.row_TK.shape[1]), None, None, None
        return *ctx.moves.combine_backward(grad_TD, *saved, ctx.plan), None, None


@in_region("dispatch")
def permute(x_TD: Tensor, plan: Plan, moves: Moves = TORCH) -> Tensor:
    out: Tensor = _Permute.apply(x_TD, plan, moves)
    return out


@in_region("dispatch")
def reorder(rows_RD: Tensor, index_R: Tensor, moves: Moves = TORCH, *, undo: bool = False) -> Tensor:
    out: Tensor = _Reorder.apply(rows_RD, index_R, moves, undo)
    return out


@in_region("combine")
def combine(rows_RD: Tensor, gate_TK: Tensor | None, plan: Plan, moves: Moves = TORCH) -> Tensor:
    out: Tensor = _Combine.apply(rows_RD, gate_TK, plan, moves)
    return out
