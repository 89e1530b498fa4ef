"""Launches the kernels of moves.py for top_k, kept, queues, plan and by_bin. Counts and positions are integers, so results are exact."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from moe.kernels.rows import Plan
from moe.kernels.triton import moves
from moe.kernels.triton.device import on
from parallel.mesh.regions import in_region

# T tokens, K choices, R rows, E experts, G groups, B blocks of a group, P tokens of several ranks; in `by_bin`: B bins, P ranks

_BLOCK = 128  # number of choices that one program of the kernels `count` and `rank` (moves.py) handles


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    scores_TE = scores_TE.contiguous()
    (tokens, num_experts), out_TK = scores_TE.shape, scores_TE.new_empty(len(scores_TE), k, dtype=torch.int64)
    block_e = max(2, triton.next_power_of_2(num_experts))
    block_t = max(1, min(32, 4096 // block_e))
    with on(scores_TE):
        moves.top_k[(triton.cdiv(tokens, block_t),)](scores_TE, out_TK, tokens, num_experts, k, BLOCK_T=block_t, BLOCK_E=block_e)
    return out_TK


def _sort(
    expert_TK: Tensor,
    active_TK: Tensor | None,
    out: Tensor | Plan,
    *,
    num_groups: int,
    num_experts: int,
    slots: int = 0,
    row_T: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Sort the choices by expert, and fill `out`: a Plan, or a bool tensor [T, K] that says whether a choice gets one of the `slots` slots
    of its expert and group. `active_TK`: choices that count; None: all. `row_T`: for each token, its row in expert_TK; None: row t for
    token t. `out` covers the rows of expert_TK from `first` on. Return, for each block, the number of choices of each expert in earlier
    blocks of the group: int32 [G, B + 1, E]."""
    expert_TK, active_TK = expert_TK.contiguous(), None if active_TK is None else active_TK.contiguous()
    out_TK, choice_N, totals_E = (out.row_TK, out.choice_R, out.counts_E) if isinstance(out, Plan) else (out, None, None)
    tokens, choices = len(expert_TK if row_T is None else row_T) // num_groups, expert_TK.shape[1]
    blocks = triton.cdiv(tokens * choices, _BLOCK) if choice_N is not None else choices * triton.cdiv(tokens, _BLOCK)
    block_e = min(64, triton.next_power_of_2(num_experts))
    counts_GBE = expert_TK.new_empty(num_groups, blocks + 1, num_experts, dtype=torch.int32)
    sizes, same = (tokens, choices, num_experts), {"QUEUE": choice_N is None, "BLOCK": _BLOCK, "BLOCK_E": block_e}
    with on(expert_TK):
        moves.count[(blocks, num_groups, triton.cdiv(num_experts, block_e))](
            expert_TK, active_TK, row_T, counts_GBE, choice_N, *sizes, **same
        )
        narrow = min(32, block_e)
        moves.scan[(triton.cdiv(num_experts, narrow), num_groups)](
            counts_GBE, totals_E, blocks, num_experts, BLOCK_B=4096 // narrow // 2, BLOCK_E=narrow
        )
        moves.rank[(blocks, num_groups)](
            expert_TK, active_TK, row_T, counts_GBE, totals_E, out_TK, choice_N, slots, first * choices, out_TK.numel(), *sizes, **same
        )
    return counts_GBE


def kept(expert_TK: Tensor, active_TK: Tensor | None, *, num_groups: int, num_experts: int, slots_each: int) -> Tensor:
    out_TK = expert_TK.new_empty(expert_TK.shape, dtype=torch.bool)
    _sort(expert_TK, active_TK, out_TK, num_groups=num_groups, num_experts=num_experts, slots=slots_each)
    return out_TK


def queues(
    expert_PK: Tensor, row_G: Tensor, *, mine: range, num_groups: int, num_experts: int, slots_each: int, counted: int
) -> tuple[Tensor, Tensor]:
    """Give slots to the choices of all ranks that share groups of tokens. Return (whether each of this rank's choices gets a slot, bool
    [T, K]; number of times that each expert is among the first `counted` choices of a group's tokens, int32 [groups, E]).
    `expert_PK` int64: the choices gathered from these ranks, -1 for a choice that needs no slot. `row_G` int64: for each token
    of all groups, in the order of sequences, its row in expert_PK. `mine`: this rank's rows of expert_PK. `slots_each`: slots of an
    expert in a group.
    """
    kept_TK = expert_PK.new_empty(len(mine), expert_PK.shape[1], dtype=torch.bool)
    sizes = {"num_groups": num_groups, "num_experts": num_experts, "slots": slots_each}
    counts_GBE = _sort(expert_PK, None, kept_TK, **sizes, row_T=row_G, first=mine.start)
    return kept_TK, counts_GBE[:, counted * triton.cdiv(len(row_G) // num_groups, _BLOCK)]


@in_region("dispatch")
def plan(expert_TK: Tensor, kept_TK: Tensor, *, num_experts: int) -> Plan:
    """Make the plan by counting sort. The host does not wait for the number of rows: `choice_R` is padded with zeros to length T K."""
    made = Plan(expert_TK.new_empty(expert_TK.numel()), expert_TK.new_empty(expert_TK.shape), expert_TK.new_empty(num_experts))
    _sort(expert_TK, kept_TK, made, num_groups=1, num_experts=num_experts)
    return made


def by_bin(counts_PB: Tensor, *, total: int) -> Tensor:
    """Return indices, int64 [total], that bring rows received from P ranks into the order of B bins. counts_PB[p, b]: number of rows from
    rank p for bin b. Same result as `by_bin` of parallel/mesh/exchange.py, by one kernel."""
    counts_PB, out_R = counts_PB.contiguous(), counts_PB.new_empty(total)
    with on(counts_PB):
        moves.by_bin[(triton.cdiv(total, 64),)](counts_PB, out_R, total, *counts_PB.shape, BLOCK_R=64, BLOCK_N=64)
    return out_R
