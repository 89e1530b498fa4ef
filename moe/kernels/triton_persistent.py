"""A variant of the kernels `triton`: a persistent grid computes the two products that read their rows in order, without a gather:
A W2 in the forward pass and dH W1^T + dG W3^T in the backward pass. A: the activation's output. dH, dG: gradients of X W1 and X W3.

    multiprocessor 0    loads       tile 0 .... | tile 132 ......... | tile 264 ...
                        products      tile 0 .... | tile 132 ......... | tile 264 ...
                        stores                     tile 0               tile 132

Each multiprocessor computes one tile after another in one flattened loop, so the next tile's first blocks are loaded while a tile is
stored. Blocks of rows and weights are copied by TMA, which needs compute capability 9.0. All other operations use the kernels of `triton`,
and so do these two products for fp32 rows, which use no tensor cores. The drawing is for 132 multiprocessors (H100). The variant has not
been timed on a GPU yet, so `auto` does not take it.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.auto import combine, kept, kernels_of, permute, plan, reorder, top_k
from moe.kernels.triton import network
from moe.kernels.triton.device import has_tma, multiprocessors, on, tile
from moe.kernels.triton.gemm import dot, in_group, place
from moe.kernels.triton.moves import put
from moe.kernels.triton.network import Rows
from parallel.errors import BadInput
from parallel.fixes import Set

__all__ = ["combine", "grouped_ffn", "kept", "kernels_of", "permute", "plan", "reorder", "routed_ffn", "top_k"]

# M a tile's rows, N its columns, K the dim of the sum; R rows, E experts


@triton.jit
def _matrices(w, E, inner, columns, TURNED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return a descriptor of the experts' matrices [E, inner, columns]. TURNED: memory holds [E, columns, inner]."""
    if TURNED:
        return tl.make_tensor_descriptor(w, [E, columns, inner], [columns * inner.to(tl.int64), inner, 1], [1, BLOCK_N, BLOCK_K])
    else:
        return tl.make_tensor_descriptor(w, [E, inner, columns], [columns * inner.to(tl.int64), columns, 1], [1, BLOCK_K, BLOCK_N])


@triton.jit(do_not_specialize=["R"])
def persistent_product(
    a, w, a_too, w_too, out, tiles, used, R, E, inner, columns,
    TURNED: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Compute out[r] = a[r] w[e] [+ a_too[r] w_too[e]] for each row r of expert e, by any number of programs. tiles: for each row tile
    (expert, first row, end of the expert's rows). used [1]: number of row tiles that have rows. w[e] is [inner, columns], in memory
    [columns, inner] if TURNED. EVEN: BLOCK_N divides columns. GROUP: number of row tiles that are computed together, column by
    column, to reuse the L2 cache. An expert's last tile may include rows of the next expert; their sums are not stored. Beyond a
    tensor's end, TMA loads zeros."""
    rows_first = tl.make_tensor_descriptor(a, [R, inner], [inner, 1], [BLOCK_M, BLOCK_K])
    matrices_first = _matrices(w, E, inner, columns, TURNED, BLOCK_N, BLOCK_K)
    if a_too is not None:
        rows_too = tl.make_tensor_descriptor(a_too, [R, inner], [inner, 1], [BLOCK_M, BLOCK_K])
        matrices_too = _matrices(w_too, E, inner, columns, TURNED, BLOCK_N, BLOCK_K)
    num_tiles, num_columns, steps = tl.load(used), tl.cdiv(columns, BLOCK_N), tl.cdiv(inner, BLOCK_K)
    for number in tl.range(tl.program_id(0), num_tiles * num_columns, tl.num_programs(0), flatten=True):
        row, column = in_group(number, num_tiles, num_columns, GROUP)
        expert, begin, end = tl.load(tiles + 3 * row), tl.load(tiles + 3 * row + 1), tl.load(tiles + 3 * row + 2)
        sum_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(steps if a_too is None else 2 * steps):  # one loop for both products: `flatten` allows one inner loop
            rows, matrices, first = rows_first, matrices_first, step * BLOCK_K
            if a_too is not None:  # noqa: SIM102  known at compile time; the next condition is not
                if step >= steps:
                    rows, matrices, first = rows_too, matrices_too, (step - steps) * BLOCK_K
            a_MK = rows.load([begin, first])
            if TURNED:
                w_KN = tl.trans(tl.reshape(matrices.load([expert, column * BLOCK_N, first]), (BLOCK_N, BLOCK_K)))
            else:
                w_KN = tl.reshape(matrices.load([expert, first, column * BLOCK_N]), (BLOCK_K, BLOCK_N))
            sum_MN = dot(a_MK, w_KN, sum_MN)
        row_M, n_N = begin + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N)
        corner, at_MN, mask_MN = place(begin, end, row_M, n_N, columns, EVEN)
        put(out + corner + at_MN, sum_MN, mask_MN)


def product(a: Tensor, w: Tensor, rows: Rows, *, turned: bool, a_too: Tensor | None = None, w_too: Tensor | None = None) -> Tensor:
    """Multiply each row of 16-bit numbers by its expert's matrix: a w [+ a_too w_too], [R, O]. w is [E, I, O], or [E, O, I] if `turned`.
    Raise BadInput for a GPU without TMA."""
    if not has_tma(a.device):
        fix = Set("it", "triton")
        raise BadInput(
            "experts.kernels", got=f"triton_persistent on {a.device}", needed="compute capability 9.0 or later, which has TMA", fix=fix
        )
    inner, columns = a.shape[1], w.shape[1] if turned else w.shape[2]
    t, out = tile(rows.tile_rows, a.dtype, a.device, products=1, epilogue=False), a.new_empty(rows.number, columns)
    programs = min(multiprocessors(a.device), len(rows.tiles) * triton.cdiv(columns, t.n))
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=a.device))  # for TMA's descriptors
    with on(a):
        persistent_product[(programs,)](
            *(a, w, a_too, w_too, out, rows.tiles, rows.used_tiles, rows.number, len(w), inner, columns),
            TURNED=turned,
            EVEN=columns % t.n == 0,
            GROUP=t.group,
            **t.launch,
        )
    return out


grouped_ffn = partial(network.grouped_ffn, in_order=product)
routed_ffn = partial(network.routed_ffn, in_order=product)
