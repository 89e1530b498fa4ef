"""Products of bf16 tokens with an fp32 matrix on tensor cores, as exact as in fp32, for the router and other narrow fp32 outputs.

An fp32 number is the sum of three bf16 numbers, w = w0 + w1 + w2, which have 8 of its 24 bits each: w0 is nearest to w, w1 to w - w0, and
w2 to w - w0 - w1. A product of two bf16 numbers is exact in fp32, and tensor cores sum in fp32:

    y  = x W^T    x w0 + x w1 + x w2                        exact products
    dW = dy^T x   likewise with three parts of dy           exact products; sums of chunks of tokens, then of chunks, in a fixed order
    dx = dy W     products dy_i w_j with i + j <= 2 (six)   the other three are below 2^-23 of |dy| |W|

So y and dW differ from products in fp32 only in the order of sums. Kernels read x once and make no fp32 copy of it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe.kernels.triton.device import INTERPRETED, on
from moe.kernels.triton.gemm import dot
from moe.kernels.triton.moves import put

# T tokens, I inputs, O outputs, S chunks of tokens

_CHUNKS = 2 if INTERPRETED else 16  # a weight gradient is summed over at most this number of chunks of tokens
_TOKENS, _INPUTS = (16, 16) if INTERPRETED else (64, 64)  # tokens and inputs of a block, which has at most 128 outputs


@triton.jit
def _parts(value):
    """Split fp32 numbers: return three bf16 tensors whose sum, computed in fp32, is `value`."""
    first = value.to(tl.bfloat16)
    left = value - first.to(tl.float32)
    second = left.to(tl.bfloat16)
    return first, second, (left - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _block(at, row, column, rows, columns, stride, transposed: tl.constexpr = False):
    """Load a tile: the elements at the indices `row` and `column`, and 0 outside of rows x columns. stride: number of elements from one
    row to the next. transposed: the tile is indexed [column, row]."""
    if transposed:
        mask = (column < columns)[:, None] & (row < rows)[None, :]
        return tl.load(at + row.to(tl.int64)[None, :] * stride + column[:, None], mask=mask, other=0.0)
    else:
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        return tl.load(at + row.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["T"])
def wide_product(x, weight, out, T, I, O, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr):  # noqa: E741
    """Compute out = x weight^T, fp32 [T, O]."""
    token_T, out_O = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    sum_TO = tl.zeros((BLOCK_T, BLOCK_O), tl.float32)
    for begin in range(0, I, BLOCK_I):
        in_I = begin + tl.arange(0, BLOCK_I)
        x_TI = _block(x, token_T, in_I, T, I, I)
        first, second, third = _parts(_block(weight, out_O, in_I, O, I, I, transposed=True).to(tl.float32))
        sum_TO = dot(x_TI, third, sum_TO)
        sum_TO = dot(x_TI, second, sum_TO)
        sum_TO = dot(x_TI, first, sum_TO)
    mask_TO = (token_T < T)[:, None] & (out_O < O)[None, :]
    tl.store(out + token_T.to(tl.int64)[:, None] * O + out_O[None, :], sum_TO, mask=mask_TO)


@triton.jit(do_not_specialize=["T"])
def wide_back(grad, weight, out, T, I, O, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr):  # noqa: E741
    """Compute the gradient of x: out [T, I] = grad [T, O] @ weight [O, I], rounded once to the dtype of `out`."""
    token_T, in_I = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T), tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    sum_TI = tl.zeros((BLOCK_T, BLOCK_I), tl.float32)
    for begin in range(0, O, BLOCK_O):
        out_O = begin + tl.arange(0, BLOCK_O)
        a0, a1, a2 = _parts(_block(grad, token_T, out_O, T, O, O).to(tl.float32))
        b0, b1, b2 = _parts(_block(weight, out_O, in_I, O, I, I).to(tl.float32))
        sum_TI = dot(a0, b2, sum_TI)
        sum_TI = dot(a1, b1, sum_TI)
        sum_TI = dot(a2, b0, sum_TI)
        sum_TI = dot(a0, b1, sum_TI)
        sum_TI = dot(a1, b0, sum_TI)
        sum_TI = dot(a0, b0, sum_TI)
    put(out + token_T.to(tl.int64)[:, None] * I + in_I[None, :], sum_TI, (token_T < T)[:, None] & (in_I < I)[None, :])


@triton.jit(do_not_specialize=["T", "each"])
def wide_weights(grad, x, out, T, each, I, O, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_O: tl.constexpr):  # noqa: E741
    """Compute out[s] = grad^T x over chunk s of `each` tokens, fp32 [S, O, I]."""
    out_O, in_I = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O), tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    chunk = tl.program_id(2)
    end, sum_IO = tl.minimum((chunk + 1) * each, T), tl.zeros((BLOCK_I, BLOCK_O), tl.float32)
    for begin in range(chunk * each, end, BLOCK_T):
        token_T = begin + tl.arange(0, BLOCK_T)
        x_IT = _block(x, token_T, in_I, end, I, I, transposed=True)
        first, second, third = _parts(_block(grad, token_T, out_O, end, O, O).to(tl.float32))
        sum_IO = dot(x_IT, third, sum_IO)
        sum_IO = dot(x_IT, second, sum_IO)
        sum_IO = dot(x_IT, first, sum_IO)
    mask_IO = (in_I < I)[:, None] & (out_O < O)[None, :]
    tl.store(out + (chunk.to(tl.int64) * O + out_O)[None, :] * I + in_I[:, None], sum_IO, mask=mask_IO)


def _launch(outputs: int) -> dict[str, int]:
    """Return the sizes of blocks and the number of warps for this number of outputs."""
    most = max(16, min(16 if INTERPRETED else 128, triton.next_power_of_2(outputs)))
    return {"BLOCK_T": _TOKENS, "BLOCK_I": _INPUTS, "BLOCK_O": most, "num_warps": 4}


def forward(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x W^T, fp32 [T, O], of bf16 x [T, I] and fp32 W [O, I]."""
    (tokens, inputs), outputs = x_TI.shape, len(weight_OI)
    out_TO, launch = x_TI.new_empty(tokens, outputs, dtype=torch.float32), _launch(outputs)
    with on(x_TI):
        grid = (triton.cdiv(tokens, launch["BLOCK_T"]), triton.cdiv(outputs, launch["BLOCK_O"]))
        wide_product[grid](x_TI.contiguous(), weight_OI.contiguous(), out_TO, tokens, inputs, outputs, **launch)
    return out_TO


def of_input(grad_TO: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dy W, [T, I] in the dtype, of fp32 dy [T, O] and fp32 W [O, I]."""
    (tokens, outputs), inputs = grad_TO.shape, weight_OI.shape[1]
    out_TI, launch = grad_TO.new_empty(tokens, inputs, dtype=dtype), _launch(min(64, outputs))
    with on(grad_TO):
        grid = (triton.cdiv(tokens, launch["BLOCK_T"]), triton.cdiv(inputs, launch["BLOCK_I"]))
        wide_back[grid](grad_TO.contiguous(), weight_OI.contiguous(), out_TI, tokens, inputs, outputs, **launch)
    return out_TI


def of_weight(grad_TO: Tensor, x_TI: Tensor) -> Tensor:
    """Return dy^T x, fp32 [O, I], of fp32 dy [T, O] and bf16 x [T, I]."""
    (tokens, outputs), inputs, launch = grad_TO.shape, x_TI.shape[1], _launch(grad_TO.shape[1])
    chunks = max(1, min(_CHUNKS, triton.cdiv(tokens, 4 * launch["BLOCK_T"])))
    each = triton.cdiv(tokens, chunks)
    out_SOI = grad_TO.new_empty(chunks, outputs, inputs)
    with on(grad_TO):
        grid = (triton.cdiv(outputs, launch["BLOCK_O"]), triton.cdiv(inputs, launch["BLOCK_I"]), chunks)
        wide_weights[grid](grad_TO.contiguous(), x_TI.contiguous(), out_SOI, tokens, each, inputs, outputs, **launch)
    return out_SOI[0] if chunks == 1 else out_SOI.sum(0)
