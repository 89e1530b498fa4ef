"""Grouped matrix products. Each row tile belongs to one expert. Some products have an epilogue, which changes a tile before its store.

    up        H = X[token] W1, G = X[token] W3, A = activation(H) [* G] [* scale]    rows are gathered by the load
    product   out = A W2                and  dX = dH W1^T [+ dG W3^T]
    back      dA = dO[token] W2^T, and from it dH, dG, gate * A and the terms of <dA, A>, the gate's gradient
    weights   dW = left^T right over one expert's rows, left or right gathered, or neither

dX is the gradient of X, and so on; O is the layer's output for each token. All sums are fp32. Weights are contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moe.kernels.triton.moves import INTERPRETED, put, rounded

# M a tile's rows, N its columns, K the dim of the sum; R rows, D model, F hidden, E experts
# ALPHA, LIMIT, OFFSET: constants of swiglu, u sigmoid(ALPHA u) * (clamp(g, -LIMIT, LIMIT) + OFFSET) with u = min(h, LIMIT)
# EVEN: True if the block sizes divide the matrices' dims, so that loads and stores need no mask for columns


@triton.jit
def dot(a_MK, b_KN, sum_MN):
    """Add the product of two blocks to fp32 sums. fp32 elements are not rounded to TF32."""
    if INTERPRETED:  # the interpreter handles bf16 as raw bits only; products of two bf16 are exact in fp32
        a_MK, b_KN = a_MK.to(tl.float32), b_KN.to(tl.float32)
    return tl.dot(a_MK, b_KN, sum_MN, input_precision="ieee")


@triton.jit
def in_group(tile, rows, columns, group):
    """Return the row and the column of a matrix's tile. Tiles are numbered in groups of `group` tile rows, and within a group column by
    column, so that operands that neighboring tiles share stay in the L2 cache."""
    number = tile // (group * columns)
    size = tl.minimum(rows - number * group, group)
    inside = tile % (group * columns)
    return number * group + inside % size, inside // size


@triton.jit
def placed(tile, rows, columns, group, across):
    """Return the row and the column of a matrix's tile. Tiles are numbered as in `in_group`; if `across` is not 0, rows and columns are
    exchanged, so a group has `group` tile columns."""
    across = across != 0
    first, second = in_group(tile, tl.where(across, columns, rows), tl.where(across, rows, columns), group)
    return tl.where(across, second, first), tl.where(across, first, second)


@triton.jit
def _tile(tiles, num_tiles, num_columns, GROUP: tl.constexpr):
    """Return the index of this program's column tile and, for its row tile, the expert, the first row and the end of the expert's rows.
    GROUP: number of row tiles in a group (`in_group`)."""
    row, column = in_group(tl.program_id(0), num_tiles, num_columns, GROUP)
    at = tiles + 3 * row
    return column, tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _source(choice, row_M, end, choices):
    """Return each row's source: its token or, without `choice`, the row itself. Rows beyond `end`, which are not stored, get some valid
    source."""
    if choice is not None:
        return tl.load(choice + row_M, mask=row_M < end, other=0) // choices
    else:
        return tl.minimum(row_M, end - 1).to(tl.int64)


@triton.jit
def _rows(at, source_M, k_K, width, EVEN: tl.constexpr):
    at_MK = at + source_M[:, None] * width + k_K[None, :]
    if EVEN:
        return tl.load(at_MK)
    else:
        return tl.load(at_MK, mask=(k_K < width)[None, :], other=0.0)


@triton.jit
def _matrix(at, expert, k_K, n_N, inner, columns, TURNED: tl.constexpr, EVEN: tl.constexpr):
    """Load the block [K, N] of the expert's [inner, columns] matrix. TURNED: memory holds its transpose [columns, inner]."""
    at += expert.to(tl.int64) * inner * columns
    at_KN = at + n_N.to(tl.int64)[None, :] * inner + k_K[:, None] if TURNED else at + k_K.to(tl.int64)[:, None] * columns + n_N[None, :]
    if EVEN:
        return tl.load(at_KN)
    else:
        return tl.load(at_KN, mask=(k_K < inner)[:, None] & (n_N < columns)[None, :], other=0.0)


@triton.jit
def _activation(h, FFN: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the activation and its derivative at h, in fp32. gelu is its tanh form, computed as the equal h * sigmoid(2 sqrt(2 / pi) (h +
    0.044715 h^3)). NaN stays NaN."""
    if FFN == "relu":
        return tl.where(h <= 0, 0.0, h), tl.where(h > 0, 1.0, 0.0)
    elif FFN == "swiglu":
        bounded = h
        if LIMIT is not None:
            bounded = tl.where(h > LIMIT, LIMIT, h)
        s = tl.sigmoid(ALPHA * bounded)
        slope = s * (1 + ALPHA * bounded * (1 - s))
        if LIMIT is not None:
            slope = tl.where(h > LIMIT, 0.0, slope)
        return bounded * s, slope
    else:
        s = tl.sigmoid(1.5957691216057308 * h * (1 + 0.044715 * h * h))
        return h * s, s + h * s * (1 - s) * 1.5957691216057308 * (1 + 3 * 0.044715 * h * h)


@triton.jit
def _gate(g, LIMIT: tl.constexpr, OFFSET: tl.constexpr):
    """Return the factor by which the activation of h is multiplied: clamp(g, -LIMIT, LIMIT) + OFFSET."""
    if LIMIT is not None:
        g = tl.where(g > LIMIT, LIMIT, tl.where(g < -LIMIT, -LIMIT, g))
    return g + OFFSET


@triton.jit
def _bias(at, expert, n_N, width, EVEN: tl.constexpr):
    at += expert.to(tl.int64) * width
    if EVEN:
        return tl.load(at + n_N).to(tl.float32)
    else:
        return tl.load(at + n_N, mask=n_N < width, other=0.0).to(tl.float32)


@triton.jit
def place(begin, end, row_M, n_N, width, EVEN: tl.constexpr):
    """Return the offset of a tile's corner, each element's 32-bit offset from the corner (64 bits would cost registers), and a mask of the
    elements inside the matrix and before row `end`. begin: the tile's first row. width: columns of the matrix."""
    corner = begin.to(tl.int64) * width
    mask_MN = (row_M < end)[:, None] if EVEN else (row_M < end)[:, None] & (n_N < width)[None, :]
    return corner, (row_M - begin)[:, None] * width + n_N[None, :], mask_MN


@triton.jit(do_not_specialize=["num_tiles"])
def up(
    x, w1, w3, b1, b3, scale, h, g, a, choice, tiles, num_tiles, choices, D, F,
    FFN: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute hidden units h, gates g and activations a, all [R, F], of the rows x[token]. `w3`, `g`: None without a gated activation. `h`,
    `g`: None if no backward pass follows. `scale`: dropout's factors [R, F], or None. `choice`: the flat choice t * K + k of each row, with
    K = `choices`; None: x has rows instead of tokens.
    """
    column, expert, begin, end = _tile(tiles, num_tiles, tl.cdiv(F, BLOCK_N), GROUP)
    if expert < 0:
        return
    row_M = begin + tl.arange(0, BLOCK_M)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
    source_M = _source(choice, row_M, end, choices)
    h_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    g_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, D, BLOCK_K):
        k_K = first + tl.arange(0, BLOCK_K)
        x_MK = _rows(x, source_M, k_K, D, EVEN)
        h_MN = dot(x_MK, _matrix(w1, expert, k_K, n_N, D, F, False, EVEN), h_MN)
        if w3 is not None:
            g_MN = dot(x_MK, _matrix(w3, expert, k_K, n_N, D, F, False, EVEN), g_MN)
    # half the columns at a time: sums and activations of the whole tile would not fit into registers
    left_MN, right_MN = _halves(h_MN)
    left_gate_MN, right_gate_MN = _halves(g_MN)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N // 2)
    _up_half(
        left_MN, left_gate_MN, b1, b3, scale, h, g, a, expert, begin, row_M, end, n_N, F, w3 is not None, FFN, ALPHA, LIMIT, OFFSET, EVEN
    )
    n_N += BLOCK_N // 2
    _up_half(
        right_MN, right_gate_MN, b1, b3, scale, h, g, a, expert, begin, row_M, end, n_N, F, w3 is not None, FFN, ALPHA, LIMIT, OFFSET, EVEN
    )


@triton.jit
def _halves(sum_MN):
    """Return the left and the right half of a tile's columns."""
    rows: tl.constexpr = sum_MN.shape[0]
    columns: tl.constexpr = sum_MN.shape[1]
    return tl.split(tl.permute(tl.reshape(sum_MN, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def _up_half(
    h_MN, g_MN, b1, b3, scale, h, g, a, expert, begin, row_M, end, n_N, F,
    GATED: tl.constexpr, FFN: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Store the hidden units h, gates g and activations a of columns n_N."""
    corner, at_MN, mask_MN = place(begin, end, row_M, n_N, F, EVEN)
    if b1 is not None:
        h_MN += _bias(b1, expert, n_N, F, EVEN)[None, :]
    if b3 is not None:
        g_MN += _bias(b3, expert, n_N, F, EVEN)[None, :]
    # round to the stored dtype, so that the backward pass recomputes the same activation to the bit
    h_MN = rounded(h_MN, a)
    a_MN, _ = _activation(h_MN, FFN, ALPHA, LIMIT)
    if h is not None:
        put(h + corner + at_MN, h_MN, mask_MN)
    if GATED:
        g_MN = rounded(g_MN, a)
        a_MN *= _gate(g_MN, LIMIT, OFFSET)
        if g is not None:
            put(g + corner + at_MN, g_MN, mask_MN)
    if scale is not None:
        a_MN *= tl.load(scale + corner + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
    put(a + corner + at_MN, a_MN, mask_MN)


@triton.jit(do_not_specialize=["num_tiles"])
def product(
    a, w, a_too, w_too, out, tiles, num_tiles, inner, columns,
    TURNED: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute out[r] = a[r] w[e] [+ a_too[r] w_too[e]] for each row r of expert e, out [R, columns]. w is [E, inner, columns], or [E,
    columns, inner] if TURNED. tiles: for each row tile (expert, first row, end of the expert's rows); expert -1: a tile without rows.
    """
    column, expert, begin, end = _tile(tiles, num_tiles, tl.cdiv(columns, BLOCK_N), GROUP)
    if expert < 0:
        return
    row_M = begin + tl.arange(0, BLOCK_M)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
    source_M = _source(None, row_M, end, 1)
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, inner, BLOCK_K):
        k_K = first + tl.arange(0, BLOCK_K)
        sum_MN = dot(_rows(a, source_M, k_K, inner, EVEN), _matrix(w, expert, k_K, n_N, inner, columns, TURNED, EVEN), sum_MN)
    if a_too is not None:
        for first in range(0, inner, BLOCK_K):
            k_K = first + tl.arange(0, BLOCK_K)
            sum_MN = dot(_rows(a_too, source_M, k_K, inner, EVEN), _matrix(w_too, expert, k_K, n_N, inner, columns, TURNED, EVEN), sum_MN)
    corner, at_MN, mask_MN = place(begin, end, row_M, n_N, columns, EVEN)
    put(out + corner + at_MN, sum_MN, mask_MN)


@triton.jit(do_not_specialize=["num_tiles"])
def back(
    grad, w2, gate, scale, h, g, grad_h, grad_g, a_gated, parts, choice, tiles, num_tiles, choices, D, F,
    FFN: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute the gradients of h and g, and gate * a, all [R, F], with a = activation(h) [* g] [* scale]. Also write `parts` [R, column
    tiles] fp32: the dot product of a and grad w2^T in each column tile; their sum is the gradient of `gate`, the router's gates [T, K].
    `gate`, `parts`: None if rows are not combined. `scale`: dropout's factors. `choice`: index t K + k of each row's choice;
    None: `grad` has rows instead of tokens.
    """
    columns = tl.cdiv(F, BLOCK_N)
    column, expert, begin, end = _tile(tiles, num_tiles, columns, GROUP)
    if expert < 0:
        return
    row_M = begin + tl.arange(0, BLOCK_M)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
    source_M = _source(choice, row_M, end, choices)
    grad_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, D, BLOCK_K):
        k_K = first + tl.arange(0, BLOCK_K)
        grad_MN = dot(_rows(grad, source_M, k_K, D, EVEN), _matrix(w2, expert, k_K, n_N, D, F, True, EVEN), grad_MN)
    gate_M = None
    if gate is not None:
        gate_M = tl.load(gate + tl.load(choice + row_M, mask=row_M < end, other=0), mask=row_M < end, other=0.0).to(tl.float32)
    # half the columns at a time: sums, h, g and derivatives of the whole tile would not fit into registers
    left_MN, right_MN = _halves(grad_MN)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N // 2)
    part_M = _back_half(left_MN, gate_M, scale, h, g, grad_h, grad_g, a_gated, begin, row_M, end, n_N, F, FFN, ALPHA, LIMIT, OFFSET, EVEN)
    n_N += BLOCK_N // 2
    part_M += _back_half(right_MN, gate_M, scale, h, g, grad_h, grad_g, a_gated, begin, row_M, end, n_N, F, FFN, ALPHA, LIMIT, OFFSET, EVEN)
    if gate is not None:
        tl.store(parts + row_M.to(tl.int64) * columns + column, part_M, mask=row_M < end)


@triton.jit
def _back_half(
    grad_MN, gate_M, scale, h, g, grad_h, grad_g, a_gated, begin, row_M, end, n_N, F,
    FFN: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """Store `grad_h`, `grad_g` and `a_gated` (gate * a) of columns n_N. Return, for each row, the dot product of a and `grad_MN`
    (grad w2^T) over these columns."""
    corner, at_MN, mask_MN = place(begin, end, row_M, n_N, F, EVEN)
    act_MN, slope_MN = _activation(tl.load(h + corner + at_MN, mask=mask_MN, other=0.0).to(tl.float32), FFN, ALPHA, LIMIT)
    if g is not None:
        up_MN = tl.load(g + corner + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
        g_MN = _gate(up_MN, LIMIT, OFFSET)
        a_MN = act_MN * g_MN
        slope_MN *= g_MN
    else:
        a_MN = act_MN
    if scale is not None:
        scale_MN = tl.load(scale + corner + at_MN, mask=mask_MN, other=0.0).to(tl.float32)
        a_MN *= scale_MN
    part_M = tl.sum(tl.where(mask_MN, grad_MN * a_MN, 0.0), axis=1)
    if gate_M is not None:
        grad_MN *= gate_M[:, None]
        a_MN *= gate_M[:, None]
    if scale is not None:
        grad_MN *= scale_MN
    put(a_gated + corner + at_MN, a_MN, mask_MN)
    put(grad_h + corner + at_MN, grad_MN * slope_MN, mask_MN)
    if g is not None:
        if LIMIT is not None:
            act_MN = tl.where((up_MN > LIMIT) | (up_MN < -LIMIT), 0.0, act_MN)
        put(grad_g + corner + at_MN, grad_MN * act_MN, mask_MN)
    return part_M


@triton.jit(do_not_specialize=["group", "across"])
def weights(
    left, right, out, left_choice, right_choice, ends, choices, height, width, group, across,
    EVEN: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute out[e] = left^T right over expert e's rows, zero if it has none. `left_choice`, `right_choice`: None if the operand consists
    of such rows. Otherwise it has one row per token t, and this tensor holds each row's t K + k. `choices`: K. `ends` [E]: end of
    each expert's rows. `group`, `across`: the order of the tiles (`placed`)."""
    rows, columns = tl.cdiv(height, BLOCK_M), tl.cdiv(width, BLOCK_N)
    program = tl.program_id(0)
    expert = program // (rows * columns)
    row, column = placed(program % (rows * columns), rows, columns, group, across)
    m_M = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n_N = column * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    row_K = begin + tl.arange(0, BLOCK_K)
    left_K, right_K = _source(left_choice, row_K, end, choices), _source(right_choice, row_K, end, choices)
    for _ in range(begin, end, BLOCK_K):
        left_MK = tl.trans(_expert_rows(left, left_K, row_K < end, m_M, height, EVEN))
        sum_MN = dot(left_MK, _expert_rows(right, right_K, row_K < end, n_N, width, EVEN), sum_MN)
        row_K += BLOCK_K  # the next block's choices are loaded one block ahead, so that its rows need not wait for them
        left_K, right_K = _source(left_choice, row_K, end, choices), _source(right_choice, row_K, end, choices)
    corner, at_MN, mask_MN = place(row * BLOCK_M, height, m_M, n_N, width, EVEN)
    put(out + expert.to(tl.int64) * height * width + corner + at_MN, sum_MN, mask_MN)


@triton.jit
def _expert_rows(at, source_K, real_K, n_N, width, EVEN: tl.constexpr):
    """Load [K, N]: columns n_N of rows source_K, with zeros for rows of other experts (real_K False). Both operands of a product are loaded
    so: zeros in only one would give NaN where the other is infinite."""
    at_KN = at + source_K[:, None] * width + n_N[None, :]
    if EVEN:
        return tl.load(at_KN, mask=real_K[:, None], other=0.0)
    else:
        return tl.load(at_KN, mask=real_K[:, None] & (n_N < width)[None, :], other=0.0)
