"""Keys and values of the tokens that a model has read, so that the next token costs one token's work and not the whole context's.

    read(4 tokens)   core: q k v of places 0..3    keeps k v [0:4]    a plain pass
    read(1 token)    core: q k v of place 4        keeps k v [4:5]    q against k v [0:5]

Of latent attention the latents are keys and values of all heads, and are kept once (moe/nn/latent.py). In cross attention the keys and
values of what the encoder gave are made for the first token, and are there for all others.

It stands in attention's slot `core`, where tokens meet, in cross attention's slot `products`, and in the slot by which documents are
found. So the model reads a part of a sequence as it reads a whole one, for everything else in a layer sees each token by itself. A MoE
layer does so only where tokens choose their experts and none is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.core import Bias, attend, masked, repeated, softmax_core
from moe.nn.latent import LatentAttention
from moe.nn.linear import Linear
from moe.nn.routing_record import RoutingRecord
from parallel.data.tiling import one_by_one

# B sequences, N new tokens, S tokens so far with the new ones, H heads, K key-value heads, C channels of a head


class KeyValueCache:
    """What `batch` sequences of one length have said so far, at most `length` tokens each. `seen`: how many tokens that is."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length, self.seen = batch, length, 0
        self._kept: dict[Attention | LatentAttention, tuple[Tensor, Tensor]] = {}  # keys and values [B, K, length, C] of each layer
        self._of_source: dict[Attention, Sequence[Tensor]] = {}  # products of each cross layer for keys and values
        self._begins_BS: Tensor | None = None  # where documents begin

    def context(self, new_BN: Tensor, *, length: int, record: RoutingRecord | None = None) -> Context:
        """Where these tokens stand: behind those that were seen, in texts of so many tokens so far. `record`: where routers write."""
        places = range(self.seen, self.seen + new_BN.shape[1])
        there = Context.of(new_BN, places=places, length=self.length if record is None else record.length, record_routing=record)
        return replace(there, length=length)

    def attend(
        self,
        layer: Attention | LatentAttention,
        q_BHNC: Tensor,
        k_BKNC: Tensor,
        v_BKNC: Tensor,
        *,
        context: Context,
        bias: Bias | None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """The layer's core: keep the new keys and values, and look at all that there are."""
        new = q_BHNC.shape[2]
        if layer not in self._kept:
            shape = (self.batch, k_BKNC.shape[1], self.length, k_BKNC.shape[3])
            keys = k_BKNC.new_empty(shape)
            self._kept[layer] = (keys, keys if v_BKNC is k_BKNC else v_BKNC.new_empty(shape))
        for kept, x in zip(self._kept[layer], (k_BKNC, v_BKNC), strict=True):
            kept[:, :, self.seen : self.seen + new] = x
        if self.seen == 0:
            given = {"context": context, "bias": bias, "sink_H": sink_H, "scale": layer.core_scale, "window": layer.window}
            return softmax_core(q_BHNC, k_BKNC, v_BKNC, **given)  # type: ignore[arg-type]
        places = slice(0 if layer.window is None else max(0, self.seen + 1 - layer.window), self.seen + new)
        k_BHSC, v_BHSC = (repeated(kept[:, :, places], q_BHNC.shape[1]) for kept in self._kept[layer])
        sees_all = new == 1 and bias is None and context.document_BS is None  # then a mask would hide nothing: `places` is the window
        mask = None if sees_all else self._mask(q_BHNC, places, context, bias, layer.window)
        return attend(q_BHNC, k_BHSC, v_BHSC, mask=mask, causal=False, scale=layer.core_scale, sink_H=sink_H)

    def products(self, layer: Attention, x: Tensor, modules: Sequence[Linear]) -> Sequence[Tensor]:
        """A cross layer's slot of that name."""
        if modules[0] is layer.q:
            return one_by_one(x, modules)
        if layer not in self._of_source:
            self._of_source[layer] = one_by_one(x, modules)
        return self._of_source[layer]

    def _mask(self, q_BHNC: Tensor, places: slice, context: Context, bias: Bias | None, window: int | None) -> Tensor:
        """What is added to the logits of the new tokens with those at `places`, or which count."""
        document_BS = context.document_BS
        place_S = torch.arange(places.start, places.stop, device=q_BHNC.device)
        place_N = torch.arange(self.seen, places.stop, device=q_BHNC.device)
        documents = (None, None) if document_BS is None else (document_BS[:, self.seen :], document_BS[:, places])
        return masked(place_N, place_S, *documents, bias=bias, window=window, dtype=q_BHNC.dtype)

    def all_places(self, begins_BN: Tensor) -> Tensor:
        """Of the new tokens' flags, those of all tokens so far."""
        known = begins_BN if self._begins_BS is None or self.seen == 0 else torch.cat([self._begins_BS, begins_BN], dim=1)
        self._begins_BS = known
        return known
