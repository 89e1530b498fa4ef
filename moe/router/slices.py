"""Groups with tokens on several ranks of sp and tp: each rank decides over the whole groups, from all ranks' scores.

    rank 0: tokens 0 .. 5     scores [6, E]   \\                       the same decision on both ranks,
    rank 1: tokens 6 .. 11    scores [6, E]   /   all-gather: [12, E]  and each keeps the rows of its own tokens

Capacity, expert choice and a balance loss per sequence need all tokens of the group. Each rank of sp has some positions of every
sequence. Ranks of tp divide the tokens of a rank of sp: into contiguous chunks of all tokens or, with tensor.sequence_parallel, by columns
(contiguous chunks of each sequence's positions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe.nn.context import Context
from parallel.mesh.collectives import all_gather
from parallel.mesh.host import on_device
from parallel.mesh.mesh import Axis
from parallel.mesh.runs import lengthened

# T tokens on this rank, B sequences, L tokens of each on a rank of sp, S tokens of a whole sequence, G = B S tokens of all ranks

Made = TypeVar("Made", bound=Any)  # a dataclass whose tensors have one row for each token


@dataclass(frozen=True)
class Shards:
    """Distribution of the tokens of whole sequences over the ranks of `axis`. `held`: for each rank, the indices of its tokens among all G,
    int64."""

    axis: Axis
    held: Sequence[Tensor]

    def whole(self, x_T: Tensor) -> Tensor:
        """Gather all ranks' tokens [G, ...], in the order of sequences. Backward: sum this rank's gradients over the ranks."""
        return all_gather(lengthened(x_T, self._longest), self.axis)[on_device(self._row_G, x_T.device)]

    def mine(self, x_G: Tensor) -> Tensor:
        """Return this rank's tokens [T, ...] among all ranks' [G, ...]: the inverse of `whole`, without a collective."""
        return x_G[on_device(self.held[self.axis.index], x_G.device)]

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
    def total(self) -> int:
        """Number of all ranks' tokens (G)."""
        return sum(map(len, self.held))

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self.held))

    @cached_property
    def _row_G(self) -> Tensor:
        """Return each token's row in the gathered tensor, in which every rank's tokens are followed by padding."""
        rows = [rank * self._longest + torch.arange(len(held)) for rank, held in enumerate(self.held)]
        return torch.cat(rows)[torch.cat(list(self.held)).argsort()]


def shards_of(axis: Axis, positions: Sequence[Sequence[int]], *, batch: int, ways: int = 1, by_columns: bool = False) -> Shards:
    """Return how the ranks of `axis` (sp * tp) share `batch` sequences. `positions`: for each rank of sp, the positions of its tokens in a
    sequence, ascending. `ways`: number of ranks of tp that divide these tokens, `by_columns` or into contiguous chunks of all.
    """
    first_B1 = torch.arange(batch).unsqueeze(1) * sum(map(len, positions))
    tokens = [first_B1 + torch.tensor(held) for held in positions]
    parts = [x_BL.chunk(ways, 1) if by_columns else x_BL.flatten().tensor_split(ways) for x_BL in tokens]
    return Shards(axis, [part.flatten() for of_rank in parts for part in of_rank])


def whole_sequences(x_BL: Tensor, *, axis: Axis, positions: Sequence[Sequence[int]]) -> Tensor:
    """Gather the shards [B, L, ...] of all ranks of sp (`axis`) into whole sequences [B, S, ...]."""
    x_GD = shards_of(axis, positions, batch=len(x_BL)).whole(x_BL.flatten(0, 1))
    return x_GD.view(len(x_BL), -1, *x_BL.shape[2:])
