"""Groups whose tokens lie on several ranks: each rank decides over the whole group, from everybody's scores.

    sp 0: tokens 0 .. 5     scores [6, E]   \\                       the same decision on both ranks, of which each
    sp 1: tokens 6 .. 11    scores [6, E]   /   all-gather: [12, E]  goes on with its own tokens

Who is dropped on one rank depends on who asked on the others (capacity, expert choice), and a balance loss per sequence counts all
of it. What travels are fp32 scores, 4 E bytes a token and not the 2 D of its activations; the choice itself costs each rank as much as
one rank alone would have. Tokens are put in the order of their places, so the same ones are dropped as on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from moe.nn.context import Context
from parallel.collectives import all_gather
from parallel.mesh import Axis

# T tokens held here, B sequences of L of them; G = N T those of all ranks

Made = TypeVar("Made", bound=Any)  # a dataclass of tensors by token, and of what is the same for all


@dataclass(frozen=True)
class Slices:
    """`places`: of each rank of the axis, where its tokens stand in a sequence, ascending."""

    axis: Axis
    places: Sequence[Sequence[int]]

    def whole(self, x_T: Tensor) -> Tensor:
        """[T, ...] of this rank's tokens -> [G, ...] of all, sequence after sequence; backward: the sum over ranks for one's own."""
        x_BL = rearrange(x_T, "(b l) ... -> b l ...", l=len(self.places[self.axis.index]))
        return rearrange(self.whole_sequences(x_BL), "b s ... -> (b s) ...")

    def whole_sequences(self, x_BL: Tensor) -> Tensor:
        """[B, L, ...] of this rank's places -> [B, N L, ...] of all."""
        return all_gather(x_BL, self.axis, dim=1)[:, self._sorted.to(x_BL.device)]

    def mine(self, x_G: Tensor) -> Tensor:
        """The other way, without a collective."""
        x_BS = rearrange(x_G, "(b s) ... -> b s ...", s=len(self._sorted))
        return rearrange(x_BS[:, self._held.to(x_G.device)], "b l ... -> (b l) ...")

    def context(self, context: Context) -> Context:
        """What is known of all tokens."""
        valid_T, tokens_T = (None if x is None else self.whole(x) for x in (context.valid_T, context.tokens_T))
        return replace(context, position_T=self.whole(context.position_T), valid_T=valid_T, tokens_T=tokens_T)

    def each_mine(self, made: Made) -> Made:
        """A dataclass whose tensors are of all tokens, for this rank's alone."""
        return self._mapped(made, self.mine)

    def each_whole(self, made: Made) -> Made:
        """And the other way. Collective."""
        return self._mapped(made, self.whole)

    def _mapped(self, made: Made, change: Any) -> Made:
        changed: dict[str, Any] = {}
        for f in fields(made):
            value = getattr(made, f.name)
            if isinstance(value, Tensor):
                changed[f.name] = change(value)
            elif is_dataclass(value):
                changed[f.name] = self._mapped(value, change)
        return replace(made, **changed)

    @cached_property
    def _held(self) -> Tensor:
        """This rank's places."""
        return torch.tensor(self.places[self.axis.index])

    @cached_property
    def _sorted(self) -> Tensor:
        """Of the ranks' tokens one after another, which one stands at each place."""
        return torch.tensor([place for held in self.places for place in held]).argsort()
