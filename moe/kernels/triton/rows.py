"""Copies tokens to rows sorted by expert, and sums rows into tokens, as Triton kernels: each byte is read and written once, sums are fp32.

Each function computes the same as the one with its name in moe/kernels/rows.py.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
from torch import Tensor

from moe.kernels import rows
from moe.kernels.triton import moves
from moe.kernels.triton.device import check_dtype, on

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
