"""Launches the kernels of moves.py. For top_k, kept, queues, plan and by_bin, counts and positions are integers, so results are exact.

Tokens are copied to rows sorted by expert, and rows are summed into tokens: each byte is read and written once, and sums are fp32. Each of
these functions computes the same as the one with its name in moe/kernels/rows.py.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from moe.kernels import rows
from moe.kernels.rows import Plan
from moe.kernels.triton import moves
from moe.kernels.triton.device import check_dtype, on
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


# T tokens, K choices, R rows, D width

_ELEMENTS = 4096  # elements that one program moves, 32 for each thread: enough loads at the same time to saturate memory bandwidth


def _blocks(width: int) -> tuple[int, int]:
    """Return (rows, columns) that one program handles. width: number of columns of the tensor."""
    columns = min(1024, max(16, triton.next_power_of_2(width)))
    return _ELEMENTS // columns, columns


def gather(source: Tensor, index_R: Tensor, choices: int = 1, *, scatter: bool = False) -> Tensor:
    """Return source[index // choices]; if the index holds flat choices t * K + k, `choices` is K. With `scatter`, return `out` with
    out[index] = source; index is then a permutation."""
    source, index_R, width = source.contiguous(), index_R.contiguous(), source.shape[1]
    out = source.new_empty(len(index_R), width)
    block_r, block_d = _blocks(width)
    with on(source):
        moves.gather[(triton.cdiv(len(index_R), block_r), triton.cdiv(width, block_d))](
            source, index_R, out, len(index_R), width, choices, SCATTER=scatter, BLOCK_R=block_r, BLOCK_D=block_d
        )
    return out


def total(rows_RD: Tensor, row_TK: Tensor, gate_TK: Tensor | None) -> Tensor:
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


def combine_backward(grad_TD: Tensor, rows_RD: Tensor, gate_TK: Tensor, plan: rows.Plan) -> tuple[Tensor, Tensor]:
    grad_TD, rows_RD, gate_TK = grad_TD.contiguous(), rows_RD.contiguous(), gate_TK.contiguous()
    grads = torch.empty_like(rows_RD), torch.zeros_like(gate_TK)
    (count, width), choices = rows_RD.shape, gate_TK.shape[1]
    block_r, block_d = _blocks(width)
    with on(rows_RD):
        moves.combine_backward[(triton.cdiv(count, block_r),)](
            *(grad_TD, rows_RD, gate_TK, plan.choice_R, plan.row_TK, *grads, count, width, choices), BLOCK_R=block_r, BLOCK_D=block_d
        )
    return grads


_MOVES = rows.Moves(gather, partial(gather, scatter=True), total, combine_backward)
permute, reorder, combine = (partial(move, moves=_MOVES) for move in (rows.permute, rows.reorder, rows.combine))
