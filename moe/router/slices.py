"""Token groups, for routing and its losses, that lie on several ranks of sp and tp. The ranks exchange what a decision or loss needs to
know about the whole group:

    balance loss               sum of each expert's choices    each rank then takes a mean over its own tokens
    slots                      all-gather of chosen experts    each rank assigns slots to all tokens, and keeps its own tokens' slots
    expert choice, sinkhorn    all-gather of logits            each rank decides for all tokens, and keeps its tokens' decisions

Each rank of sp has some positions of every sequence. Ranks of tp divide the tokens of a rank of sp: into contiguous chunks of all tokens
or, with tensor.sequence_parallel, by columns (contiguous chunks of each sequence's positions).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe.nn.context import Context
from parallel.mesh.collectives import all_gather, sum_over
from parallel.mesh.exchange import lengthened
from parallel.mesh.host import on_device
from parallel.mesh.mesh import Axis

# T tokens on this rank, B sequences, L tokens of each on a rank of sp, S tokens of a whole sequence, G = B S tokens of all ranks

Made = TypeVar("Made", bound=Any)  # a dataclass whose tensors have one row for each token


@dataclass(frozen=True)
class Shards:
    """Distribution of the tokens of whole sequences over the ranks of `axis`. `held`: for each rank, the indices of its tokens among all
    these tokens, int64."""

    axis: Axis
    held: Sequence[Tensor]
    _in_runs: dict[int, bool] = field(default_factory=dict)
    _copies: dict[tuple[str, torch.device], Tensor] = field(default_factory=dict)

    def whole(self, x_T: Tensor) -> Tensor:
        """Gather all ranks' tokens [G, ...], in the order of sequences. The backward pass sums the gradients of this rank's tokens over the
        ranks."""
        return self.gathered(x_T)[self.row_G(x_T.device)]

    def gathered(self, x_T: Tensor) -> Tensor:
        """Gather all ranks' tokens, rank after rank. Each rank's tokens are padded to the largest number that a rank has. The backward
        pass sums the gradients of this rank's tokens over the ranks."""
        return all_gather(lengthened(x_T, self._longest), self.axis)

    def row_G(self, device: torch.device) -> Tensor:
        """Return for each token, in the order of sequences, its row in the result of `gathered`: int64 [G], on the device."""
        return self._on(device, "row", lambda: self._row_G)

    @property
    def own_rows(self) -> range:
        """Rows of this rank's tokens in the result of `gathered`."""
        first = self.axis.index * self._longest
        return range(first, first + len(self.held[self.axis.index]))

    def mine(self, x_G: Tensor) -> Tensor:
        """Return this rank's tokens [T, ...] among all ranks' [G, ...]: the inverse of `whole`, without a collective."""
        return x_G[self._on(x_G.device, "held", lambda: self.held[self.axis.index])]

    def summed(self, counts: Tensor) -> Tensor:
        """Sum counts in place over the ranks, and return them. Collective."""
        return sum_over(counts, self.axis)

    def group_T(self, num_groups: int, device: torch.device) -> Tensor:
        """Return the group of each of this rank's tokens: int64 [T], on the device."""
        return self._on(device, f"group of {num_groups}", lambda: self.held[self.axis.index] // max(1, self.total // num_groups))

    def in_runs(self, num_groups: int) -> bool:
        """Return whether every rank has equally many tokens of each group, and the tokens of a group are consecutive."""
        if num_groups not in self._in_runs:
            size = max(1, self.total // num_groups)
            self._in_runs[num_groups] = all(
                len(held) % num_groups == 0 and torch.equal(held // size, torch.arange(len(held)) // max(1, len(held) // num_groups))
                for held in self.held
            )
        return self._in_runs[num_groups]

    def context(self, context: Context) -> Context:
        """Return the context of all ranks' tokens: their positions, validity and token ids. Collective."""
        valid_T = None if context.valid_T is None else self.whole(context.valid_T)
        return replace(context, position_T=self.whole(context.position_T), valid_T=valid_T, tokens_T=self.whole(context.tokens_T))

    def of_mine(self, made: Made) -> Made:
        """Return a copy of the dataclass `made`. Its tensors [G, ...], with a row for each token of all ranks, are replaced by the rows of
        this rank's tokens, [T, ...] (`mine`)."""
        changed: dict[str, Any] = {}
        for f in fields(made):
            value = getattr(made, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = self.mine(value)
            elif is_dataclass(value):
                changed[f.name] = self.of_mine(value)
        return replace(made, **changed)

    @cached_property
    def total(self) -> int:
        """Number of all ranks' tokens (G)."""
        return sum(map(len, self.held))

    def _on(self, device: torch.device, name: str, made: Callable[[], Tensor]) -> Tensor:
        """Return the result of `made` on the device. It is cached under `name` and the device, so all passes get the same tensor."""
        if (name, device) not in self._copies:
            self._copies[name, device] = on_device(made(), device)
        return self._copies[name, device]

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
    sequence, ascending. `ways`: number of tp ranks among which the tokens of a rank of sp are divided. `by_columns`: each tp rank gets
    contiguous positions of every sequence; otherwise it gets a contiguous chunk of all tokens.
    """
    first_B1 = torch.arange(batch).unsqueeze(1) * sum(map(len, positions))
    tokens = [first_B1 + torch.tensor(held) for held in positions]
    parts = [x_BL.chunk(ways, 1) if by_columns else x_BL.flatten().tensor_split(ways) for x_BL in tokens]
    return Shards(axis, [part.flatten() for of_rank in parts for part in of_rank])


def whole_sequences(x_BL: Tensor, *, axis: Axis, positions: Sequence[Sequence[int]]) -> Tensor:
    """Gather the shards [B, L, ...] of all ranks of sp (`axis`) into whole sequences [B, S, ...]. `positions`: see `shards_of`."""
    x_GD = shards_of(axis, positions, batch=len(x_BL)).whole(x_BL.flatten(0, 1))
    return x_GD.view(len(x_BL), -1, *x_BL.shape[2:])
