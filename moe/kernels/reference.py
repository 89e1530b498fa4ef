"""Slow kernels that define the right results, for tests of the fast ones: every step is a plain loop or one line of indexing."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.kernels.network import Counts, Network, numbers
from moe.kernels.rows import Plan
from parallel.numerics.weight_gradient import product

# T tokens, K choices (experts) of each token, R rows (kept choices), E experts, D model, F hidden, I input and O output width of a matrix


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """Return the experts [T, k] int64 of the k highest scores, highest first. Ties go to the lowest expert, unlike in torch.topk."""
    rows = [sorted(range(scores_TE.shape[1]), key=lambda e: (-row[e], e))[:k] for row in scores_TE.tolist()]
    return torch.tensor(rows, dtype=torch.int64, device=scores_TE.device).view(-1, k)


def kept(expert_TK: Tensor, active_TK: Tensor | None, *, num_groups: int, num_experts: int, slots_each: int) -> Tensor:
    """Return whether each choice gets one of the `slots_each` slots that its expert has in its group of tokens: bool [T, K]. Only choices
    with `active_TK` True need a slot (None: all). All first choices queue before any second one (GShard, arXiv 2006.16668, algorithm 1).
    """
    tokens, choices = expert_TK.shape
    kept_TK = torch.zeros_like(expert_TK, dtype=torch.bool)
    per_group = tokens // num_groups
    for group in range(num_groups):
        taken = [0] * num_experts
        for k in range(choices):
            for t in range(group * per_group, (group + 1) * per_group):
                if active_TK is None or active_TK[t, k]:
                    expert = int(expert_TK[t, k])
                    kept_TK[t, k] = taken[expert] < slots_each
                    taken[expert] += 1
    return kept_TK


def plan(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    """Return the plan that gives each kept choice a row. Rows are sorted by expert, then by token."""
    choices = expert_TK.shape[1]
    order: list[list[int]] = [[] for _ in range(num_experts)]
    for t, k in kept_TK.nonzero().tolist():
        order[int(expert_TK[t, k])].append(t * choices + k)
    choice_R = torch.tensor([c for row in order for c in row], dtype=torch.int64, device=expert_TK.device)
    row_TK = torch.full_like(expert_TK, -1)
    for row, choice in enumerate(choice_R.tolist()):
        row_TK[choice // choices, choice % choices] = row
    return Plan(choice_R, row_TK, torch.tensor([len(row) for row in order], device=expert_TK.device))


def permute(x_TD: Tensor, plan: Plan) -> Tensor:
    """Copy tokens [T, D] to rows [R, D]. Backward: each token sums the gradients of its rows, in fp32 or wider."""
    return x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))[plan.token_R].to(x_TD.dtype)


def reorder(rows_RD: Tensor, index_R: Tensor, *, undo: bool = False) -> Tensor:
    """Return rows[index], a permutation of the rows. `undo`: apply the inverse permutation instead."""
    return rows_RD[index_R.argsort() if undo else index_R]


def grouped_ffn(rows_RD: Tensor, network: Network, *, counts: Counts, dropped_RF: Tensor | None = None) -> Tensor:
    """Compute `activation(rows w1 [+ b1]) [* (rows w3 [+ b3])] w2` with the network of each row's expert: [R, D] to [R, D].
    `counts`: number of rows of each expert; results of rows beyond their sum are undefined. `dropped_RF`: dropout's factors of the hidden
    units, by which the input of w2 is multiplied; None: no dropout."""
    outs, start = [], 0
    for expert, count in enumerate(numbers(counts)):

        def multiply(_: str, rows: Tensor, weight_EIO: Tensor, bias_EO: Tensor | None, expert: int = expert) -> Tensor:
            out = product(rows, weight_EIO[expert])
            return out if bias_EO is None else out + bias_EO[expert].to(out.dtype)

        here = slice(start, start + count)
        outs.append(network.compute(rows_RD[here], multiply, dropped_RF=None if dropped_RF is None else dropped_RF[here]))
        start += count
    return torch.cat(outs)


def combine(rows_RD: Tensor, gate_TK: Tensor | None, plan: Plan) -> Tensor:
    """Sum gate * row over each token's kept choices, in fp32 or wider: [R, D] to [T, D]. A token without kept choices gets zeros.
    Without gates, sum the rows.
    """
    wide_RD = rows_RD.to(torch.promote_types(rows_RD.dtype, torch.float32))
    row_TKD = torch.cat((wide_RD, wide_RD.new_zeros(1, wide_RD.shape[1])))[plan.row_TK]  # row -1: zeros
    return (row_TKD if gate_TK is None else row_TKD * gate_TK.unsqueeze(2)).sum(1).to(rows_RD.dtype)


def routed_ffn(x_TD: Tensor, gate_TK: Tensor, plan: Plan, network: Network, *, dropped_RF: Tensor | None = None) -> Tensor:
    rows_RD = grouped_ffn(permute(x_TD, plan), network, counts=plan.counts_E.tolist(), dropped_RF=dropped_RF)
    return combine(rows_RD, gate_TK, plan)
