"""Parts of all sequences against whole sequences of some: how ranks that hold each token in parts come to whole ones, and back.

x [B, L / t, D] or [B, L, D / t]     every rank: all sequences, of each a slice of its places, or of its channels (`dim`)
cut      [B / t, L, D]               by all-to-all: every rank some sequences, whole                join: the way back
whole    [B, L, D]                   by a gather: every rank all of them                            mine: this rank's part again
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.collectives import all_gather, all_to_all
from parallel.mesh import Axis

# B sequences, L length, D model


class Exchanged:
    """`dim`: 1, slices of the sequences; 2, channels."""

    def __init__(self, axis: Axis, *, dim: int) -> None:
        self.axis, self.dim = axis, dim

    def cut(self, x_BLD: Tensor) -> Tensor:
        """The parts of every rank's to whole sequences of each; the axis must divide B."""
        each = [x_BLD.shape[0] // self.axis.size] * self.axis.size
        rows = all_to_all(x_BLD.contiguous(), self.axis, send=each, receive=each)
        return torch.cat(rows.chunk(self.axis.size), self.dim)

    def join(self, y_BLD: Tensor) -> Tensor:
        """The way back."""
        each = [y_BLD.shape[0]] * self.axis.size
        rows = torch.cat(y_BLD.chunk(self.axis.size, self.dim))
        return all_to_all(rows, self.axis, send=each, receive=each)

    def whole(self, x_BLD: Tensor) -> Tensor:
        """All parts of all sequences, on every rank."""
        return all_gather(x_BLD, self.axis, dim=self.dim)

    def mine(self, y_BLD: Tensor) -> Tensor:
        """This rank's part of what every rank has."""
        return y_BLD.chunk(self.axis.size, self.dim)[self.axis.index].contiguous()
