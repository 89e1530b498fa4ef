"""Routes each token once if several ranks of an axis hold copies of it (tensor parallelism): cuts the copies, joins the results.

    x_BLD, equal on every rank of the axis        rank 0: sequences 0..3    rank 1: sequences 0..3
    cut                                                   0, 1                      2, 3              backward: all-gather of gradients
    router, exchange, experts                             each its own sequences, like ranks of dp
    join                                          y_BLD of all, equal on every rank                   backward: each keeps its own

So expert parallelism can use this axis too (MoE parallel folding, arXiv 2504.14960). Cuts are between sequences, so groups of tokens
stay whole. Without gradients, sequences that the ranks cannot share equally are not cut: each rank routes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from moe.nn.context import Context
from parallel.errors import BadInput
from parallel.mesh.collectives import cut_copies, join_copies, sum_over
from parallel.mesh.mesh import Axis

# B batch, L length, D model, T = B*L tokens

Report = TypeVar("Report", bound=Any)  # a dataclass: integer tensors are counts, floating-point ones are means over tokens


class Exchange(Protocol):
    """The exchange between the layout of tokens outside the layer and whole sequences, which the layer routes.
    `cut` gives each rank an equal share of the sequences, and `join` undoes it. `whole` gives each rank all of them, and `mine` undoes it.
    """

    def cut(self, x_BLD: Tensor) -> Tensor: ...
    def join(self, y_BLD: Tensor) -> Tensor: ...
    def whole(self, x_BLD: Tensor) -> Tensor: ...
    def mine(self, y_BLD: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class FullCopies:
    axis: Axis

    def cut(self, x_BLD: Tensor) -> Tensor:
        return cut_copies(x_BLD, self.axis)

    def join(self, y_BLD: Tensor) -> Tensor:
        return join_copies(y_BLD, self.axis)

    def whole(self, x_BLD: Tensor) -> Tensor:
        return x_BLD

    def mine(self, y_BLD: Tensor) -> Tensor:
        return y_BLD


class Copies:
    """One layer's tokens over the ranks of `axis`. `exchange` converts each rank's shard to whole sequences; None: each rank has all."""

    def __init__(self, axis: Axis, exchange: Exchange | None = None) -> None:
        self.axis, self.exchange = axis, exchange or FullCopies(axis)

    def cuts(self, x_BLD: Tensor) -> bool:
        """Return whether the ranks share these sequences. If not, each rank routes all of them."""
        return torch.is_grad_enabled() or x_BLD.shape[0] % self.axis.size == 0

    def cut(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, Context, float | Tensor]:
        """Return this rank's sequences, the context of their tokens, and their share of the micro-batch's valid tokens.
        Raise BadInput if the axis does not divide the number of sequences.
        """
        batch = x_BLD.shape[0]
        if batch % self.axis.size:
            needed = f"a multiple of {self.axis.name}={self.axis.size}: each of its ranks routes an equal share of them"
            fix = "change train.global_batch, pipeline.microbatches or degrees.tp"
            raise BadInput("sequences of a micro-batch", got=batch, needed=needed, fix=fix)
        each = len(context.position_T) // self.axis.size
        tokens = slice(self.axis.index * each, (self.axis.index + 1) * each)
        valid_T = context.valid_T
        share = 1 / self.axis.size if valid_T is None else valid_T[tokens].sum().double() / valid_T.sum().clamp(min=1)

        def together(layer: int, mine: Tensor) -> Tensor:
            name = f"layers.{layer}.sums of copies"
            return context.once(name, lambda: sum_over(mine.clone(), replace(self.axis, label=f"layers.{layer}.balance")))

        return self.exchange.cut(x_BLD), context.of_tokens(tokens, share=share, together=together), share

    def together(self, report: Report, *, share: float | Tensor) -> Report:
        """Combine the layer reports of all ranks. `share`: this rank's share of the valid tokens. Collective."""
        own = {f.name: getattr(report, f.name) for f in fields(report) if isinstance(getattr(report, f.name), Tensor)}
        parts = {name: value.double() * (share if value.is_floating_point() else 1) for name, value in own.items()}
        sums = sum_over(torch.cat([part.reshape(-1) for part in parts.values()]), self.axis)
        totals = sums.split([part.numel() for part in parts.values()])
        return replace(report, **{name: s.view_as(own[name]).to(own[name].dtype) for name, s in zip(own, totals, strict=True)})
