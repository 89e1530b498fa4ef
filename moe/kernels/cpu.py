"""Dispatch in time and memory proportional to routed rows; torch operations only, so it runs on any device.

Positions come from one stable sort (cumulative position, never top-k on ties); moving rows is gathering in both
directions; each expert is one matrix product on its own contiguous rows, written straight into the shared output.

Row counts differ at every step, and for bf16 and fp16 the CPU's library generates code for every new shape: 15 times
what the product itself takes (docs/measure.py). So those products run on multiples of 64 rows, and the rest as one more block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.kernels.activation import activate
from moe.kernels.plan import Plan

# T tokens, K choices, R rows, E experts, D model, F hidden, I and O a matrix's in and out


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
    if k > 4:
        return torch.argsort(scores_TE, dim=-1, descending=True, stable=True)[:, :k].contiguous()
    rest_TE, found = scores_TE, []
    for choice in range(k):
        expert_T1 = rest_TE.argmax(-1, keepdim=True)
        found.append(expert_T1)
        if choice < k - 1:
            rest_TE = rest_TE.scatter(1, expert_T1, -torch.inf)
    return torch.cat(found, 1)


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
        y_TD = _take(rows_RD, plan.row_TK[:, 0]).float().mul_(gate_TK[:, :1])
        for k in range(1, gate_TK.shape[1]):
            y_TD.addcmul_(_take(rows_RD, plan.row_TK[:, k]).float(), gate_TK[:, k : k + 1])
        return y_TD.to(rows_RD.dtype)

    @staticmethod
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RD, gate_TK = ctx.saved_tensors
        choice_R = ctx.plan.choice_R
        grad_RD = grad_TD.index_select(0, ctx.plan.token_R).float()
        grad_gate = torch.zeros_like(gate_TK).view(-1)
        grad_gate[choice_R] = torch.linalg.vecdot(grad_RD, rows_RD.float())
        grad_rows = grad_RD.mul_(gate_TK.view(-1)[choice_R].unsqueeze(1)).to(rows_RD.dtype)
        return grad_rows, grad_gate.view_as(gate_TK), None


_BLOCK = 64


def _any_shape(rows: Tensor) -> bool:
    return rows.dtype not in (torch.bfloat16, torch.float16) or not rows.is_cpu or len(rows) % _BLOCK == 0


def _padded(rows: Tensor) -> Tensor:
    return torch.cat((rows, rows.new_zeros(_BLOCK - len(rows), rows.shape[1])))


def _product(rows_NI: Tensor, weight_IO: Tensor, out_NO: Tensor) -> None:
    """out = rows weight; the last block may overlap the one before, whose rows it computes again."""
    if _any_shape(rows_NI):
        torch.mm(rows_NI, weight_IO, out=out_NO)
    elif len(rows_NI) < _BLOCK:
        out_NO.copy_(torch.mm(_padded(rows_NI), weight_IO)[: len(rows_NI)])
    else:
        whole = len(rows_NI) // _BLOCK * _BLOCK
        torch.mm(rows_NI[:whole], weight_IO, out=out_NO[:whole])
        torch.mm(rows_NI[-_BLOCK:], weight_IO, out=out_NO[-_BLOCK:])


def _weight_gradient(rows_NI: Tensor, grad_NO: Tensor) -> Tensor:
    """rows^T grad; zero rows fill the last block, and parts are added in fp32."""
    if _any_shape(rows_NI):
        return torch.mm(rows_NI.t(), grad_NO)
    whole = len(rows_NI) // _BLOCK * _BLOCK
    rest_IO = torch.mm(_padded(rows_NI[whole:]).t(), _padded(grad_NO[whole:]))
    return rest_IO if whole == 0 else torch.mm(rows_NI[:whole].t(), grad_NO[:whole]).float().add_(rest_IO)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(rows_RI, weight_EIO)
        ctx.counts = counts
        out_RO = rows_RI.new_empty(rows_RI.shape[0], weight_EIO.shape[2])
        for rows, out, weight in zip(rows_RI.split(counts), out_RO.split(counts), weight_EIO, strict=True):
            if len(rows):
                _product(rows, weight.to(rows.dtype), out)
        return out_RO

    @staticmethod
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
        rows_RI, weight_EIO = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        grad_RI = torch.empty_like(rows_RI)
        grad_weight = torch.zeros_like(weight_EIO)  # an expert without rows has a gradient of zero, not none: nobody waits for it
        parts = zip(rows_RI.split(ctx.counts), grad_RO.split(ctx.counts), grad_RI.split(ctx.counts), strict=True)
        for expert, (rows, grad, grad_in) in enumerate(parts):
            if len(rows):
                _product(grad, weight_EIO[expert].to(rows.dtype).t(), grad_in)
                grad_weight[expert] = _weight_gradient(rows, grad)
        return grad_RI, grad_weight, None


def permute(x_TD: Tensor, plan: Plan) -> Tensor:
    """Tokens [T, D] to rows [R, D]."""
    out: Tensor = _Permute.apply(x_TD, plan)
    return out


def reorder(rows_RD: Tensor, index_R: Tensor) -> Tensor:
    """Row i of the result is row index_R[i]; index_R is a permutation."""
    out: Tensor = _Reorder.apply(rows_RD, index_R)
    return out


def grouped_ffn(
    rows_RD: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None, *, counts: list[int], ffn: str, dropped_RF: Tensor | None = None
) -> Tensor:
    """Each expert's rows through `activation(rows w1) [* rows w3] w2`; weights [E, D, F], [E, F, D], [E, D, F] or None."""
    gate_RF = _GroupedLinear.apply(rows_RD, w3, counts) if w3 is not None else None
    hidden_RF = activate(_GroupedLinear.apply(rows_RD, w1, counts), gate_RF, ffn)
    if dropped_RF is not None:
        hidden_RF = hidden_RF * dropped_RF
    out: Tensor = _GroupedLinear.apply(hidden_RF, w2, counts)
    return out


def combine(rows_RD: Tensor, gate_TK: Tensor, plan: Plan) -> Tensor:
    """y[t] = sum over kept choices of gate * row, summed in fp32; zero for a token with none."""
    out: Tensor = _Combine.apply(rows_RD, gate_TK, plan)
    return out


def routed_ffn(
    x_TD: Tensor,
    gate_TK: Tensor,
    plan: Plan,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    *,
    ffn: str,
    dropped_RF: Tensor | None = None,
) -> Tensor:
    """permute, grouped_ffn and combine in one: where all experts are here."""
    rows_RD = grouped_ffn(permute(x_TD, plan), w1, w2, w3, counts=plan.counts_E.tolist(), ffn=ffn, dropped_RF=dropped_RF)
    return combine(rows_RD, gate_TK, plan)
