"""What every sequence-parallel attention is: a function of this rank's part that talks to the others, forward and backward.

method(q, k, v) -> out             q, k, v, out: the places that this rank holds          method.order: which ones
    forward     what is kept for the backward pass is the method's own
    backward    of q, k, v, and of the bias table this rank's share
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.mesh import Axis
from parallel.sequence.order import Order
from parallel.sequence.softmax import Bias, Bucket, Gradients, Tokens

# B batch, L tokens held here, S of the whole sequence, H heads of queries, K of keys and values, C channels of a head

Kept = tuple[Tensor, ...]
Once = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Known:
    """Beside queries, keys and values: the bias, of which document each token of the whole sequences is, int64 [B, S], or None, the
    method's window, and of each head a sink's logit, wide: a share of the softmax that gives nothing."""

    order: Order
    bias: Bias | None = None
    document_BS: Tensor | None = None
    window: int | None = None
    sink_H: Tensor | None = None

    def tokens(self, rank: int, like: Tensor) -> Tokens:
        """Those that a rank holds."""
        return Tokens(self.order.runs(rank), like.device, self.document_BS, self.window)


@dataclass(frozen=True)
class Method(ABC):
    """Causal attention over the ranks of `axis`, which hold the places that `order` says. `window`: places that a query sees, its own the
    last; None: all before it. Blocks outside of it are not computed; what travels is the same."""

    axis: Axis
    order: Order
    window: int | None = None

    @abstractmethod
    def forward(self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, known: Known) -> tuple[Tensor, ...]:
        """(out in q's shape and dtype, *what the backward pass needs)."""

    @abstractmethod
    def backward(self, grad_BHLC: Tensor, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, kept: Kept, known: Known) -> Gradients:
        """`kept`: what `forward` gave, `out` first. Gradients in any dtype, but for the sinks'."""

    def share_of_sinks(self, kept: Kept, sink_H: Tensor) -> Tensor:
        """The sinks' probabilities [B, H, L], wide, where `kept` is (out, lse)."""
        return (sink_H.view(-1, 1) - kept[1]).exp()

    def __call__(
        self,
        q_BHLC: Tensor,
        k_BKLC: Tensor,
        v_BKLC: Tensor,
        *,
        bias: Bias | None = None,
        sink_H: Tensor | None = None,
        document_BS: Tensor | None = None,
        once: Once | None = None,
    ) -> Tensor:
        """What these queries take from all ranks' keys, in q's shape and dtype. Collective.

        `once(compute)`: what an earlier call of the same pass gave, if there was one: a pass that is computed again does not attend again
        (DistFlashAttn, arXiv 2310.03294, 3.4).
        """
        table, bucket = (None, None) if bias is None else (bias.table_UH, bias.bucket)
        out: Tensor = _Apply.apply(q_BHLC, k_BKLC, v_BKLC, table, sink_H, bucket, document_BS, self, once)
        return out


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        table: Tensor | None,
        sink_H: Tensor | None,
        bucket: Bucket | None,
        document_BS: Tensor | None,
        method: Method,
        once: Once | None,
    ) -> Tensor:
        known = Known(method.order, None if table is None or bucket is None else Bias(table, bucket), document_BS, method.window, sink_H)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        found = method.forward(q, k, v, known) if once is None else once(lambda: method.forward(q, k, v, known))
        ctx.save_for_backward(q, k, v, table, sink_H, document_BS, *found)
        ctx.bucket, ctx.method = bucket, method
        return found[0] if once is None else found[0].clone()  # what is kept for another pass is nobody's output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, sink_H, document_BS, *kept = ctx.saved_tensors
        known = Known(ctx.method.order, None if table is None else Bias(table, ctx.bucket), document_BS, ctx.method.window, sink_H)
        found = ctx.method.backward(grad.contiguous(), q, k, v, tuple(kept), known)
        of_input = (found.q_BHLC.to(q.dtype), found.k_BKSC.to(k.dtype), found.v_BKSC.to(v.dtype))
        of_sinks = None
        if sink_H is not None:  # their value is 0, so of their logits' gradients only what the softmax takes away is left
            share = ctx.method.share_of_sinks(tuple(kept), sink_H)
            of_sinks = -(share * (grad.to(share.dtype) * kept[0].to(share.dtype)).sum(-1)).sum((0, 2)).to(sink_H.dtype)
        return *of_input, found.table_UH, of_sinks, None, None, None, None
