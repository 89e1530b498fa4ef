"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): the keys and values of all heads are computed from one small
vector.

    x -> q_down -> norm -> q_up -> for each head  [ content | rotary ]          without a latent of queries: x -> q -> the same
    x -> kv_down -> [ a | r ]                     r: one rotary key for all heads
    a -> norm -> c -> kv_up -> for each head  [ k | v ]        c: the latent;  the head's key: [ k | r ]
    core(queries, keys, values) -> out

Tensor parallelism splits q or q_up, kv_up and out by heads. In plain attention (attention.py), the collective before split matrices
(`enter`) communicates x. Here it communicates c, r and the input of q or q_up as one tensor, which is smaller if queries have a latent too.
In text generation (`compressed`, section 2.1.2), the latents themselves are the keys and values. kv_up has a part U for a
head's keys and a part W for its values. With attention weights p, q (U c) = (U^T q) c and sum p (W c) = W sum p c. So queries become U^T q,
and [ c | r ] is key and value of all heads. Without `compressed`, values are padded to the keys' size."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from torch import Tensor, nn

from moe.nn.attention import RelativeBias, Sinks
from moe.nn.context import Context
from moe.nn.core import Core, softmax_core
from moe.nn.linear import Added, Linear, Norm
from moe.nn.rotary import logit_factor, turned, turns_of
from moe.recipe import sections
from parallel.data.tiling import Slot, as_it_is
from parallel.mesh.regions import in_region
from parallel.numerics.position_bias import Bias

# B batch, L length, D model, H heads, C channels of a head's query or key: N content and P rotary ones; V of a value, R of the latent


class LatentAttention(nn.Module):
    """Latent attention. Tensor parallelism replaces `enter` (applied to the inputs of the split matrices) and `leave` (applied to the
    output); sequence parallelism replaces `core`. `window`: number of tokens that a query sees (None: all earlier ones). `compressed`:
    `core` gets latents as keys and values.

    Weights [out, in]: q_down [query_rank, D] and q_up [H C, query_rank], or q [H C, D]; kv_down [R + P, D], kv_up [H (N + V), R], out [D, H
    V]."""

    def __init__(self, model: sections.Model, *, window: int | None = None) -> None:
        super().__init__()
        size, heads, width = model.latent_sizes, model.num_heads, model.d_model
        self.size, self.rope = size, model.rope
        rank, out = model.latent.query_rank, heads * size.key
        self.q = Linear(width, out) if rank is None else None
        self.q_down = None if rank is None else Linear(width, rank)
        self.q_down_norm = None if rank is None else Norm(rank, "rmsnorm")
        self.q_up = None if rank is None else Linear(rank, out)
        self.kv_down = Linear(width, size.rank + size.rotary)
        self.kv_down_norm = Norm(size.rank, "rmsnorm")
        self.kv_up = Linear(size.rank, heads * (size.content + size.value))
        self.out = Linear(heads * size.value, width)
        self.out_bias = Added(width) if model.out_bias else None
        self.sinks = Sinks(heads) if model.attention_sinks else None
        self.window, self.compressed, self.core_scale = window, False, None
        self.core: Core = partial(softmax_core, window=window)
        self.enter: Slot = as_it_is
        self.leave: Slot = as_it_is
        self.for_heads: Slot = as_it_is  # on the rotary key after `enter`: tensor.kind dtensor makes it a plain tensor
        self.bias: RelativeBias | None = None

    @in_region("attention")
    def forward(self, x_BLD: Tensor, context: Context, *, shared: Bias | None = None, source_BSD: Tensor | None = None) -> Tensor:
        """Return [B, L, D] in x's dtype. `shared` and `source_BSD` must be None: they are for encoder-decoders."""
        assert shared is None and source_BSD is None
        q_BHLC, latent_BLR, turned_B1LP = self._entered(x_BLD)
        content, rotary = q_BHLC.split([self.size.content, self.size.rotary], dim=3)
        turns = context.for_all_layers(turns_of, context.place_L, self.size.rotary, self.rope, dtype=x_BLD.dtype)
        rotary, turned_B1LP = turned(rotary, turns), turned(turned_B1LP, turns)
        sink_H = None if self.sinks is None else self.sinks()
        mix = self._mixed_latents if self.compressed else self._mixed
        mixed_BHLV = mix(content, rotary, latent_BLR, turned_B1LP, context, sink_H)
        y_BLD = self.leave(self.out(rearrange(mixed_BHLV, "b h l v -> b l (h v)")))
        return y_BLD if self.out_bias is None else self.out_bias(y_BLD)

    def _entered(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries of this rank's heads [B, H, L, C], latent [B, L, R] and rotary key of all heads [B, 1, L, P], before rotation."""
        latent_BLR, rotary_BLP = self.kv_down(x_BLD).split([self.size.rank, self.size.rotary], dim=2)
        low = x_BLD if self.q_down is None or self.q_down_norm is None else self.q_down_norm(self.q_down(x_BLD))
        read = [low, self.kv_down_norm(latent_BLR), rotary_BLP]
        if self.enter is not as_it_is:
            read = list(self.enter(torch.cat(read, dim=2)).split([part.shape[2] for part in read], dim=2))
        up = self.q if self.q_up is None else self.q_up
        assert up is not None
        return rearrange(up(read[0]), "b l (h c) -> b h l c", c=self.size.key), read[1], self.for_heads(read[2]).unsqueeze(1)

    def _mixed(self, content: Tensor, rotary: Tensor, latent: Tensor, turned: Tensor, context: Context, sink_H: Tensor | None) -> Tensor:
        """Return attention's output [B, H, L, V], with keys and values of all heads made from the latents. `content`, `rotary`: channels of
        the queries. `turned`: the rotary key after rotation."""
        size, heads = self.size, content.shape[1]
        made = rearrange(self.kv_up(latent), "b l (h c) -> b h l c", h=heads)
        k, v = made.split([size.content, size.value], dim=3)
        keys = torch.cat([k, turned.expand(-1, heads, -1, -1)], dim=3)
        queries = self._scaled(torch.cat([content, rotary], dim=3))
        return self.core(queries, keys, F.pad(v, (0, size.key - size.value)), context=context, bias=None, sink_H=sink_H)[..., : size.value]

    def _mixed_latents(
        self, content: Tensor, rotary: Tensor, latent: Tensor, turned: Tensor, context: Context, sink_H: Tensor | None
    ) -> Tensor:
        """Return the same output as `_mixed`, but with the latents as keys and values (`compressed`, top of this file): the keys and
        values of each head are not computed."""
        size = self.size
        up = rearrange(self.kv_up.read(latent.dtype).to(latent.dtype), "(h c) r -> h c r", h=content.shape[1])
        for_keys, for_values = up.split([size.content, size.value], dim=1)
        queries = torch.cat([einsum(content, for_keys, "b h l n, h n r -> b h l r"), rotary], dim=3)
        latents = torch.cat([latent.unsqueeze(1), turned], dim=3)  # both the keys and the values; the output's rotary channels are cut off
        mixed = self.core(self._scaled(queries), latents, latents, context=context, bias=None, sink_H=sink_H)[..., : size.rank]
        out: Tensor = einsum(mixed, for_values, "b h l r, h v r -> b h l v")
        return out

    def _scaled(self, queries: Tensor) -> Tensor:
        """Return queries times a factor, so that the core's logits are divided by sqrt(C) and multiplied by YaRN's factor."""
        factor = (queries.shape[3] / self.size.key) ** 0.5 * logit_factor(self.rope)
        return queries if factor == 1 else queries * factor
