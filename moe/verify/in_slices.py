"""Attention on one process, rounded as ranks that hold slices of sequences round it: slice by slice, then merged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from moe.model.transformer import Block, Transformer
from moe.parallelize.sequence import Exchanging
from moe.verify.cases import Case
from parallel.mesh import Axis
from parallel.sequence.colossal_ring import ColossalRing
from parallel.sequence.method import Kept, Known, Method
from parallel.sequence.order import Order
from parallel.sequence.softmax import Gradients, Partial, Tokens, attend, attend_backward, merge, nothing

ALONE = Axis("alone")


def in_slices(model: Transformer, case: Case) -> None:
    """Fill the cores of attention; one slice: whole scores, as a plain softmax has them."""
    kind = ColossalRing if case.slices == 1 else _InSlices
    for block in model.layers:
        assert isinstance(block, Block)
        block.attention.core = Exchanging(kind(ALONE, Order("contiguous", case.slices, case.length), block.attention.window), keep=None)


class _InSlices(Method):
    """What all ranks of a ring compute, one after another: `order` has as many ranks as slices."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, known: Known) -> tuple[Tensor, ...]:
        merged = nothing(q, known.sink_H)
        for queries, keys, about in self._blocks(q, known):
            merge(merged, attend(q[:, :, queries], k[:, :, keys], v[:, :, keys], **about), queries)
        return merged.out_BHLC.to(q.dtype), merged.lse_BHL

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, kept: Kept, known: Known) -> Gradients:
        (out, lse), total = kept, Gradients.zeros(q, k, v, known.bias)
        for queries, keys, about in self._blocks(q, known):
            block = grad[:, :, queries], q[:, :, queries], k[:, :, keys], v[:, :, keys]
            whole = Partial(out[:, :, queries], lse[:, :, queries])
            total.add(attend_backward(*block, whole, **about), queries=queries, keys=keys)
        return total

    def _blocks(self, like: Tensor, known: Known) -> Iterator[tuple[slice, slice, dict[str, Any]]]:
        """Queries, the keys that they see, and what `attend` must be told of both."""
        tokens = Tokens((range(self.order.length),), like.device, known.document_BS, known.window)
        slices = [slice(run.start, run.stop) for rank in range(self.order.size) for run in self.order.runs(rank)]
        for number, queries in enumerate(slices):
            for keys in slices[: number + 1]:
                yield queries, keys, {"triangle": keys == queries, "queries": tokens[queries], "keys": tokens[keys], "bias": known.bias}
