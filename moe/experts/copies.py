"""Where ranks hold copies of the same tokens, a MoE layer works on each token once: the copies are cut, and the results joined.

    x_BLD, the same on every rank of the axis     rank 0: sequences 0..3    rank 1: sequences 0..3
    cut                                                   0, 1                      2, 3              backward: gradients of all back to all
    router, exchange, experts                             each its own, as two ranks of a data axis do
    join                                          y_BLD of all, the same on every rank                backward: each takes its own

Expert parallelism folds over the axis then: its ranks bring other tokens (MoE parallel folding, arXiv 2504.14960). Whole sequences
are cut, so groups over which capacity and balance are counted stay whole. What the layer says of itself is of all ranks' tokens.
Sequences that the ranks cannot share out, and no gradient is asked of (the one of a sample), each rank routes for itself.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moe.nn.context import Context
from parallel.collectives import cut_copies, join_copies, sum_over
from parallel.errors import BadInput
from parallel.mesh import Axis

# B batch, L length, D model, T = B*L tokens

Report = TypeVar("Report", bound=Any)  # a dataclass: whole numbers are counts, tensors of fractions are means over tokens


class Exchange(Protocol):
    """How the ranks that share tokens come to whole sequences, each to some of them, and back; or, all of them to all, and back."""

    def cut(self, x_BLD: Tensor) -> Tensor: ...

    def join(self, y_BLD: Tensor) -> Tensor: ...

    def whole(self, x_BLD: Tensor) -> Tensor: ...

    def mine(self, y_BLD: Tensor) -> Tensor: ...


class OfCopies:
    """Where each rank has all tokens."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def cut(self, x_BLD: Tensor) -> Tensor:
        return cut_copies(x_BLD, self.axis)

    def join(self, y_BLD: Tensor) -> Tensor:
        return join_copies(y_BLD, self.axis)

    def whole(self, x_BLD: Tensor) -> Tensor:
        return x_BLD

    def mine(self, y_BLD: Tensor) -> Tensor:
        return y_BLD


class Copies:
    """Of one layer: `axis` are the ranks that share its tokens, in copies unless `exchange` says otherwise."""

    def __init__(self, axis: Axis, exchange: Exchange | None = None) -> None:
        self.axis, self.exchange = axis, exchange or OfCopies(axis)

    def cuts(self, x_BLD: Tensor) -> bool:
        """Whether these tokens are cut, or each rank routes all of them."""
        return torch.is_grad_enabled() or x_BLD.shape[0] % self.axis.size == 0

    def cut(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, Context, float]:
        """This rank's sequences, what is known of their tokens, and which share of the pass's valid tokens they are."""
        batch = x_BLD.shape[0]
        if batch % self.axis.size:
            raise BadInput(
                "sequences of a micro-batch",
                got=batch,
                needed=f"a multiple of {self.axis.name}={self.axis.size}: each of its ranks routes an equal part of them",
                fix="change train.global_batch, pipeline.microbatches or degrees.tp",
            )
        each = len(context.position_T) // self.axis.size
        tokens = slice(self.axis.index * each, (self.axis.index + 1) * each)
        share = 1 / self.axis.size
        if context.valid_T is not None:
            share = int(context.valid_T[tokens].sum()) / max(1, int(context.valid_T.sum()))

        def together(layer: int, mine: Tensor) -> Tensor:
            name = f"layers.{layer}.sums of copies"
            return context.once(name, lambda: sum_over(mine.clone(), replace(self.axis, label=f"layers.{layer}.balance")))

        return self.exchange.cut(x_BLD), context.of_run(tokens, share=share, together=together), share

    def join(self, y_BLD: Tensor) -> Tensor:
        """All sequences' results from each rank's."""
        return self.exchange.join(y_BLD)

    def together(self, report: Report, *, share: float) -> Report:
        """The report of all tokens from each rank's, whose tokens are `share` of them."""
        told = {f.name: getattr(report, f.name) for f in fields(report) if isinstance(getattr(report, f.name), Tensor)}
        parts = {name: value.double() * (share if value.is_floating_point() else 1) for name, value in told.items()}
        sums = sum_over(torch.cat([part.reshape(-1) for part in parts.values()]), self.axis)
        of_each = sums.split([part.numel() for part in parts.values()])
        return replace(report, **{name: s.view_as(told[name]).to(told[name].dtype) for name, s in zip(told, of_each, strict=True)})
