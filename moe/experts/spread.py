"""Divides a MoE layer's tokens among the tensor-parallel ranks (tp), so that only one of them routes each token, and joins the results.

A run is a contiguous chunk of tokens. The lengths of runs differ by at most one, so any number of tokens can be divided. There are three
ways to hold tokens outside of the layer (B sequences of L tokens, width D, t ranks of tp, q ranks of a grid's axis tp_col):

                a rank has, outside of the layer    cut: its tokens inside           join: back to the layout outside
    Copies      all tokens, [B L, D]                its run of the tokens            all-gather of the runs
    Columns     a run of each sequence, [B L / t,   the same tokens                  nothing
                D] (tensor.sequence_parallel)
    Exchanged   some channels of all tokens, on a   its run: all-to-all over tp_col  all-to-all back
                grid, [B L, D / q]                  (parallel/tensor/grid.py)

The experts' ranks (ep) can include the tp axis (MoE parallel folding, arXiv 2504.14960). A group is a set of tokens that share capacity or
a balance loss. If a group is on several ranks, these ranks exchange the group's chosen experts, logits or sums (moe/router/slices.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from moe.nn.context import Context
from moe.router.checks import group_size
from moe.router.slices import Shards, shards_of
from parallel.mesh.collectives import sum_over
from parallel.mesh.exchange import cut_runs, join_runs
from parallel.mesh.mesh import Axis

if TYPE_CHECKING:
    from moe.recipe.router_spec import RouterSpec

# B batch, L length, D model, T tokens of this rank, A = B*L tokens of all ranks of tp


class Exchange(Protocol):
    """`cut` selects this rank's tokens from the activations outside of the layer; `join` restores the layout outside. `total`: number of
    tokens of all ranks of tp."""

    def cut(self, x_AD: Tensor) -> Tensor: ...
    def join(self, y_TD: Tensor, *, total: int) -> Tensor: ...


@dataclass(frozen=True)
class Copies:
    axis: Axis

    def cut(self, x_AD: Tensor) -> Tensor:
        return cut_runs(x_AD, self.axis)

    def join(self, y_TD: Tensor, *, total: int) -> Tensor:
        return join_runs(y_TD, self.axis, total=total)


@dataclass(frozen=True)
class Columns:
    axis: Axis

    def cut(self, x_TD: Tensor) -> Tensor:
        return x_TD

    def join(self, y_TD: Tensor, *, total: int) -> Tensor:
        return y_TD


@dataclass(frozen=True)
class Groups:
    """Groups of a rank's tokens, as the router needs them. `sequence_tokens`: number of tokens of each sequence, over all ranks of
    `shards`; None: all tokens are one group. `shards`: the ranks that hold other tokens of these groups; None: this rank holds all.
    """

    sequence_tokens: int | None
    shards: Shards | None = None


class Spread:
    """Distribution of one MoE layer's tokens over ranks. `exchange`: how the ranks of tp (`axis`) divide the tokens. `sp`, `both`: the axes
    sp and sp * tp, whose ranks may each hold some tokens of a group. `positions`: for each rank of sp, the positions of its tokens in a
    sequence; None: every rank has all positions.
    """

    def __init__(self, axis: Axis, exchange: Exchange, spec: RouterSpec, *, sp: Axis, both: Axis) -> None:
        self.axis, self.exchange, self.spec, self.sp, self.both = axis, exchange, spec, sp, both
        self.by_columns = isinstance(exchange, Columns)
        self.positions: Sequence[Sequence[int]] | None = None
        self._shards: dict[tuple[int, int], Shards] = {}

    def groups(self, batch: int, length: int) -> Groups:
        """Return the groups of `batch` sequences. `length`: tokens of each sequence that this rank holds outside of the layer."""
        size = group_size(self.spec)
        each = size if size is not None else self.spec.group if isinstance(self.spec.group, int) else 1
        # True if each tp rank has the same number of whole groups (`each`: sequences of a group; 0: all sequences)
        apart = not self.by_columns and batch % (self.axis.size * (each or batch or 1)) == 0
        if size is None or (apart and self.sp.size == 1):
            return Groups(length if apart else None)
        ways, key = 1 if apart else self.axis.size, (batch, length)
        positions = self.positions or (range(length * (ways if self.by_columns else 1)),)
        if key not in self._shards:
            axis, here = (self.sp, batch // self.axis.size) if apart else (self.both, batch)
            self._shards[key] = shards_of(axis, positions, batch=here, ways=ways, by_columns=self.by_columns)
        return Groups(sum(map(len, positions)), self._shards[key])

    def mine(self, context: Context, batch: int) -> tuple[Context, float | Tensor]:
        """Return the context of this rank's tokens, and their share of the valid tokens of all ranks of tp."""
        axis = self.axis
        if axis.size == 1:
            return context, 1.0

        def own(x_A: Tensor) -> Tensor:
            if not self.by_columns:
                return x_A.tensor_split(axis.size)[axis.index]
            return x_A.view(batch, axis.size, len(x_A) // max(1, batch * axis.size))[:, axis.index].flatten()

        def together(layer: int, mine: Tensor) -> Tensor:
            name = f"layers.{layer}.sums over tp"
            return context.once(name, lambda: sum_over(mine.clone(), replace(axis, label=f"layers.{layer}.balance")))

        valid_T, position_T = context.valid_T, context.position_T
        share = (
            len(own(position_T)) / max(1, len(position_T)) if valid_T is None else own(valid_T).sum().double() / valid_T.sum().clamp(min=1)
        )
        return context.of_tokens(own, share=share, together=together), share
