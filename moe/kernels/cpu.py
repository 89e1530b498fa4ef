"""Dispatch in time and memory proportional to routed rows; torch operations only, so it runs on any device.

Positions come from one stable sort (cumulative position, never top-k on ties); moving rows is gathering in both
directions; the experts' networks are in grouped.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.kernels.grouped import grouped_ffn, routed_ffn
from moe.kernels.plan import Plan

__all__ = ["combine", "grouped_ffn", "permute", "plan", "reorder", "routed_ffn", "slots", "top_k"]

# T tokens, K choices, R rows, E experts, D model


def _rank_in_run(key_N: Tensor, num_keys: int) -> Tensor:
    """For each element, how many equal keys stand before it."""
    order_N = torch.argsort(key_N, stable=True)
    counts = torch.bincount(key_N, minlength=num_keys)
    start = counts.cumsum(0) - counts
    sorted_N = key_N[order_N]
    rank_N = torch.empty_like(key_N)
    rank_N[order_N] = torch.arange(len(key_N), device=key_N.device) - start[sorted_N]
    return rank_N


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """The experts [T, k] of the k highest scores, highest first; of equal ones the lowest expert, which torch.topk does not promise."""
    if k > 2:
        return _many(scores_TE, k)
    rest_TE, found = scores_TE, []
    for choice in range(k):
        expert_T1 = rest_TE.argmax(-1, keepdim=True)
        found.append(expert_T1)
        if choice < k - 1:
            rest_TE = rest_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(found, 1)


def _many(scores_TE: Tensor, k: int) -> Tensor:
    """topk of one more, which shows ties among the chosen and at their edge; those rows by a stable sort, which costs ten times as much."""
    best, expert = scores_TE.topk(min(k + 1, scores_TE.shape[1]))
    expert_TK = expert[:, :k].contiguous()
    rows = (best[:, 1:] == best[:, :-1]).any(1).nonzero()[:, 0]
    if len(rows):
        expert_TK[rows] = torch.argsort(scores_TE[rows], dim=-1, descending=True, stable=True)[:, :k]
    return expert_TK


def slots(expert_TK: Tensor, active_TK: Tensor, *, num_groups: int, num_experts: int) -> Tensor:
    """Position [T, K] of each active choice in its expert's queue of its group; inactive ones get -1."""
    tokens, choices = expert_TK.shape
    group_T = torch.arange(tokens, device=expert_TK.device) // (tokens // num_groups)
    key_TK = torch.where(active_TK, group_T.unsqueeze(1) * num_experts + expert_TK, num_groups * num_experts)
    rank_KT = _rank_in_run(key_TK.t().reshape(-1), num_groups * num_experts + 1)  # choice-major: first choices queue first
    return torch.where(active_TK, rank_KT.view(choices, tokens).t(), -1)


def plan(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    """Rows sorted by expert, then by token."""
    key_N = torch.where(kept_TK, expert_TK, num_experts).reshape(-1)
    counts_E = torch.bincount(key_N, minlength=num_experts + 1)[:num_experts]
    choice_R = torch.argsort(key_N, stable=True)[: int(counts_E.sum())]
    row_N = torch.full_like(key_N, -1)
    row_N[choice_R] = torch.arange(len(choice_R), device=key_N.device)
    return Plan(choice_R, row_N.view_as(expert_TK), counts_E)


def _take(rows: Tensor, row_T: Tensor) -> Tensor:
    """rows[row_T], and zeros where row_T is -1."""
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
        grad_TD = _take(grad_RD, row_TK[:, 0])
        for k in range(1, row_TK.shape[1]):
            grad_TD += _take(grad_RD, row_TK[:, k])
        return grad_TD, None


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
        y_TD = _take(rows_RD, plan.row_TK[:, 0]).to(wide).mul_(gate_TK[:, :1])
        for k in range(1, gate_TK.shape[1]):
            y_TD.addcmul_(_take(rows_RD, plan.row_TK[:, k]).to(wide), gate_TK[:, k : k + 1])
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


def permute(x_TD: Tensor, plan: Plan) -> Tensor:
    """Tokens [T, D] to rows [R, D]."""
    out: Tensor = _Permute.apply(x_TD, plan)
    return out


def reorder(rows_RD: Tensor, index_R: Tensor) -> Tensor:
    """Row i of the result is row index_R[i]; index_R is a permutation."""
    out: Tensor = _Reorder.apply(rows_RD, index_R)
    return out


def combine(rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> Tensor:
    """y[t] = sum over kept choices of gate * row, summed in fp32 at least; zero for a token with none."""
    out: Tensor = _Combine.apply(rows_RD, gate_TK, plan)
    return out
