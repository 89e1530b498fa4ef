"""DeepSpeed-Ulysses: ranks exchange heads for tokens, so that each computes attention over whole sequences for some heads.

    before     rank 0: heads 0 1 2 3 of positions 0 .. 5       rank 1: heads 0 1 2 3 of positions 6 .. 11
    inside     rank 0: heads 0 1 of positions 0 .. 11          rank 1: heads 2 3 of positions 0 .. 11       any attention: `inside`
    after      as before

`inside` is the attention that a rank runs on its heads. It may be a ring over other ranks: sequence parallelism in two dimensions (USP,
arXiv 2405.07719). If the number of key-value heads is not a multiple of the number of ranks, heads are repeated, so that each rank
gets those that its query heads need; the gradients of the repetitions are summed.
Costs: docs/parallel/sequence_ulysses.md. Source: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from einops import rearrange
from torch import Tensor

from parallel.mesh.collectives import all_to_all
from parallel.mesh.mesh import Axis
from parallel.numerics.position_bias import Bias
from parallel.sequence.softmax import repeated

# B batch, L tokens on this rank, S = N L tokens of the N ranks, H heads of queries, K heads of keys and values, C channels of a head


@dataclass(frozen=True)
class Ulysses:
    """Ulysses over the ranks of `axis`. Each rank holds a chunk of the positions; `inside` gets the joined chunks of these ranks."""

    axis: Axis
    inside: Callable[..., Tensor]

    def __call__(
        self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, *, bias: Bias | None = None, sink_H: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return the attention of this rank's queries to all ranks' keys, in q's shape and dtype. options: further arguments of `inside`,
        which computes attention for this rank's heads. Collective."""
        if bias is not None:
            bias = bias._replace(table_UH=bias.table_UH.chunk(self.axis.size, dim=1)[self.axis.index])
        if sink_H is not None:
            sink_H = sink_H.chunk(self.axis.size)[self.axis.index]
        sent = (self._shareable(x) for x in (k_BKLC, v_BKLC))
        q, k, v = (self._heads_for_tokens(x) for x in (q_BHLC, *sent))
        return self._tokens_for_heads(self.inside(q, k, v, bias=bias, sink_H=sink_H, **options))

    def _shareable(self, x_BKLC: Tensor) -> Tensor:
        """Return keys or values with heads repeated until the number of ranks divides the number of heads."""
        return repeated(x_BKLC, math.lcm(x_BKLC.shape[1], self.axis.size))

    def _heads_for_tokens(self, x_BHLC: Tensor) -> Tensor:
        parts = rearrange(x_BHLC, "b (n h) l c -> n b h l c", n=self.axis.size)
        return rearrange(self._exchange(parts), "n b h l c -> b h (n l) c")

    def _tokens_for_heads(self, x_BHSC: Tensor) -> Tensor:
        parts = rearrange(x_BHSC, "b h (n l) c -> n b h l c", n=self.axis.size)
        return rearrange(self._exchange(parts), "n b h l c -> b (n h) l c")

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send parts[i] to rank i; return the parts received."""
        each = [1] * self.axis.size
        return all_to_all(parts.contiguous(), self.axis, send=each, receive=each)
