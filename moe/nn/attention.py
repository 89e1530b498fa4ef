"""Attention with grouped queries (arXiv 2305.13245), rotary (arXiv 2104.09864) or T5 relative positions (arXiv 1910.10683).

    x -> enter -> q, k, v, cut into heads -> norms of q and k -> clip -> rotary positions -> core(q, k, v) -> out -> leave

Norms of q and k (arXiv 2302.05442) or a bound on each channel of q, k and v (OLMo, arXiv 2402.00838) can keep logits small. Only in `core`
(moe/nn/core.py) does a token attend to others, so sequence parallelism replaces `core` by one that communicates between ranks. Tensor
parallelism gives each rank some heads. It replaces `leave` (applied to the output), and either `enter` (applied to the input) or
`products`, in which communication overlaps with the products of q, k and v.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from moe.nn.context import Context
from moe.nn.core import Core, softmax_core
from moe.nn.linear import Added, Linear, Norm, scaled
from moe.nn.rotary import turned, turns_of
from moe.recipe import sections
from moe.recipe.shapes import T5_BUCKETS
from parallel.data.tiling import Products, Slot, as_it_is, one_by_one
from parallel.mesh.regions import in_region
from parallel.numerics.position_bias import Bias

# B batch, L length (of queries; S of keys, if it differs), D model, H heads, K key-value heads, C channels of a head


class RelativeBias(nn.Module):
    """T5's bias, `weight` [buckets, H]: 32 buckets of distances, of which half hold one distance each, and the others grow logarithmically
    up to distance 128. `both_ways` (encoder): half of the buckets are for keys before the query, half for keys after it."""

    buckets, far = T5_BUCKETS, 128

    def __init__(self, num_heads: int, *, both_ways: bool = False) -> None:
        super().__init__()
        self.both_ways = both_ways
        self.weight = nn.Parameter(torch.empty(self.buckets, num_heads))

    def forward(self) -> Bias:
        """Return the bias. Its table is a copy, because FSDP or ZeRO-3 may free the weight after this call."""
        return Bias(self.weight.to(torch.float32, copy=True), self.bucket)

    def bucket(self, distance_N: Tensor) -> Tensor:
        """Return the bucket of each distance (position of the query minus position of the key), int64 in the distances' shape."""
        if self.both_ways:
            half = self.buckets // 2
            return self._of_distance(distance_N.abs(), half) + half * (distance_N < 0)
        return self._of_distance(distance_N.clamp(min=0), self.buckets)

    def _of_distance(self, distance_N: Tensor, buckets: int) -> Tensor:
        exact = buckets // 2
        scaled = torch.log(distance_N.clamp(min=1).float() / exact) / math.log(self.far / exact) * (buckets - exact)
        return torch.where(distance_N < exact, distance_N, (exact + scaled.long()).clamp(max=buckets - 1))


class Sinks(nn.Module):
    """Attention sinks: one logit for each head. It takes a share of the softmax but adds no value to the output. `weight` [H]."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return a copy of the sinks' logits, fp32 [H]. A copy, because FSDP or ZeRO-3 may free the weight after this call."""
        return self.weight.to(torch.float32, copy=True)


Half = Literal["decoder", "encoder", "cross"]  # a query attends to itself and earlier tokens, to all tokens, or to the encoder's output


class Attention(nn.Module):
    """Attention. The number of heads follows from the weights' shapes. Weights: q [H C, D], k and v [K C, D], out [D, H C], T5's bias
    [buckets, H], norms of q and k [C], or with qk_norm `whole` [H C] and [K C]; biases of q, k, v and out; sinks [H].

    `of`: the tokens to which a query attends (`Half`). `biased`: the layer has its own T5 bias; otherwise `forward` gets another layer's.
    `window`: number of tokens that a query sees, itself included (None: all earlier ones)."""

    def __init__(self, model: sections.Model, *, of: Half = "decoder", biased: bool = True, window: int | None = None) -> None:
        super().__init__()
        heads, kv_heads = model.num_heads, model.num_kv_heads or model.num_heads
        self.head_size = model.head_size or model.d_model // heads
        self.q = Linear(model.d_model, heads * self.head_size)
        self.k = Linear(model.d_model, kv_heads * self.head_size)
        self.v = Linear(model.d_model, kv_heads * self.head_size)
        self.out = Linear(heads * self.head_size, model.d_model)
        self.normed = model.qk_norm
        self.q_norm, self.k_norm = self._norm_of(model, heads), self._norm_of(model, kv_heads)
        sizes = (heads, kv_heads, kv_heads)
        self.q_bias, self.k_bias, self.v_bias = (Added(n * self.head_size) if model.qkv_bias else None for n in sizes)
        self.out_bias = Added(model.d_model) if model.out_bias else None
        self.clip = model.clip_qkv
        self.sinks = Sinks(heads) if model.attention_sinks else None
        self.bias = RelativeBias(heads, both_ways=of == "encoder") if model.positions == "t5" and biased else None
        self.rope = model.rope if model.positions == "rotary" else None
        self.window = window
        # factor on the queries: with it, logits are multiplied by scales.attention instead of the core's 1 / sqrt(C)
        self.scale = 1.0 if model.scales.attention is None else model.scales.attention * self.head_size**0.5
        self.core_scale = 1.0 if model.kind == "encoder_decoder" else None  # the core's factor of logits; None: 1 / sqrt(C)
        self.core: Core = partial(softmax_core, window=window, scale=self.core_scale, causal=of == "decoder")
        self.enter: Slot = as_it_is
        self.leave: Slot = as_it_is
        self.products: Products = one_by_one

    def _norm_of(self, model: sections.Model, heads: int) -> Norm | None:
        sizes = {"heads": self.head_size, "whole": heads * self.head_size}
        return None if model.qk_norm == "none" else Norm(sizes[model.qk_norm], "rmsnorm", eps=model.norm_eps)

    @in_region("attention")
    def forward(self, x_BLD: Tensor, context: Context, *, shared: Bias | None = None, source_BSD: Tensor | None = None) -> Tensor:
        """Return [B, L, D] in x's dtype. `shared`: another layer's T5 bias. `source_BSD`: input of keys and values in cross attention."""
        if source_BSD is None:
            products = self.products(self.enter(x_BLD), [self.q, self.k, self.v])
        else:
            products = [*self.products(self.enter(x_BLD), [self.q]), *self.products(self.enter(source_BSD), [self.k, self.v])]
        biases = (self.q_bias, self.k_bias, self.v_bias)
        products = [y if bias is None else bias(y) for y, bias in zip(products, biases, strict=True)]
        q_BHLC, k_BKLC, v_BKLC = map(self._heads, products, (self.q_norm, self.k_norm, None))
        bias = shared if shared is not None else None if self.bias is None else self.bias()
        if self.rope is not None:
            rope = self.rope.at(context.length)
            turns = context.for_all_layers(turns_of, context.place_L, rope.turning(self.head_size), rope, dtype=q_BHLC.dtype)
            q_BHLC, k_BKLC = turned(q_BHLC, turns), turned(k_BKLC, turns)
        q_BHLC = scaled(q_BHLC, self.scale)
        mixed_BHLC = self.core(q_BHLC, k_BKLC, v_BKLC, context=context, bias=bias, sink_H=None if self.sinks is None else self.sinks())
        y_BLD = self.leave(self.out(mixed_BHLC.transpose(1, 2).flatten(2)))
        return y_BLD if self.out_bias is None else self.out_bias(y_BLD)

    def _heads(self, y: Tensor, norm: Norm | None) -> Tensor:
        """Cut y, a product [B, L, heads * C], into heads [B, heads, L, C], normalize and clip. norm: the norm of queries or keys; None: no
        norm. Einops is not used, because it takes too long for a single token."""
        y = norm(y) if norm is not None and self.normed == "whole" else y
        y_BLHC: Tensor = y.unflatten(2, (-1, self.head_size))
        y_BLHC = norm(y_BLHC) if norm is not None and self.normed == "heads" else y_BLHC
        return (y_BLHC if self.clip is None else y_BLHC.clamp(-self.clip, self.clip)).transpose(1, 2)
