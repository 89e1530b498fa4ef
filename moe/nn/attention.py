"""Causal self-attention with grouped queries (arXiv 2305.13245), rotary (arXiv 2104.09864) or T5 relative positions (arXiv 1910.10683).

    x -> enter -> q, k, v, cut into heads by their size -> rotate by place -> core(q, k, v) -> out -> leave

`core` is the one place where tokens meet, and a slot: what exchanges keys between ranks stands there and nowhere else. It sees the
key-value heads as they are, fewer than the queries' (so few are sent), what the pass knows of its tokens, and T5's bias as a table
and a function of places. A module whose weights are those of some heads is those heads' share of the output: the sum over all is the whole.
Who cuts it so fills `enter` and `leave`, through which what all heads read and what they give together pass once, or `products`,
where x or its gradient travels beside products: for q, k and v once. What enters may be a slice of the sequences, if q, k and v are whole.
Rotary angles and the softmax are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe.nn.context import Context
from moe.nn.linear import Linear
from moe.recipe import sections
from moe.recipe.shapes import T5_BUCKETS
from parallel.data.tiling import Products, Slot, as_it_is, one_by_one

# B batch, L length (of queries; S of keys, where they are others), D model, H heads, K key-value heads, C channels of a head


class Bias(NamedTuple):
    """What is added to the logits of two places: a row of `table_UH` fp32 [buckets, H], which `bucket` names, int64 [L, S]."""

    table_UH: Tensor
    bucket: Callable[[Tensor, Tensor], Tensor]

    def of(self, query_L: Tensor, key_S: Tensor) -> Tensor:
        """Fp32 [H, L, S]."""
        return rearrange(self.table_UH[self.bucket(query_L, key_S)], "l s h -> h l s")


class Core(Protocol):
    """What a token takes from those before it in its sequence, in q's shape and dtype."""

    def __call__(self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None) -> Tensor: ...


def softmax_core(q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None) -> Tensor:
    """Plain causal attention on one device, which has the whole sequences; `bias` (T5) is added to the logits."""
    k_BHLC, v_BHLC = repeated(k_BKLC, q_BHLC.shape[1]), repeated(v_BKLC, q_BHLC.shape[1])
    if bias is None and context.document_BS is None:
        return F.scaled_dot_product_attention(q_BHLC, k_BHLC, v_BHLC, is_causal=True)
    place_L = context.places(q_BHLC.shape[2], device=q_BHLC.device)
    seen = place_L.unsqueeze(1) >= place_L  # [L, L], or [B, 1, L, L]
    if context.document_BS is not None:
        seen = seen & (context.document_BS.unsqueeze(2) == context.document_BS.unsqueeze(1)).unsqueeze(1)
    mask = seen if bias is None else bias.of(place_L, place_L).masked_fill(~seen, -math.inf).to(q_BHLC.dtype)
    return F.scaled_dot_product_attention(q_BHLC, k_BHLC, v_BHLC, attn_mask=mask)


def repeated(x_BKLC: Tensor, heads: int) -> Tensor:
    """Key-value heads for so many heads of queries: each serves a run of them."""
    return x_BKLC if x_BKLC.shape[1] == heads else x_BKLC.repeat_interleave(heads // x_BKLC.shape[1], dim=1)


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

    def forward(self) -> Bias:
        """Its table is a copy, which lives on where an engine frees the weight."""
        return Bias(self.weight.to(torch.float32, copy=True), self.bucket)

    def bucket(self, query_L: Tensor, key_S: Tensor) -> Tensor:
        """Int64 [L, S] for places in a sequence."""
        distance_LS = (query_L.unsqueeze(1) - key_S).clamp(min=0)
        exact = self.buckets // 2
        scaled = torch.log(distance_LS.clamp(min=1).float() / exact) / math.log(self.far / exact) * (self.buckets - exact)
        return torch.where(distance_LS < exact, distance_LS, (exact + scaled.long()).clamp(max=self.buckets - 1))


class Attention(nn.Module):
    """Of as many heads as its weights have: q [H C, D], k and v [K C, D], out [D, H C], T5's bias [buckets, H]."""

    def __init__(self, model: sections.Model) -> None:
        super().__init__()
        heads, kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
        self.head_size = model.head_size or model.d_model // heads
        self.q = Linear(model.d_model, heads * self.head_size)
        self.k = Linear(model.d_model, kv_heads * self.head_size)
        self.v = Linear(model.d_model, kv_heads * self.head_size)
        self.out = Linear(heads * self.head_size, model.d_model)
        self.bias = RelativeBias(heads) if model.positions == "t5" else None
        self.core: Core = softmax_core
        self.enter: Slot = as_it_is
        self.leave: Slot = as_it_is
        self.products: Products = one_by_one

    def forward(self, x_BLD: Tensor, context: Context) -> Tensor:
        products = self.products(self.enter(x_BLD), [self.q, self.k, self.v])
        q_BHLC, k_BKLC, v_BKLC = (rearrange(y, "b l (h c) -> b h l c", c=self.head_size) for y in products)
        bias = None if self.bias is None else self.bias()
        if bias is None:
            place_L = context.places(q_BHLC.shape[2], device=q_BHLC.device)
            q_BHLC, k_BKLC = rotate(q_BHLC, place_L), rotate(k_BKLC, place_L)
        mixed_BHLC = self.core(q_BHLC, k_BKLC, v_BKLC, context=context, bias=bias)
        return self.leave(self.out(rearrange(mixed_BHLC, "b h l c -> b l (h c)")))
