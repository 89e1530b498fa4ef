"""The interface of sequence-parallel attention: method(q, k, v) -> out, each at the positions of this rank (method.order)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.mesh.mesh import Axis
from parallel.numerics.position_bias import Bias
from parallel.sequence.order import Order
from parallel.sequence.softmax import Gradients, Tokens

# B batch, L tokens on this rank, S tokens of the whole sequence, H heads of queries, K heads of keys and values, C channels of a head

SavedTensors = tuple[Tensor, ...]  # the result of `Method.forward`: the output, then what its backward pass needs
Once = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Tensor, ...]]  # calls its argument, or returns the result of an earlier call


@dataclass(frozen=True)
class Known:
    """Inputs of attention other than queries, keys and values.
    document_BS: document number of each token of the sequences, not only of this rank's tokens, int64; None: one document a sequence.
    source_document_BS: document numbers of the keys in cross attention; each rank holds a contiguous chunk of these keys.
    window: see Method.
    sink_H: the logit of each head's attention sink, which takes a share of the softmax and adds nothing; fp32 or wider."""

    order: Order
    bias: Bias | None = None
    document_BS: Tensor | None = None
    window: int | None = None
    sink_H: Tensor | None = None
    source_document_BS: Tensor | None = None

    def tokens(self, rank: int, like: Tensor) -> Tokens:
        """Return positions and documents of the tokens that a rank holds, on the device of `like`."""
        return Tokens(self.order.ranges(rank), like.device, self.document_BS, self.window)

    def keys(self, rank: int, like: Tensor) -> Tokens:
        """Return positions and documents of the keys that a rank holds. In cross attention, they differ from those of its queries. like: a
        tensor on the device."""
        if self.source_document_BS is None:
            return self.tokens(rank, like)
        order = Order("contiguous", self.order.size, self.source_document_BS.shape[1], causal=False)
        return Tokens(order.ranges(rank), like.device, self.source_document_BS)


@dataclass(frozen=True)
class Method(ABC):
    """Attention over the ranks of `axis`, which hold the positions of `order`. If order is not causal, and without position bias and
    window, the keys may be of other sequences than the queries (cross attention).
    `window`: number of positions that a query sees, the query's own included; None: all earlier positions. Blocks of keys outside the
    window are sent but not computed."""

    axis: Axis
    order: Order
    window: int | None = None

    @abstractmethod
    def forward(self, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, known: Known) -> tuple[Tensor, ...]:
        """Return (out in q's shape and dtype, *tensors to save for the backward pass)."""

    @abstractmethod
    def backward(self, grad_BHLC: Tensor, q_BHLC: Tensor, k_BKLC: Tensor, v_BKLC: Tensor, kept: SavedTensors, known: Known) -> Gradients:
        """Return gradients of this rank's q, k, v, in any dtype. The bias table's gradient is a partial sum. kept: `forward`'s result."""

    def share_of_sinks(self, kept: SavedTensors, sink_H: Tensor) -> Tensor:
        """Return the sinks' probabilities [B, H, L], fp32 or wider. `kept`: `forward`'s result; this default expects (out, log-sum-exp)."""
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
        source_document_BS: Tensor | None = None,
        once: Once | None = None,
    ) -> Tensor:
        """Return the attention of this rank's queries to all ranks' keys, in q's shape and dtype. Collective.

        bias: a position bias of the logits. sink_H, document_BS, source_document_BS: see Known. `once(compute)`: returns compute() in the
        forward pass, and the stored result during recomputation, so that attention is not computed again (DistFlashAttn, arXiv 2310.03294,
        3.4)."""
        table, bucket = (None, None) if bias is None else (bias.table_UH, bias.bucket)
        out: Tensor = _Apply.apply(q_BHLC, k_BKLC, v_BKLC, table, sink_H, bucket, document_BS, source_document_BS, self, once)
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
        bucket: Callable[[Tensor], Tensor] | None,
        document_BS: Tensor | None,
        source_document_BS: Tensor | None,
        method: Method,
        once: Once | None,
    ) -> Tensor:
        position_bias = None if table is None or bucket is None else Bias(table, bucket)
        known = Known(method.order, position_bias, document_BS, method.window, sink_H, source_document_BS)
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        found = method.forward(q, k, v, known) if once is None else once(lambda: method.forward(q, k, v, known))
        ctx.save_for_backward(q, k, v, table, sink_H, document_BS, source_document_BS, *found)
        ctx.bucket, ctx.method = bucket, method
        return found[0] if once is None else found[0].clone()  # a copy, because autograd would attach its graph to the stored tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, table, sink_H, document_BS, source_document_BS, *kept = ctx.saved_tensors
        position_bias = None if table is None else Bias(table, ctx.bucket)
        known = Known(ctx.method.order, position_bias, document_BS, ctx.method.window, sink_H, source_document_BS)
        found = ctx.method.backward(grad.contiguous(), q, k, v, tuple(kept), known)
        grad_inputs = (found.q_BHLC.to(q.dtype), found.k_BKSC.to(k.dtype), found.v_BKSC.to(v.dtype))
        grad_sinks = None
        if sink_H is not None:  # d sink = p (<grad, value> - <grad, out>), and a sink's value is 0
            share = ctx.method.share_of_sinks(tuple(kept), sink_H)
            grad_sinks = -(share * (grad.to(share.dtype) * kept[0].to(share.dtype)).sum(-1)).sum((0, 2)).to(sink_H.dtype)
        return *grad_inputs, found.table_UH, grad_sinks, None, None, None, None, None
