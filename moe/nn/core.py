"""The core of attention: softmax(q k) v. Only in this step does a token read other tokens.

    softmax_core    causal: a token sees itself and earlier tokens of its document, or the last `window` of them
                    not causal (encoder, cross attention): every token sees all keys of its document
    attend          one call of torch's attention, optionally with attention sinks (arXiv 2309.17453): a logit for each head, which takes
                    a share of the softmax and adds nothing to the output

With a sliding window of W tokens (Longformer, arXiv 2004.05150; Mistral, arXiv 2310.06825) of at most half the sequence, queries are cut
into chunks of W, and each chunk attends to its own keys and to the keys of the chunk before. Longer windows, documents and biases need a
mask instead.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.nn.context import Context
from parallel.numerics.fused_attention import flash_takes
from parallel.numerics.position_bias import Bias
from parallel.sequence.softmax import repeated

# B batch, L length (of queries; S of keys, if it differs), H heads, K key-value heads, C channels of a head, N chunks of W tokens


class Core(Protocol):
    """A function that computes attention's output before the last projection, in q's shape and dtype."""

    def __call__(
        self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, context: Context, bias: Bias | None, sink_H: Tensor | None = None
    ) -> Tensor: ...


def softmax_core(
    q_BHLC: Tensor,
    k_BKLC: Tensor,
    v_BKLC: Tensor,
    *,
    context: Context,
    bias: Bias | None,
    sink_H: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    causal: bool = True,
) -> Tensor:
    """Compute attention over whole sequences on one device. `bias` (T5) is added to the logits, and `scale` is their factor (None: 1 /
    sqrt(C)). `window`, if causal: number of tokens that a query sees, itself included (None: all earlier ones). If not causal, keys may be
    other tokens than queries (cross attention)."""
    queries, keys, document_BL = range(q_BHLC.shape[2]), range(k_BKLC.shape[2]), context.document_BS
    if bias is None and document_BL is None:
        if window is None or window >= len(queries):
            return attend(q_BHLC, k_BKLC, v_BKLC, causal=causal, scale=scale, sink_H=sink_H)
        if 2 * window <= len(queries):
            return _in_chunks(q_BHLC, k_BKLC, v_BKLC, window=window, scale=scale, sink_H=sink_H)
    documents = None
    if document_BL is not None:
        documents = document_BL, document_BL if causal or context.source_document_BS is None else context.source_document_BS
    mask = masked(queries, keys, documents, bias=bias, window=window, like=q_BHLC, causal=causal)
    return attend(q_BHLC, k_BKLC, v_BKLC, mask=mask, scale=scale, sink_H=sink_H)


def attend(
    q_BHLC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    *,
    scale: float | None,
    sink_H: Tensor | None,
    mask: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """Call torch's attention. Without a mask it is causal or, if `causal` is False, over all keys. Return [B, H, L, C] in q's dtype.
    `mask`: values to add to the logits, in q's dtype, or bool, True for visible keys. `sink_H` fp32 [H]: the logit of an added first
    key, whose value is 0 and which all tokens see. The logit is stored in an additional channel of queries and keys, so that any attention
    kernel can compute it. `scale`: factor of the logits; None: 1 / sqrt(C)."""
    if sink_H is None:
        return _fused(q_BHLC, k_BKSC, v_BKSC, mask=mask, causal=causal and mask is None, scale=scale)
    scale = q_BHLC.shape[3] ** -0.5 if scale is None else scale
    channel_BHL1 = (sink_H / scale).to(q_BHLC.dtype).view(-1, 1, 1).expand(*q_BHLC.shape[:3], 1)
    q, v = torch.cat([q_BHLC, channel_BHL1], dim=3), F.pad(v_BKSC, (0, 1, 1, 0))
    sink_key = F.pad(k_BKSC.new_ones(*k_BKSC.shape[:2], 1, 1), (k_BKSC.shape[3], 0))
    k = torch.cat([sink_key, F.pad(k_BKSC, (0, 1))], dim=2)
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    if mask is not None or not causal:
        return _fused(q, k, v, mask=mask, causal=False, scale=scale)[..., : v_BKSC.shape[3]]
    # the sink is an additional first key, so a first query is added too: then is_causal still hides later keys
    q = F.pad(q, (0, 0, 1, 0))
    return _fused(q, k, v, mask=None, causal=True, scale=scale)[:, :, 1:, : v_BKSC.shape[3]]


def _fused(q_BHLC: Tensor, k_BKSC: Tensor, v_BKSC: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    """Call torch's attention. Keys and values are repeated in memory if torch has no fused kernel for grouped heads: on a GPU with a mask
    or in fp32. There torch would otherwise write all scores to memory."""
    grouped = k_BKSC.shape[1] != q_BHLC.shape[1]
    if grouped and q_BHLC.is_cuda and (mask is not None or not flash_takes(q_BHLC)):
        k_BKSC, v_BKSC, grouped = repeated(k_BKSC, q_BHLC.shape[1]), repeated(v_BKSC, q_BHLC.shape[1]), False
    return F.scaled_dot_product_attention(q_BHLC, k_BKSC, v_BKSC, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def masked(
    queries: range,
    keys: range,
    documents: tuple[Tensor, Tensor] | None,
    *,
    bias: Bias | None,
    window: int | None,
    like: Tensor,
    causal: bool = True,
) -> Tensor:
    """Return the mask [..., L, S] for queries and keys at these positions, on the device of `like`: values in its dtype to add to the
    logits, or bool without a bias. `documents`: the document of each query [B, L] and of each key [B, S]; None: one document. `window`:
    number of tokens that a query sees, itself included; None: no limit. `causal` False: later keys are visible too."""
    if bias is not None and documents is None and not causal:
        return bias.of(queries, keys).to(like.dtype)
    query_L, key_S = (torch.arange(places.start, places.stop, device=like.device) for places in (queries, keys))
    distance_LS = query_L.unsqueeze(1) - key_S
    visible = distance_LS >= 0 if causal else torch.ones_like(distance_LS, dtype=torch.bool)
    visible = visible if window is None else visible & (distance_LS < window)
    if documents is not None:
        visible = visible & (documents[0].unsqueeze(2) == documents[1].unsqueeze(1)).unsqueeze(1)
    return visible if bias is None else bias.of(queries, keys).masked_fill(~visible, -math.inf).to(like.dtype)


def _in_chunks(q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, window: int, scale: float | None, sink_H: Tensor | None) -> Tensor:
    """Compute sliding-window attention in chunks of `window` queries. No token sees the padding of the last chunk."""
    length, heads = q_BHLC.shape[2], q_BHLC.shape[1]
    first = (x[:, :, :window].contiguous() for x in (q_BHLC, k_BKLC, v_BKLC))  # copies: views would keep q, k and v whole in memory
    first_BHWC = attend(*first, scale=scale, sink_H=sink_H)
    q, k, v = (F.pad(x, (0, 0, 0, -length % window)) for x in (q_BHLC, k_BKLC, v_BKLC))
    queries = rearrange(q[:, :, window:], "b h (n w) c -> (b n) h w c", w=window)
    keys, values = (_with_previous_chunk(x, window) for x in (k, v))
    mask = masked(range(window, 2 * window), range(2 * window), None, bias=None, window=window, like=q)
    rest = attend(queries, keys, values, mask=mask, scale=scale, sink_H=sink_H)
    rest_BHLC = rearrange(rest, "(b n) h w c -> b h (n w) c", b=len(q), h=heads)
    return torch.cat([first_BHWC, rest_BHLC], dim=2)[:, :, :length]


def _with_previous_chunk(x_BHLC: Tensor, window: int) -> Tensor:
    """Return every chunk of `window` = W tokens except the first, with the previous chunk in front of it: [B (N - 1), H, 2 W, C]."""
    chunks = rearrange(x_BHLC, "b h (n w) c -> b n h w c", w=window)
    return torch.cat([chunks[:, :-1], chunks[:, 1:]], dim=3).flatten(0, 1)
