"""Groups with tokens on several ranks (sequence parallelism): each rank decides over the whole group, from all ranks' scores.

    sp 0: tokens 0 .. 5     scores [6, E]   \\                       the same decision on both ranks,
    sp 1: tokens 6 .. 11    scores [6, E]   /   all-gather: [12, E]  and each keeps the rows of its own tokens

Capacity, expert choice and a balance loss per sequence need all tokens of the group. Only fp32 scores are gathered, 4 E bytes a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from moe.nn.context import Context
from parallel.mesh.collectives import all_gather
from parallel.mesh.mesh import Axis

# T tokens held here, B sequences, L tokens of each held here, N ranks, G = N T tokens of all ranks

Made = TypeVar("Made", bound=Any)  # a dataclass whose tensors have one row for each token


@dataclass(frozen=True)
class SequenceShards:
    """Shards of sequences over `axis`. `positions`: for each rank of the axis, the positions of its tokens in a sequence, ascending."""

    axis: Axis
    positions: Sequence[Sequence[int]]

    def whole(self, x_T: Tensor) -> Tensor:
        """Gather all ranks' tokens [G, ...], in the order of sequences. Backward: sum this rank's gradients over the ranks."""
        x_BL = rearrange(x_T, "(b l) ... -> b l ...", l=len(self.positions[self.axis.index]))
        return rearrange(self.whole_sequences(x_BL), "b s ... -> (b s) ...")

    def whole_sequences(self, x_BL: Tensor) -> Tensor:
        """Gather all ranks' shards [B, L, ...] into whole sequences [B, N L, ...]."""
        return all_gather(x_BL, self.axis, dim=1)[:, self._sorted.to(x_BL.device)]

    def mine(self, x_G: Tensor) -> Tensor:
        """Cut all ranks' tokens [G, ...] to this rank's [T, ...]: the inverse of `whole`, without a collective."""
        x_BS = rearrange(x_G, "(b s) ... -> b s ...", s=len(self._sorted))
        return rearrange(x_BS[:, self._held.to(x_G.device)], "b l ... -> (b l) ...")

    def context(self, context: Context) -> Context:
        """Return the context of all ranks' tokens: their positions, validity and token ids. Collective."""
        valid_T, tokens_T = (None if x is None else self.whole(x) for x in (context.valid_T, context.tokens_T))
        return replace(context, position_T=self.whole(context.position_T), valid_T=valid_T, tokens_T=tokens_T)

    def mapped(self, made: Made, change: Callable[[Tensor], Tensor]) -> Made:
        """Return the dataclass with every tensor changed by `change`: `whole` (collective) or `mine`."""
        changed: dict[str, Any] = {}
        for f in fields(made):
            value = getattr(made, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = change(value)
            elif is_dataclass(value):
                changed[f.name] = self.mapped(value, change)
        return replace(made, **changed)

    @cached_property
    def _held(self) -> Tensor:
        return torch.tensor(self.positions[self.axis.index])

    @cached_property
    def _sorted(self) -> Tensor:
        return torch.tensor([position for held in self.positions for position in held]).argsort()
