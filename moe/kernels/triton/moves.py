"""Kernels that count choices, sort them by expert and move rows. Each element has one writer: no atomics, no additions at an index.

Counting sort, stable:   count   number of choices of each expert in each block of choices
                         (host)  cumulative sums over blocks: the first position of each expert's choices in each block
                         rank    first position + number of earlier choices of the same expert in the block

Kernels are not specialised for numbers of tokens, rows and tiles, which change at each step, so no step waits for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe.kernels.triton.device import INTERPRETED as _INTERPRETED

INTERPRETED: tl.constexpr = tl.constexpr(_INTERPRETED)

# T tokens, R rows, E experts, D width, N choices of a block, K choices of a token (the argument `choices`)


@triton.jit
def rounded(value, at):
    """Round an fp32 value to the dtype of pointer `at` (to nearest even); return fp32. Triton's interpreter would truncate bf16."""
    if at.dtype.element_ty == tl.float32:
        return value
    elif INTERPRETED and at.dtype.element_ty == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return value.to(at.dtype.element_ty).to(tl.float32)


@triton.jit
def put(at, value, mask):
    """Store an fp32 value, rounded to nearest even."""
    if INTERPRETED:
        value = rounded(value, at)
    tl.store(at, value, mask=mask)


@triton.jit(do_not_specialize=["T"])
def top_k(scores, out, T, E, choices, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write each token's `choices` best experts to out, one maximum after another; ties go to the lowest expert. NaN counts as infinity."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    real_TE = (token_T < T)[:, None] & (expert_E < E)[None, :]
    score_TE = tl.load(scores + token_T.to(tl.int64)[:, None] * E + expert_E[None, :], mask=real_TE, other=0.0).to(tl.float32)
    score_TE = tl.where(score_TE != score_TE, float("inf"), score_TE)
    open_TE = (expert_E < E)[None, :] & (token_T >= 0)[:, None]
    for k in range(choices):
        left_TE = tl.where(open_TE, score_TE, float("-inf"))
        best_T = tl.max(left_TE, axis=1)
        found_TE = open_TE & (left_TE == best_T[:, None])
        best_expert_T = tl.min(tl.where(found_TE, expert_E[None, :], BLOCK_E), axis=1)
        tl.store(out + token_T.to(tl.int64) * choices + k, best_expert_T.to(tl.int64), mask=token_T < T)
        open_TE = open_TE & (expert_E[None, :] != best_expert_T[:, None])


@triton.jit
def _choice(block, group, tokens, choices, QUEUE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the flat choices t * K + k of a block, and which exist. QUEUE: all first choices, then all second ones; else token order."""
    place_N = block * BLOCK + tl.arange(0, BLOCK)
    real_N = place_N < tokens * choices
    if QUEUE:
        choice_N = (group * tokens + place_N % tokens).to(tl.int64) * choices + place_N // tokens
    else:
        choice_N = group.to(tl.int64) * tokens * choices + place_N
    return choice_N, real_N


@triton.jit(do_not_specialize=["tokens"])
def count(expert, active, out, tokens, choices, E, QUEUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write the number of active choices of each expert in each block of a group into out [groups, blocks, E]."""
    block, group = tl.program_id(0), tl.program_id(1)
    choice_N, real_N = _choice(block, group, tokens, choices, QUEUE, BLOCK)
    active_N = tl.load(active + choice_N, mask=real_N, other=0) != 0
    expert_N = tl.load(expert + choice_N, mask=real_N, other=0).to(tl.int32)
    expert_E = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    equal_NE = (expert_N[:, None] == expert_E[None, :]) & active_N[:, None]
    at = out + (group.to(tl.int64) * tl.num_programs(0) + block) * E
    tl.store(at + expert_E, tl.sum(equal_NE.to(tl.int32), axis=0), mask=expert_E < E)


@triton.jit(do_not_specialize=["tokens"])
def rank(expert, active, before, out, choice_of, tokens, choices, E, QUEUE: tl.constexpr, BLOCK: tl.constexpr):
    """Write each choice's position in its expert's queue into out [T, K], -1 for inactive choices. `before` [groups, blocks, E]: number of
    the expert's choices in earlier blocks. `choice_of`, if given: receives the flat choice at each position.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    choice_N, real_N = _choice(block, group, tokens, choices, QUEUE, BLOCK)
    active_N = tl.load(active + choice_N, mask=real_N, other=0) != 0
    expert_N = tl.load(expert + choice_N, mask=real_N, other=0).to(tl.int32)
    key_N = tl.where(active_N, expert_N, -1)
    place_N = tl.arange(0, BLOCK)
    earlier_NN = (key_N[:, None] == key_N[None, :]) & (place_N[None, :] < place_N[:, None])
    at = before + (group.to(tl.int64) * tl.num_programs(0) + block) * E
    rank_N = tl.load(at + expert_N, mask=active_N, other=0).to(tl.int64) + tl.sum(earlier_NN.to(tl.int32), axis=1)
    tl.store(out + choice_N, tl.where(active_N, rank_N, -1), mask=real_N)
    if choice_of is not None:
        tl.store(choice_of + rank_N, choice_N, mask=active_N)


@triton.jit(do_not_specialize=["num_tiles"])
def tile_map(ends, out, num_tiles, E, TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write expert (-1: none), first row and end of each tile of TILE rows into out [tiles, 3]. `ends` [E]: end of each expert's rows."""
    tile_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    end_E = tl.load(ends + expert_E, mask=expert_E < E, other=0)
    begin_E = tl.load(ends + expert_E - 1, mask=(expert_E > 0) & (expert_E < E), other=0)
    tiles_E = tl.where(expert_E < E, (end_E - begin_E + TILE - 1) // TILE, 0)
    last_E = tl.cumsum(tiles_E, axis=0)
    passed_TE = (last_E[None, :] <= tile_T[:, None]) & (expert_E < E)[None, :]
    expert_T = tl.sum(passed_TE.to(tl.int32), axis=1)
    mine_TE = expert_E[None, :] == expert_T[:, None]
    first_T = tl.sum(tl.where(mine_TE, (begin_E - (last_E - tiles_E) * TILE)[None, :], 0), axis=1) + tile_T * TILE
    end_T = tl.sum(tl.where(mine_TE, end_E[None, :], 0), axis=1)
    tl.store(out + 3 * tile_T, tl.where(expert_T < E, expert_T, -1), mask=tile_T < num_tiles)
    tl.store(out + 3 * tile_T + 1, first_T, mask=tile_T < num_tiles)
    tl.store(out + 3 * tile_T + 2, end_T, mask=tile_T < num_tiles)


@triton.jit(do_not_specialize=["R"])
def gather(source, index, out, R, D, choices, SCATTER: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute out[r] = source[index[r] // choices]. SCATTER: out[index[r]] = source[r]; the index is then a permutation."""
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    width_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    other_R = tl.load(index + row_R, mask=row_R < R, other=0) // choices
    mask_RD = (row_R < R)[:, None] & (width_D < D)[None, :]
    here_RD = row_R.to(tl.int64)[:, None] * D + width_D[None, :]
    there_RD = other_R[:, None] * D + width_D[None, :]
    if SCATTER:
        tl.store(out + there_RD, tl.load(source + here_RD, mask=mask_RD), mask=mask_RD)
    else:
        tl.store(out + here_RD, tl.load(source + there_RD, mask=mask_RD), mask=mask_RD)


@triton.jit(do_not_specialize=["T"])
def total(rows, gate, row, out, T, D, choices, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute out[t] = sum over k of [gate[t, k] *] rows[row[t, k]], in fp32, in the order of k; row -1 adds nothing."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    width_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_TD = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for k in range(choices):
        choice_T = token_T.to(tl.int64) * choices + k
        row_T = tl.load(row + choice_T, mask=token_T < T, other=-1)
        mask_TD = (row_T >= 0)[:, None] & (width_D < D)[None, :]
        value_TD = tl.load(rows + row_T[:, None] * D + width_D[None, :], mask=mask_TD, other=0.0).to(tl.float32)
        if gate is not None:
            value_TD *= tl.load(gate + choice_T, mask=row_T >= 0, other=0.0).to(tl.float32)[:, None]
        sum_TD += value_TD
    mask_TD = (token_T < T)[:, None] & (width_D < D)[None, :]
    put(out + token_T.to(tl.int64)[:, None] * D + width_D[None, :], sum_TD, mask_TD)


@triton.jit(do_not_specialize=["R"])
def combine_backward(grad, rows, gate, choice, row, grad_rows, grad_gate, R, D, choices, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute grad_rows[r] = gate * grad[token] and grad_gate[choice] = <grad[token], rows[r]>, reading grad once. `row`: the row of each
    choice. A row r that it does not have, such as an empty slot, changes no gate's gradient.
    """
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    choice_R = tl.load(choice + row_R, mask=row_R < R, other=0)
    gate_R = tl.load(gate + choice_R, mask=row_R < R, other=0.0).to(tl.float32)
    dot_R = tl.zeros((BLOCK_R,), tl.float32)
    for first in range(0, D, BLOCK_D):
        width_D = first + tl.arange(0, BLOCK_D)
        mask_RD = (row_R < R)[:, None] & (width_D < D)[None, :]
        here_RD = row_R.to(tl.int64)[:, None] * D + width_D[None, :]
        grad_RD = tl.load(grad + (choice_R // choices)[:, None] * D + width_D[None, :], mask=mask_RD, other=0.0).to(tl.float32)
        dot_R += tl.sum(grad_RD * tl.load(rows + here_RD, mask=mask_RD, other=0.0).to(tl.float32), axis=1)
        put(grad_rows + here_RD, grad_RD * gate_R[:, None], mask_RD)
    put(grad_gate + choice_R, dot_R, (row_R < R) & (tl.load(row + choice_R, mask=row_R < R, other=-1) == row_R))
