"""From choices to rows by the counting sort of moves.py, in integers, so results are exact."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moe.kernels.rows import Plan
from moe.kernels.triton import moves
from moe.kernels.triton.device import on
from parallel.mesh.regions import in_region

# T tokens, K choices, R rows, E experts, G groups, B blocks of a group

_BLOCK = 128


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    scores_TE = scores_TE.contiguous()
    (tokens, num_experts), out_TK = scores_TE.shape, scores_TE.new_empty(len(scores_TE), k, dtype=torch.int64)
    block_e = max(2, triton.next_power_of_2(num_experts))
    block_t = max(1, min(32, 4096 // block_e))
    with on(scores_TE):
        moves.top_k[(triton.cdiv(tokens, block_t),)](scores_TE, out_TK, tokens, num_experts, k, BLOCK_T=block_t, BLOCK_E=block_e)
    return out_TK


def _sort(expert_TK: Tensor, active_TK: Tensor, *, num_groups: int, num_experts: int, plan: Plan | None) -> Tensor:
    """Return each choice's position in its expert's queue of the group, first choices first. With a plan, fill its tensors instead."""
    expert_TK, active_TK = expert_TK.contiguous(), active_TK.contiguous()
    tokens, choices = expert_TK.shape[0] // num_groups, expert_TK.shape[1]
    blocks, block_e = triton.cdiv(tokens * choices, _BLOCK), min(64, triton.next_power_of_2(num_experts))
    counts_GBE = expert_TK.new_empty(num_groups, blocks, num_experts, dtype=torch.int32)
    out_TK, choice_N, totals_E = (torch.empty_like(expert_TK), None, None) if plan is None else (plan.row_TK, plan.choice_R, plan.counts_E)
    sizes, same = (tokens, choices, num_experts), {"QUEUE": plan is None, "BLOCK": _BLOCK, "BLOCK_E": block_e}
    with on(expert_TK):
        moves.count[(blocks, num_groups, triton.cdiv(num_experts, block_e))](expert_TK, active_TK, counts_GBE, choice_N, *sizes, **same)
        narrow = min(32, block_e)
        moves.scan[(triton.cdiv(num_experts, narrow), num_groups)](
            counts_GBE, totals_E, blocks, num_experts, BLOCK_B=4096 // narrow // 2, BLOCK_E=narrow
        )
        moves.rank[(blocks, num_groups)](expert_TK, active_TK, counts_GBE, totals_E, out_TK, choice_N, *sizes, **same)
    return out_TK


def slots(expert_TK: Tensor, active_TK: Tensor, *, num_groups: int, num_experts: int) -> Tensor:
    return _sort(expert_TK, active_TK, num_groups=num_groups, num_experts=num_experts, plan=None)


@in_region("dispatch")
def plan(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    """Make the plan by counting sort. The host does not wait for the number of rows: choice_R goes on with zeros, up to T K."""
    made = Plan(expert_TK.new_empty(expert_TK.numel()), torch.empty_like(expert_TK), expert_TK.new_empty(num_experts))
    _sort(expert_TK, kept_TK, num_groups=1, num_experts=num_experts, plan=made)
    return made
