"""Where tokens meet: the softmax of queries with keys, over those places that each query may see.

    softmax_core    every token sees itself and those before it, of its document, or the last `window` of them
    open_core       every token sees all of the keys
    attend          one call of torch's attention; with a sink (arXiv 2309.17453; GPT-OSS), a logit of each head that takes a share of the
                    softmax and gives nothing

A window of W tokens (Longformer, arXiv 2004.05150; Mistral, arXiv 2310.06825) hides all but a query's own token and the W - 1 before it.
Of at most half a sequence, without documents and bias, it costs 2 W pairs a token whatever the length: runs of W queries meet two runs of
keys, their own and the one before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe.nn.context import Context

# B batch, L length (of queries; S of keys, where they are others), H heads, K key-value heads, C channels of a head, N runs of W tokens


class Bias(NamedTuple):
    """What is added to the logits of two places: a row of `table_UH` fp32 [buckets, H], which `bucket` names, int64 [L, S]."""

    table_UH: Tensor
    bucket: Callable[[Tensor, Tensor], Tensor]

    def of(self, query_L: Tensor, key_S: Tensor) -> Tensor:
        """Fp32 [H, L, S]."""
        return rearrange(self.table_UH[self.bucket(query_L, key_S)], "l s h -> h l s")


class Core(Protocol):
    """What a token takes from those that it sees of its sequence, in q's shape and dtype."""

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
) -> Tensor:
    """Plain causal attention on one device, which has the whole sequences; `bias` (T5) is added to the logits.

    `scale`: what logits are multiplied with; None: 1 / sqrt(C). `window`: tokens that a query sees, its own the last; None: all before it.
    `sink_H`: see `attend`.
    """
    k_BHLC, v_BHLC = repeated(k_BKLC, q_BHLC.shape[1]), repeated(v_BKLC, q_BHLC.shape[1])
    if bias is None and context.document_BS is None:
        if window is None or window >= q_BHLC.shape[2]:
            return attend(q_BHLC, k_BHLC, v_BHLC, scale=scale, sink_H=sink_H)
        if 2 * window <= q_BHLC.shape[2]:
            return _in_runs(q_BHLC, k_BHLC, v_BHLC, window=window, scale=scale, sink_H=sink_H)
    place_L = context.places(q_BHLC.shape[2], device=q_BHLC.device)
    mask = masked(place_L, place_L, context.document_BS, context.document_BS, bias=bias, window=window, dtype=q_BHLC.dtype)
    return attend(q_BHLC, k_BHLC, v_BHLC, mask=mask, scale=scale, sink_H=sink_H)


def attend(
    q_BHLC: Tensor,
    k_BHSC: Tensor,
    v_BHSC: Tensor,
    *,
    scale: float | None,
    sink_H: Tensor | None,
    mask: Tensor | None = None,
    causal: bool = True,
) -> Tensor:
    """torch's attention with a mask (added to the logits, or which count); without one `causal`, or every query sees all of the keys.

    `sink_H` fp32: of each head the logit of one more key, which all tokens see and whose value is 0. It comes as a key before the others,
    in a channel of its own, so any kernel computes it.
    """
    if sink_H is None:
        return F.scaled_dot_product_attention(q_BHLC, k_BHSC, v_BHSC, attn_mask=mask, is_causal=causal and mask is None, scale=scale)
    scale = q_BHLC.shape[3] ** -0.5 if scale is None else scale
    channel_BHL1 = (sink_H / scale).to(q_BHLC.dtype).view(-1, 1, 1).expand(*q_BHLC.shape[:3], 1)
    q, v = torch.cat([q_BHLC, channel_BHL1], dim=3), F.pad(v_BHSC, (0, 1, 1, 0))
    of_sink = F.pad(k_BHSC.new_ones(*k_BHSC.shape[:2], 1, 1), (k_BHSC.shape[3], 0))
    k = torch.cat([of_sink, F.pad(k_BHSC, (0, 1))], dim=2)
    if mask is not None:
        mask = F.pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    if mask is not None or not causal:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)[..., : v_BHSC.shape[3]]
    q = F.pad(q, (0, 0, 1, 0))  # so that the diagonal stays one
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[:, :, 1:, : v_BHSC.shape[3]]


def masked(
    query_L: Tensor,
    key_S: Tensor,
    document_BL: Tensor | None,
    document_BS: Tensor | None,
    *,
    bias: Bias | None,
    window: int | None,
    dtype: torch.dtype,
) -> Tensor:
    """What is added to the logits of queries and keys at these places [.., L, S], or without a bias which of them count.

    Documents: of which each token is; None: there is one.
    """
    back_LS = query_L.unsqueeze(1) - key_S
    seen = back_LS >= 0 if window is None else (back_LS >= 0) & (back_LS < window)
    if document_BL is not None and document_BS is not None:
        seen = seen & (document_BL.unsqueeze(2) == document_BS.unsqueeze(1)).unsqueeze(1)
    return seen if bias is None else bias.of(query_L, key_S).masked_fill(~seen, -math.inf).to(dtype)


def _in_runs(q_BHLC: Tensor, k_BHLC: Tensor, v_BHLC: Tensor, *, window: int, scale: float | None, sink_H: Tensor | None) -> Tensor:
    """A window by runs of its length; what fills up the last run is seen by no token of the sequence."""
    length, heads = q_BHLC.shape[2], q_BHLC.shape[1]
    begins = (x[:, :, :window].contiguous() for x in (q_BHLC, k_BHLC, v_BHLC))  # copies: the whole need not wait for the backward pass
    first_BHWC = attend(*begins, scale=scale, sink_H=sink_H)
    q, k, v = (F.pad(x, (0, 0, 0, -length % window)) for x in (q_BHLC, k_BHLC, v_BHLC))
    queries = rearrange(q[:, :, window:], "b h (n w) c -> (b n) h w c", w=window)
    keys, values = (_with_the_run_before(x, window) for x in (k, v))
    place_W, place_S = torch.arange(window, 2 * window, device=q.device), torch.arange(2 * window, device=q.device)
    mask = masked(place_W, place_S, None, None, bias=None, window=window, dtype=q.dtype)
    rest = attend(queries, keys, values, mask=mask, scale=scale, sink_H=sink_H)
    rest_BHLC = rearrange(rest, "(b n) h w c -> b h (n w) c", b=len(q), h=heads)
    return torch.cat([first_BHWC, rest_BHLC], dim=2)[:, :, :length]


def _with_the_run_before(x_BHLC: Tensor, window: int) -> Tensor:
    """[B (N - 1), H, 2 W, C]: of every run but the first, the run before it and its own."""
    runs = rearrange(x_BHLC, "b h (n w) c -> b n h w c", w=window)
    return torch.cat([runs[:, :-1], runs[:, 1:]], dim=3).flatten(0, 1)


def open_core(
    q_BHLC: Tensor,
    k_BKSC: Tensor,
    v_BKSC: Tensor,
    *,
    context: Context,
    bias: Bias | None,
    sink_H: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """The same where every token sees all of the keys: in an encoder, and across from a decoder to it, where there is no bias."""
    assert sink_H is None
    k_BHSC, v_BHSC = repeated(k_BKSC, q_BHLC.shape[1]), repeated(v_BKSC, q_BHLC.shape[1])
    place_L = context.places(q_BHLC.shape[2], device=q_BHLC.device)
    mask = None if bias is None else bias.of(place_L, place_L).to(q_BHLC.dtype).contiguous()  # a GPU's fused kernels read it by rows alone
    return F.scaled_dot_product_attention(q_BHLC, k_BHSC, v_BHSC, attn_mask=mask, scale=scale)


def repeated(x_BKLC: Tensor, heads: int) -> Tensor:
    """Key-value heads for so many heads of queries: each serves a run of them."""
    return x_BKLC if x_BKLC.shape[1] == heads else x_BKLC.repeat_interleave(heads // x_BKLC.shape[1], dim=1)
