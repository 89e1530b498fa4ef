"""Causal self-attention with grouped queries (arXiv 2305.13245), rotary (arXiv 2104.09864) or T5 relative positions (arXiv 1910.10683).

The part between q, k, v and their mixture is `core(q, k, v, bias)`: the one place where a sequence-parallel exchange
can stand. Rotary angles and the softmax are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.nn.linear import Linear
from moe.recipe import sections
from moe.recipe.shapes import T5_BUCKETS

# B batch, L length, D model, H heads, K key-value heads, C channels of a head

Core = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def softmax_core(q_BHLC: Tensor, k_BHLC: Tensor, v_BHLC: Tensor, bias_HLL: Tensor | None) -> Tensor:
    """Plain causal attention on one device; `bias` (T5) is added to the logits."""
    if bias_HLL is None:
        return F.scaled_dot_product_attention(q_BHLC, k_BHLC, v_BHLC, is_causal=True)
    length = q_BHLC.shape[2]
    future_LL = torch.ones(length, length, dtype=torch.bool, device=q_BHLC.device).triu(1)
    mask_HLL = bias_HLL.masked_fill(future_LL, -math.inf).to(q_BHLC.dtype)
    return F.scaled_dot_product_attention(q_BHLC, k_BHLC, v_BHLC, attn_mask=mask_HLL)


class _Rotate(torch.autograd.Function):
    """Turn channel pairs (i, i + C/2); backward turns the gradient the other way."""

    @staticmethod
    def forward(ctx: Any, x_BHLC: Tensor, cos_LC: Tensor, sin_LC: Tensor) -> Tensor:
        ctx.save_for_backward(cos_LC, sin_LC)
        a, b = x_BHLC.chunk(2, dim=-1)
        out = torch.empty_like(x_BHLC)
        first, second = out.chunk(2, dim=-1)
        torch.mul(a, cos_LC, out=first).addcmul_(b, sin_LC, value=-1)
        torch.mul(b, cos_LC, out=second).addcmul_(a, sin_LC)
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHLC: Tensor) -> tuple[Tensor, None, None]:
        cos_LC, sin_LC = ctx.saved_tensors
        out: Tensor = _Rotate.apply(grad_BHLC, cos_LC, -sin_LC)
        return out, None, None


def rotate(x_BHLC: Tensor, position_L: Tensor) -> Tensor:
    """Rotary positions: channel pairs (i, i + C/2) turn by position / 10000^(2i/C); angles in fp32."""
    half = x_BHLC.shape[-1] // 2
    rate_C = 10000.0 ** (-torch.arange(half, dtype=torch.float32, device=x_BHLC.device) / half)
    angle_LC = position_L.float().unsqueeze(1) * rate_C
    out: Tensor = _Rotate.apply(x_BHLC, angle_LC.cos().to(x_BHLC.dtype), angle_LC.sin().to(x_BHLC.dtype))
    return out


class RelativeBias(nn.Module):
    """T5's bias per head and bucket of distance: 32 buckets, half exact, half logarithmic up to 128. `weight` [buckets, H]."""

    buckets, far = T5_BUCKETS, 128

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.buckets, num_heads))

    def forward(self, length: int) -> Tensor:
        """Fp32 [H, L, L]."""
        position_L = torch.arange(length, device=self.weight.device)
        distance_LL = (position_L.unsqueeze(1) - position_L).clamp(min=0)
        exact = self.buckets // 2
        scaled = torch.log(distance_LL.clamp(min=1).float() / exact) / math.log(self.far / exact) * (self.buckets - exact)
        bucket_LL = torch.where(distance_LL < exact, distance_LL, (exact + scaled.long()).clamp(max=self.buckets - 1))
        return rearrange(self.weight.float()[bucket_LL], "q k h -> h q k")


class Attention(nn.Module):
    def __init__(self, model: sections.Model) -> None:
        super().__init__()
        self.heads, self.kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
        size = model.head_size or model.d_model // model.num_heads
        self.q = Linear(model.d_model, self.heads * size)
        self.k = Linear(model.d_model, self.kv_heads * size)
        self.v = Linear(model.d_model, self.kv_heads * size)
        self.out = Linear(self.heads * size, model.d_model)
        self.bias = RelativeBias(self.heads) if model.positions == "t5" else None
        self.core: Core = softmax_core

    def forward(self, x_BLD: Tensor) -> Tensor:
        q = rearrange(self.q(x_BLD), "b l (h c) -> b h l c", h=self.heads)
        k = rearrange(self.k(x_BLD), "b l (h c) -> b h l c", h=self.kv_heads)
        v = rearrange(self.v(x_BLD), "b l (h c) -> b h l c", h=self.kv_heads)
        if self.bias is None:
            position_L = torch.arange(x_BLD.shape[1], device=x_BLD.device)
            q, k = rotate(q, position_L), rotate(k, position_L)
        if self.kv_heads < self.heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        bias_HLL = self.bias(x_BLD.shape[1]) if self.bias is not None else None
        mixed = self.core(q, k, v, bias_HLL)
        return self.out(rearrange(mixed, "b h l c -> b l (h c)"))  # type: ignore[no-any-return]
