"""Ring self-attention of Colossal-AI's paper: first all scores of a rank's queries, then all values.

    ring QK    keys go around the ring; each rank fills its queries' rows of scores [L, N S]: L queries, S keys of each of N ranks
    softmax    of whole rows, on each rank: nothing to merge
    ring AV    values go around the ring; each rank sums probabilities times values

    backward   values go around again for the probabilities' gradient, and keys for the queries' gradient. Every rank has partial sums of
               the gradients of all keys and values; a reduce-scatter gives each rank the sums for its keys and values

ColossalAI's code divides gradients by N (issue #3044). This file does not, because a sequence's loss is no mean over ranks.
Costs: docs/parallel/sequence_colossal_ring.md. Source: Li et al., arXiv 2105.13120, section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from einops import rearrange
from torch import Tensor

from parallel.mesh.collectives import ring_round, scatter_sum_into
from parallel.numerics.precision import sum_dtype
from parallel.sequence.method import Known, Method, SavedTensors
from parallel.sequence.softmax import Gradients, repeated, scores, summed, table_gradient

# N ranks, B batch, H heads (K of keys and values), L queries of this rank, S = L keys of each rank, C channels of a head.
# weight: attention probabilities


class ColossalRing(Method):
    """Ring self-attention with whole rows of scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        mine, heads = known.tokens(self.axis.index, q), q.shape[1]
        score_NBHLS = q.new_empty((self.axis.size, *q.shape[:3], k.shape[2]), dtype=sum_dtype(q.dtype))
        for source, k_there in self._round(k):
            theirs = known.keys(source, q)
            score = scores(q, repeated(k_there, heads), queries=mine, keys=theirs, bias=known.bias)
            score_NBHLS[source] = score.masked_fill_(theirs.place_L > mine.place_L.unsqueeze(1), -torch.inf) if self.order.causal else score
        whole = rearrange(score_NBHLS, "n b h l s -> b h l (n s)")
        if known.sink_H is not None:
            whole = torch.cat([whole, known.sink_H.to(whole.dtype).view(-1, 1, 1).expand(*whole.shape[:-1], 1)], dim=-1)
        whole, sinks = whole.softmax(-1).split([score_NBHLS.shape[-1] * self.axis.size, 0 if known.sink_H is None else 1], dim=-1)
        weight_NBHLS = rearrange(whole, "b h l (n s) -> n b h l s", n=self.axis.size).to(q.dtype)
        out = torch.zeros_like(q, dtype=sum_dtype(q.dtype))
        for source, v_there in self._round(v):
            out += weight_NBHLS[source] @ repeated(v_there, heads)
        return (out.to(q.dtype), weight_NBHLS, *([] if known.sink_H is None else [sinks.squeeze(-1).clone()]))

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        out, weight_NBHLS, *_ = kept
        mine, (heads, kv_heads), wide = known.tokens(self.axis.index, q), (q.shape[1], k.shape[1]), sum_dtype(q.dtype)
        scale, delta_BHL1 = q.shape[-1] ** -0.5, (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        dv = torch.stack([summed((weight.mT @ grad).to(wide), kv_heads) for weight in weight_NBHLS])
        dscore_NBHLS = torch.empty_like(weight_NBHLS)
        for source, v_there in self._round(v):
            dweight = (grad @ repeated(v_there, heads).mT).to(wide)
            dscore_NBHLS[source] = weight_NBHLS[source].to(wide) * (dweight - delta_BHL1)
        dq, dtable = torch.zeros_like(q, dtype=wide), None if known.bias is None else torch.zeros_like(known.bias.table_UH)
        for source, k_there in self._round(k):
            dq += dscore_NBHLS[source] @ repeated(k_there, heads) * scale
            if known.bias is not None and dtable is not None:
                dtable += table_gradient(known.bias, dscore_NBHLS[source].to(wide), queries=mine, keys=known.keys(source, q))
        dk = torch.stack([summed((dscore.mT @ q).to(wide) * scale, kv_heads) for dscore in dscore_NBHLS])
        return Gradients(dq, self._own(dk), self._own(dv), dtable)

    def share_of_sinks(self, kept: SavedTensors, sink_H: Tensor) -> Tensor:
        return kept[2]

    def _own(self, parts_NBKSC: Tensor) -> Tensor:
        """Return the gradient of this rank's keys or values: the reduce-scatter of `parts_NBKSC`, partial gradients for each of N ranks."""
        if self.axis.size == 1:
            return parts_NBKSC[0]
        out = torch.empty_like(parts_NBKSC[:1])
        scatter_sum_into(out, parts_NBKSC.contiguous(), self.axis)
        return out[0]

    def _round(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (rank, its tensor) for every rank, this one first. `moe verify` replaces this method by one that
        slices the tensors of one process."""
        return ((source, theirs) for source, (theirs,) in ring_round([mine], self.axis))
