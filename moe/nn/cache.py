"""Key-value cache for text generation: for each new token, only this token is computed, not the whole context again.

    prompt, 4 tokens   core: q k v of positions 0..3    keeps k v [0:4]    a plain forward pass
    next token         core: q k v of position 4        keeps k v [4:5]    q against k v [0:5]

In latent attention, latents are cached (moe/nn/latent.py). In cross attention, keys and values are computed once. During generation,
the cache's methods replace functions of the model: `attend` replaces attention's `core`, and `products` replaces cross attention's
`products`. `all_places` replaces the model's `whole_sequences`, which gets a flag for each token: whether a document begins there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe.nn.attention import Attention
from moe.nn.context import Context
from moe.nn.core import attend, masked, softmax_core
from moe.nn.latent import LatentAttention
from moe.nn.linear import Linear
from moe.nn.routing_record import RoutingRecord
from parallel.data.tiling import one_by_one
from parallel.numerics.position_bias import Bias

# B sequences, N new tokens, S tokens so far (the new ones included), H heads, K key-value heads, C channels of a head

Layer = Attention | LatentAttention


class KeyValueCache:
    """Keys and values of `batch` sequences of equal length, with room for `length` tokens each. `seen`: tokens cached so far."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length, self.seen = batch, length, 0
        self._kept: dict[Layer, tuple[Tensor, Tensor]] = {}  # keys and values [B, K, length, C] of each layer
        self._of_source: dict[Attention, Sequence[Tensor]] = {}  # keys and values of each cross-attention layer
        self._begins_BS: Tensor | None = None  # bool, True where a document begins

    def context(self, new_BN: Tensor, *, length: int, record: RoutingRecord | None = None) -> Context:
        """Return the `Context` of the new token ids `new_BN`, which follow the cached ones. `length`: number of tokens so far, the new
        ones included. `record`: receives the new tokens' routing."""
        places = range(self.seen, self.seen + new_BN.shape[1])
        found = Context.of(new_BN, positions=places, length=self.length if record is None else record.length, record_routing=record)
        return replace(found, length=length)

    def attend(
        self,
        layer: Layer,
        q_BHNC: Tensor,
        k_BKNC: Tensor,
        v_BKNC: Tensor,
        *,
        context: Context,
        bias: Bias | None,
        sink_H: Tensor | None = None,
    ) -> Tensor:
        """Cache the new keys and values. Return the layer's core attention (moe/nn/core.py) of the new queries to the cached keys."""
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
        k_BKSC, v_BKSC = (kept[:, :, places] for kept in self._kept[layer])
        sees_all = new == 1 and bias is None and context.document_BS is None  # no mask needed: the token sees all of `places`
        mask = None if sees_all else self._mask(q_BHNC, places, context, bias, layer.window)
        return attend(q_BHNC, k_BKSC, v_BKSC, mask=mask, causal=False, scale=layer.core_scale, sink_H=sink_H)

    def products(self, layer: Attention, x: Tensor, modules: Sequence[Linear]) -> Sequence[Tensor]:
        """Return the outputs of these modules of cross attention for x: of [q], or of [k, v]. Keys and values are computed in the first
        call, and reused for all later tokens."""
        if modules[0] is layer.q:
            return one_by_one(x, modules)
        if layer not in self._of_source:
            self._of_source[layer] = one_by_one(x, modules)
        return self._of_source[layer]

    def _mask(self, q_BHNC: Tensor, places: slice, context: Context, bias: Bias | None, window: int | None) -> Tensor:
        """Return the mask [..., N, keys] of new queries and the keys at `places`: values to add to logits, or bool without a bias."""
        document_BS = context.document_BS
        documents = None if document_BS is None else (document_BS[:, self.seen :], document_BS[:, places])
        queries, keys = range(self.seen, places.stop), range(places.start, places.stop)
        return masked(queries, keys, documents, bias=bias, window=window, like=q_BHNC)

    def all_places(self, begins_BN: Tensor) -> Tensor:
        """Cache the flags `begins_BN` (True where a document begins), and return the flags of all tokens so far: [B, S]."""
        self._begins_BS = begins_BN if self._begins_BS is None or self.seen == 0 else torch.cat([self._begins_BS, begins_BN], dim=1)
        return self._begins_BS
