"""Keys and values of the tokens that a model has read, so that the next token costs one token's work and not the whole context's.

    read(4 tokens)   core: q k v of places 0..3    keeps k v [0:4]    a plain pass
    read(1 token)    core: q k v of place 4        keeps k v [4:5]    q against k v [0:5]

It stands in attention's slot `core`, where tokens meet, and in the slot by which documents are found. So the model reads a part of a
sequence as it reads a whole one, for everything else in a layer sees each token by itself. A MoE layer does so only where tokens choose
their experts and none is dropped.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.nn.attention import Attention, Bias, repeated, softmax_core
from moe.nn.context import Context

# B sequences, N new tokens, S tokens so far with the new ones, H heads, K key-value heads, C channels of a head


class KeyValueCache:
    """What `batch` sequences of one length have said so far, at most `length` tokens each. `seen`: how many tokens that is."""

    def __init__(self, batch: int, length: int) -> None:
        self.batch, self.length, self.seen = batch, length, 0
        self._kept: dict[Attention, tuple[Tensor, Tensor]] = {}  # keys and values [B, K, length, C] of each layer
        self._begins_BS: Tensor | None = None  # where documents begin

    def context(self, new_BN: Tensor) -> Context:
        """Where these tokens stand: behind those that were seen."""
        places = range(self.seen, self.seen + new_BN.shape[1])
        return Context.of(new_BN, places=places, length=self.length)

    def attend(self, layer: Attention, q_BHNC: Tensor, k_BKNC: Tensor, v_BKNC: Tensor, *, context: Context, bias: Bias | None) -> Tensor:
        """The layer's core: keep the new keys and values, and look at all that there are."""
        new = q_BHNC.shape[2]
        if layer not in self._kept:
            shape = (self.batch, k_BKNC.shape[1], self.length, k_BKNC.shape[3])
            self._kept[layer] = (k_BKNC.new_empty(shape), v_BKNC.new_empty(shape))
        held = [kept[:, :, : self.seen + new] for kept in self._kept[layer]]
        for kept, x in zip(held, (k_BKNC, v_BKNC), strict=True):
            kept[:, :, self.seen :] = x
        if self.seen == 0:
            return softmax_core(q_BHNC, k_BKNC, v_BKNC, context=context, bias=bias)
        k_BHSC, v_BHSC = (repeated(x, q_BHNC.shape[1]) for x in held)
        return F.scaled_dot_product_attention(q_BHNC, k_BHSC, v_BHSC, attn_mask=self._mask(q_BHNC, context, bias))

    def _mask(self, q_BHNC: Tensor, context: Context, bias: Bias | None) -> Tensor | None:
        """What is added to logits [.., N, S], or which count; None: all do."""
        new = q_BHNC.shape[2]
        if new == 1 and bias is None and context.document_BS is None:
            return None
        place_S = torch.arange(self.seen + new, device=q_BHNC.device)
        place_N = place_S[self.seen :]
        counts = place_N.unsqueeze(1) >= place_S
        if context.document_BS is not None:
            document_BN = context.document_BS[:, self.seen :]
            counts = counts & (document_BN.unsqueeze(2) == context.document_BS.unsqueeze(1)).unsqueeze(1)
        return counts if bias is None else bias.of(place_N, place_S).masked_fill(~counts, -math.inf).to(q_BHNC.dtype)

    def all_places(self, begins_BN: Tensor) -> Tensor:
        """Of the new tokens' flags, those of all tokens so far."""
        known = begins_BN if self._begins_BS is None or self.seen == 0 else torch.cat([self._begins_BS, begins_BN], dim=1)
        self._begins_BS = known
        return known
