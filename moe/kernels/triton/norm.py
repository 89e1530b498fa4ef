"""RMSNorm and LayerNorm of 16-bit tokens, one kernel for each pass: statistics, gain and sums in fp32, without an fp32 copy of the tokens.

    forward     blocks of tokens                    x -> (x - mean) * scale * gain, rounded once; mean and scale of each token
    backward    P programs that share the blocks    gradient of x; gradient of the gain, summed in each program, then over programs

scale = 1 / sqrt(mean((x - mean)^2) + eps); RMSNorm (arXiv 1910.07467) uses 0 in place of the mean. No atomics, so results repeat bit by
bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe.kernels.triton.device import INTERPRETED, on
from moe.kernels.triton.moves import put

# T tokens, D channels, P programs

_ELEMENTS = 4096  # elements of a block: 32 for each thread
_PROGRAMS = 4 if INTERPRETED else 264  # number of programs of the backward pass: two for each of an H100's 132 multiprocessors


@triton.jit(do_not_specialize=["T"])
def norm_forward(x, gain, out, statistics, T, D, EPS: tl.constexpr, CENTRED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr):
    """Compute out[t] = (x[t] - mean) * scale * gain and statistics[t] = (scale, mean). If not CENTRED: no mean is subtracted, and
    statistics[t] = (scale,). T tokens, D channels."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    width_D = tl.arange(0, BLOCK_D)
    here_TD = token_T.to(tl.int64)[:, None] * D + width_D[None, :]
    mask_TD = (token_T < T)[:, None] & (width_D < D)[None, :]
    x_TD = tl.load(x + here_TD, mask=mask_TD, other=0.0).to(tl.float32)
    if CENTRED:
        mean_T = tl.sum(x_TD, axis=1) / D
        x_TD = tl.where(mask_TD, x_TD - mean_T[:, None], 0.0)
        tl.store(statistics + 2 * token_T + 1, mean_T, mask=token_T < T)
    scale_T = 1 / tl.sqrt(tl.sum(x_TD * x_TD, axis=1) / D + EPS)
    gain_D = tl.load(gain + width_D, mask=width_D < D, other=0.0).to(tl.float32)
    put(out + here_TD, x_TD * scale_T[:, None] * gain_D[None, :], mask_TD)
    tl.store(statistics + (1 + CENTRED) * token_T, scale_T, mask=token_T < T)


@triton.jit(do_not_specialize=["T", "blocks"])
def norm_backward(
    grad, x, gain, statistics, grad_x, sums, T, D, blocks, CENTRED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Compute grad_x, the gradient of x, and sums[program] = sum over the program's tokens of grad * (x - mean) * scale. statistics:
    written by `norm_forward`. blocks: number of blocks of tokens, which the programs share."""
    width_D = tl.arange(0, BLOCK_D)
    gain_D = tl.load(gain + width_D, mask=width_D < D, other=0.0).to(tl.float32)
    sum_D = tl.zeros((BLOCK_D,), tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        token_T = block * BLOCK_T + tl.arange(0, BLOCK_T)
        here_TD = token_T.to(tl.int64)[:, None] * D + width_D[None, :]
        mask_TD = (token_T < T)[:, None] & (width_D < D)[None, :]
        scale_T = tl.load(statistics + (1 + CENTRED) * token_T, mask=token_T < T, other=0.0)
        normed_TD = tl.load(x + here_TD, mask=mask_TD, other=0.0).to(tl.float32)
        if CENTRED:
            mean_T = tl.load(statistics + 2 * token_T + 1, mask=token_T < T, other=0.0)
            normed_TD = tl.where(mask_TD, normed_TD - mean_T[:, None], 0.0)
        normed_TD *= scale_T[:, None]
        grad_TD = tl.load(grad + here_TD, mask=mask_TD, other=0.0).to(tl.float32)
        sum_D += tl.sum(grad_TD * normed_TD, axis=0)
        grad_TD *= gain_D[None, :]
        left_TD = normed_TD * (tl.sum(grad_TD * normed_TD, axis=1) / D)[:, None]
        if CENTRED:
            left_TD += (tl.sum(grad_TD, axis=1) / D)[:, None]
        put(grad_x + here_TD, (grad_TD - left_TD) * scale_T[:, None], mask_TD)
    tl.store(sums + tl.program_id(0) * D + width_D, sum_D, mask=width_D < D)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, gain_D: Tensor, centered: bool, eps: float) -> Tensor:
        tokens, out_TD = len(x_TD), torch.empty_like(x_TD)
        statistics = x_TD.new_empty(tokens, 1 + centered, dtype=torch.float32)
        launch = _launch(x_TD.shape[1])
        with on(x_TD):
            norm_forward[(triton.cdiv(tokens, launch["BLOCK_T"]),)](
                *(x_TD, gain_D, out_TD, statistics, *x_TD.shape), EPS=eps, CENTRED=centered, **launch
            )
        ctx.save_for_backward(x_TD, gain_D, statistics)
        ctx.centered = centered
        return out_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x_TD, gain_D, statistics = ctx.saved_tensors
        launch = _launch(x_TD.shape[1])
        blocks = triton.cdiv(len(x_TD), launch["BLOCK_T"])
        programs = min(blocks, _PROGRAMS)
        grad_x, sum_PD = torch.empty_like(x_TD), x_TD.new_empty(programs, x_TD.shape[1], dtype=torch.float32)
        with on(x_TD):
            norm_backward[(programs,)](
                *(grad_TD.contiguous(), x_TD, gain_D, statistics, grad_x, sum_PD, *x_TD.shape, blocks),
                CENTRED=ctx.centered,
                **launch,
            )
        return grad_x, sum_PD.sum(0).to(gain_D.dtype), None, None


def _launch(width: int) -> dict[str, int]:
    """Return the sizes of a block and its number of warps, for tokens of `width` channels."""
    columns = triton.next_power_of_2(width)
    return {"BLOCK_T": max(1, _ELEMENTS // columns), "BLOCK_D": columns, "num_warps": max(4, columns // 1024)}


def norm(x: Tensor, gain_D: Tensor, *, centered: bool, eps: float) -> Tensor:
    """Apply RMSNorm, or LayerNorm (`centered`), to tokens [..., D] in a 16-bit dtype. Keep x's dtype."""
    out: Tensor = _Norm.apply(x.reshape(-1, x.shape[-1]).contiguous(), gain_D.contiguous(), centered, eps)
    return out.view(x.shape)
