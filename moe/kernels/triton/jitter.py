"""Jitter of a router's input: each element times a random number close to 1, a hash of the token's position and the channel.

One kernel makes the numbers and multiplies. The backward pass runs it on the gradient, so no numbers are saved. The formulas are those of
parallel/numerics/random.py and of `jittered` in moe/router/scores.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.triton.device import on
from moe.kernels.triton.moves import put

# T tokens, D channels

_ELEMENTS = 1024  # elements of x that one Triton program computes: 8 for each thread


@triton.jit
def _mixed(bits):
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    return (bits ^ (bits >> 15)) * 0x846CA68B


@triton.jit(do_not_specialize=["key", "T"])
def jitter(x, position, out, key, T, D, SIZE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write each element of x [T, D] times a random number from 1 - SIZE to 1 + SIZE into `out`. The numbers depend on `key`, a seed, and
    on `position`, the tokens' positions [T]. parallel.numerics.random.uniform makes the same numbers."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    width_D = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask_TD, at_TD = (token_T < T)[:, None] & (width_D < D)[None, :], token_T.to(tl.int64)[:, None] * D + width_D[None, :]
    row_T = _mixed(tl.load(position + token_T, mask=token_T < T, other=0).to(tl.uint32) * 0x9E3779B9 + key.to(tl.uint32))
    bits_TD = _mixed(row_T[:, None] + (width_D.to(tl.uint32) * 668265263)[None, :])
    uniform_TD = bits_TD.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-32 + 0.5
    value_TD = tl.load(x + at_TD, mask=mask_TD, other=0.0).to(tl.float32) * (uniform_TD * (2 * SIZE) + (1 - SIZE))
    put(out + at_TD, value_TD, mask_TD)


class _Jitter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, position_T: Tensor, key: int, size: float) -> Tensor:
        ctx.save_for_backward(position_T)
        ctx.key, ctx.size, ctx.dtype = key, size, x_TD.dtype
        return _jittered(x_TD, position_T, key, size, torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None, None, None]:
        (position_T,) = ctx.saved_tensors
        return _jittered(grad_TD, position_T, ctx.key, ctx.size, ctx.dtype), None, None, None


def _jittered(x_TD: Tensor, position_T: Tensor, key: int, size: float, dtype: torch.dtype) -> Tensor:
    x_TD, out_TD = x_TD.contiguous(), torch.empty(x_TD.shape, dtype=dtype, device=x_TD.device)
    block_d = min(1024, triton.next_power_of_2(x_TD.shape[1]))
    block_t = _ELEMENTS // block_d
    with on(x_TD):
        jitter[(triton.cdiv(len(x_TD), block_t), triton.cdiv(x_TD.shape[1], block_d))](
            *(x_TD, position_T.contiguous(), out_TD, key, *x_TD.shape), SIZE=size, BLOCK_T=block_t, BLOCK_D=block_d
        )
    return out_TD


def jittered(x_TD: Tensor, position_T: Tensor, *, key: int, size: float) -> Tensor:
    """Return x_TD [T, D] times uniform(1 - size, 1 + size), in fp32. The numbers depend on `key` and the tokens' positions, int64 [T]."""
    out_TD: Tensor = _Jitter.apply(x_TD, position_T, key, size)
    return out_TD
