"""Kernels that count choices, sort them by expert and move rows. Each element has one writer: no atomics, no additions at an index.
A choice is one of the K experts of a token.

Counting sort, stable:   count   number of choices of each expert in each block of choices
                         scan    number of the expert's choices in earlier blocks
                         rank    a choice's rank: scan's number + earlier choices of the same expert in the block;
                                 position after sorting by expert: rank + number of choices of all lower experts

The choices may be gathered from several ranks of the mesh: `row` [T] then has the row of each token in the gathered choices.

Kernels are not specialized for numbers of tokens, rows and tiles, which change at each step, so no step waits for the compiler.
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


@triton.jit
def best(score_TE, open_TE, expert_E):
    """Return each token's expert with the highest score, among the experts for which open_TE is True. Ties go to the lowest expert. NaN
    counts as infinity."""
    score_TE = tl.where(score_TE != score_TE, float("inf"), score_TE)
    left_TE = tl.where(open_TE, score_TE, float("-inf"))
    found_TE = open_TE & (left_TE == tl.max(left_TE, axis=1)[:, None])
    return tl.min(tl.where(found_TE, expert_E[None, :], 2**30), axis=1)


@triton.jit(do_not_specialize=["T"])
def top_k(scores, out, T, E, choices, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Write each token's `choices` experts with the highest scores to out [T, choices], best first."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    real_TE = (token_T < T)[:, None] & (expert_E < E)[None, :]
    score_TE = tl.load(scores + token_T.to(tl.int64)[:, None] * E + expert_E[None, :], mask=real_TE, other=0.0).to(tl.float32)
    open_TE = (expert_E < E)[None, :] & (token_T >= 0)[:, None]
    for k in range(choices):
        best_expert_T = best(score_TE, open_TE, expert_E)
        tl.store(out + token_T.to(tl.int64) * choices + k, best_expert_T.to(tl.int64), mask=token_T < T)
        open_TE = open_TE & (expert_E[None, :] != best_expert_T[:, None])


@triton.jit
def _choice(block, group, tokens, choices, QUEUE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the flat choices t * K + k of a block, and a mask of the choices that exist. QUEUE: a group's choices are in the order of k,
    so all tokens' first choices come first, and a block has choices of one k; otherwise in the order of t."""
    if QUEUE:
        blocks = (tokens + BLOCK - 1) // BLOCK  # number of blocks for each k
        place_N = block % blocks * BLOCK + tl.arange(0, BLOCK)
        return (group * tokens + place_N).to(tl.int64) * choices + block // blocks, place_N < tokens
    else:
        place_N = block * BLOCK + tl.arange(0, BLOCK)
        return group.to(tl.int64) * tokens * choices + place_N, place_N < tokens * choices


@triton.jit
def _stored(choice_N, real_N, row, choices):
    """Return the index of each choice in a flattened tensor [tokens, K]: t * K + k; with `row`, which maps token t to a row of another
    tensor, row[t] * K + k."""
    if row is not None:
        choice_N = tl.load(row + choice_N // choices, mask=real_N, other=0) * choices + choice_N % choices
    return choice_N


@triton.jit(do_not_specialize=["tokens"])
def count(expert, active, row, out, zeros, tokens, choices, E, QUEUE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):
    """Count the active choices of each expert in each block of a group. Write the numbers into out [groups, blocks + 1, E]; the kernel
    `scan` fills the entry after the last block. Choices of expert -1 are not counted.

    zeros: a tensor with one element for each choice, which is filled with 0, or None. The kernel `rank` gets it as `choice_of`, and writes
    the sorted choices into its first elements; inactive choices leave zeros at the end.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    choice_N, real_N = _choice(block, group, tokens, choices, QUEUE, BLOCK)
    active_N = real_N
    if active is not None:
        active_N = tl.load(active + choice_N, mask=real_N, other=0) != 0
    expert_N = tl.load(expert + _stored(choice_N, real_N, row, choices), mask=real_N, other=0).to(tl.int32)
    expert_E = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    equal_NE = (expert_N[:, None] == expert_E[None, :]) & active_N[:, None]
    at = out + (group.to(tl.int64) * (tl.num_programs(0) + 1) + block) * E
    tl.store(at + expert_E, tl.sum(equal_NE.to(tl.int32), axis=0), mask=expert_E < E)
    if zeros is not None:
        tl.store(zeros + choice_N, tl.zeros((BLOCK,), tl.int64), mask=real_N & (tl.program_id(2) == 0))


@triton.jit(do_not_specialize=["blocks"])
def scan(counts, totals, blocks, E, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr):
    """Replace counts [groups, blocks + 1, E] in place by their sums over earlier blocks of the group. If `totals` [E] is given,
    there is one group: write the sums over all its blocks into `totals`."""
    expert_E = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    passed_E = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, blocks + 1, BLOCK_B):
        block_B = first + tl.arange(0, BLOCK_B)
        at_BE = counts + (tl.program_id(1).to(tl.int64) * (blocks + 1) + block_B)[:, None] * E + expert_E[None, :]
        count_BE = tl.load(at_BE, mask=(block_B < blocks)[:, None] & (expert_E < E)[None, :], other=0)
        mask_BE = (block_B <= blocks)[:, None] & (expert_E < E)[None, :]
        tl.store(at_BE, passed_E[None, :] + tl.cumsum(count_BE, axis=0) - count_BE, mask=mask_BE)
        passed_E += tl.sum(count_BE, axis=0)
    if totals is not None:
        tl.store(totals + expert_E, passed_E.to(tl.int64), mask=expert_E < E)


@triton.jit(do_not_specialize=["tokens", "slots", "first", "mine"])
def rank(expert, active, row, before, totals, out, choice_of, slots, first, mine, tokens, choices, E, QUEUE: tl.constexpr,
         BLOCK: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Rank the choices of each expert within each group of tokens. Write one of two results into out [T, K]:

    without `totals`          whether a choice is active and among the first `slots` active choices of its expert in the group. With `row`,
                              only for this rank's choices: the gathered choices `first` to `first + mine - 1`
    with `totals`, one group  an active choice's position after sorting by expert; -1 for an inactive choice. Also write the choice at each
                              position into `choice_of`

    `before` [groups, blocks + 1, E]: number of an expert's active choices in earlier blocks of the group. `totals` [E]: in all
    blocks, or None.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    choice_N, real_N = _choice(block, group, tokens, choices, QUEUE, BLOCK)
    active_N = real_N
    if active is not None:
        active_N = tl.load(active + choice_N, mask=real_N, other=0) != 0
    stored_N = _stored(choice_N, real_N, row, choices)
    expert_N = tl.load(expert + stored_N, mask=real_N, other=0).to(tl.int32)
    active_N = active_N & (expert_N >= 0)
    key_N = tl.where(active_N, expert_N, -1)
    place_N = tl.arange(0, BLOCK)
    earlier_NN = (key_N[:, None] == key_N[None, :]) & (place_N[None, :] < place_N[:, None])
    at = before + (group.to(tl.int64) * (tl.num_programs(0) + 1) + block) * E
    rank_N = tl.load(at + expert_N, mask=active_N, other=0).to(tl.int64) + tl.sum(earlier_NN.to(tl.int32), axis=1)
    if totals is None:
        if row is not None:
            stored_N -= first
            real_N = real_N & (stored_N >= 0) & (stored_N < mine)
        tl.store(out + stored_N, active_N & (rank_N < slots), mask=real_N)
    else:
        for first in range(0, E, BLOCK_E):
            expert_E = first + tl.arange(0, BLOCK_E)
            total_E = tl.load(totals + expert_E, mask=expert_E < E, other=0).to(tl.int32)
            rank_N += tl.sum(tl.where(expert_E[None, :] < expert_N[:, None], total_E[None, :], 0), axis=1)
        tl.store(out + choice_N, tl.where(active_N, rank_N, -1), mask=real_N)
        tl.store(choice_of + rank_N, choice_N, mask=active_N)


@triton.jit(do_not_specialize=["R"])
def by_bin(counts, out, R, P, B, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write the indices that sort R rows by (bin, source): a bin is an expert, a source a rank. The rows arrived sorted by (source, bin).
    `counts` [P, B]: number of rows of each pair (source, bin)."""
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    passed_R, end = tl.zeros((BLOCK_R,), tl.int32), tl.zeros((1,), tl.int32)
    begin_R = passed_R
    # pairs sorted by (bin, source); passed_R: number of pairs before the one that has row R; begin_R: number of rows of those pairs
    for first in range(0, P * B, BLOCK_N):
        pair_N = first + tl.arange(0, BLOCK_N)
        count_N = tl.load(counts + pair_N % P * B + pair_N // P, mask=pair_N < P * B, other=0).to(tl.int32)
        ended_RN = (end + tl.cumsum(count_N, axis=0))[None, :] <= row_R[:, None]
        passed_R += tl.sum((ended_RN & (pair_N < P * B)[None, :]).to(tl.int32), axis=1)
        begin_R += tl.sum(tl.where(ended_RN, count_N[None, :], 0), axis=1)
        end += tl.sum(count_N, axis=0)
    mine_R = passed_R % P * B + passed_R // P
    # pairs sorted by (source, bin), the order of arrival: subtract from begin_R the number of rows that arrived before the row's pair
    for first in range(0, P * B, BLOCK_N):
        pair_N = first + tl.arange(0, BLOCK_N)
        count_N = tl.load(counts + pair_N, mask=pair_N < P * B, other=0).to(tl.int32)
        begin_R -= tl.sum(tl.where(pair_N[None, :] < mine_R[:, None], count_N[None, :], 0), axis=1)
    tl.store(out + row_R, (row_R - begin_R).to(tl.int64), mask=row_R < R)


@triton.jit(do_not_specialize=["num_tiles"])
def tile_map(counts, ends, out, num_tiles, E, TILE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """Given each expert's number of rows, write for each tile of TILE rows into out [tiles, 3]: its expert (-1: a tile without rows), its
    first row, and the end of the expert's rows. Write the end of each expert's rows, then the number of tiles with rows, into ends [E + 1].
    """
    tile_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts + expert_E, mask=expert_E < E, other=0).to(tl.int32)
    end_E = tl.cumsum(count_E, axis=0)
    begin_E = end_E - count_E
    tl.store(ends + expert_E, end_E, mask=(expert_E < E) & (tl.program_id(0) == 0))
    tiles_E = (count_E + TILE - 1) // TILE
    last_E = tl.cumsum(tiles_E, axis=0)
    tl.store(ends + E, tl.max(last_E, axis=0), mask=tl.program_id(0) == 0)
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
    """For a row r with choice c = choice[r] of token t = c // K, compute grad_rows[r] = gate[c] * grad[t] and
    grad_gate[c] = <grad[t], rows[r]>, reading grad once. `row`: the row of each choice. A row that is not in `row`, such as an empty slot,
    changes no gate's gradient.
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


@triton.jit(do_not_specialize=["N"])
def gate_gradient(parts, row, out, N, P, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr):
    """Compute out[n] = sum of parts[row[n]], the P partial sums of a row, for N choices; row -1 gives 0."""
    choice_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row_N = tl.load(row + choice_N, mask=choice_N < N, other=-1)
    sum_N = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(0, P, BLOCK_P):
        part_P = first + tl.arange(0, BLOCK_P)
        mask_NP = (row_N >= 0)[:, None] & (part_P < P)[None, :]
        sum_N += tl.sum(tl.load(parts + row_N[:, None] * P + part_P[None, :], mask=mask_NP, other=0.0), axis=1)
    put(out + choice_N, sum_N, choice_N < N)


@triton.jit
def cast(first, second, out_first, out_second, N, BLOCK: tl.constexpr):
    """Copy two tensors of N elements, rounded to the results' dtype. Grid: (blocks of elements, 2 tensors)."""
    at_N = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        put(out_first + at_N, tl.load(first + at_N, mask=at_N < N).to(tl.float32), at_N < N)
    else:
        put(out_second + at_N, tl.load(second + at_N, mask=at_N < N).to(tl.float32), at_N < N)
