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


def _counts(expert_TK: Tensor, active_TK: Tensor, *, num_groups: int, num_experts: int, queue: bool) -> Tensor:
    """Count the active choices of each expert in each block of _BLOCK choices of a group: int32 [G, B, E]."""
    tokens, choices = expert_TK.shape[0] // num_groups, expert_TK.shape[1]
    blocks = triton.cdiv(tokens * choices, _BLOCK)
    out_GBE = expert_TK.new_empty(num_groups, blocks, num_experts, dtype=torch.int32)
    block_e = min(64, triton.next_power_of_2(num_experts))
    with on(expert_TK):
        moves.count[(blocks, num_groups, triton.cdiv(num_experts, block_e))](
            expert_TK, active_TK, out_GBE, tokens, choices, num_experts, QUEUE=queue, BLOCK=_BLOCK, BLOCK_E=block_e
        )
    return out_GBE


def _rank(expert_TK: Tensor, active_TK: Tensor, before_GBE: Tensor, out_TK: Tensor, choice_N: Tensor | None) -> None:
    """Write each choice's position into out_TK and, if `choice_N` is given, the flat choice at each position into it (in token order)."""
    groups, blocks, num_experts = before_GBE.shape
    tokens, choices = expert_TK.shape[0] // groups, expert_TK.shape[1]
    with on(expert_TK):
        moves.rank[(blocks, groups)](
            expert_TK, active_TK, before_GBE, out_TK, choice_N, tokens, choices, num_experts, QUEUE=choice_N is None, BLOCK=_BLOCK
        )


def slots(expert_TK: Tensor, active_TK: Tensor, *, num_groups: int, num_experts: int) -> Tensor:
    expert_TK, active_TK = expert_TK.contiguous(), active_TK.contiguous()
    counts_GBE = _counts(expert_TK, active_TK, num_groups=num_groups, num_experts=num_experts, queue=True)
    before_GBE = counts_GBE.cumsum(1, dtype=torch.int32) - counts_GBE
    out_TK = torch.empty_like(expert_TK)
    _rank(expert_TK, active_TK, before_GBE, out_TK, None)
    return out_TK


@in_region("dispatch")
def plan(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    """Make the plan by counting sort. The host does not wait for the number of rows: choice_R goes on with zeros, up to T K."""
    expert_TK, kept_TK = expert_TK.contiguous(), kept_TK.contiguous()
    counts_1BE = _counts(expert_TK, kept_TK, num_groups=1, num_experts=num_experts, queue=False)
    through_1BE = counts_1BE.cumsum(1, dtype=torch.int32)
    counts_E = counts_1BE[0].sum(0, dtype=torch.int64)
    first_E = counts_E.cumsum(0) - counts_E
    row_TK, choice_N = torch.empty_like(expert_TK), expert_TK.new_zeros(expert_TK.numel())
    _rank(expert_TK, kept_TK, (through_1BE - counts_1BE + first_E).to(torch.int32), row_TK, choice_N)
    return Plan(choice_N, row_TK, counts_E)
