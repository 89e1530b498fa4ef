"""Exchange of shards of all sequences for some whole sequences, and back, for MoE layers, which route whole tokens.

x [B, L / t, D] or [B, L, D / t]     every rank has all sequences, with a shard of their positions or channels (`dim`)
cut      [B / t, L, D]               all-to-all: every rank gets some whole sequences               join: the inverse
whole    [B, L, D]                   all-gather: every rank gets all whole sequences                mine: keeps this rank's shard
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.mesh.collectives import all_gather, all_to_all
from parallel.mesh.mesh import Axis

# B sequences, L length, D model


class Exchanged:
    """The exchange over an axis. `dim`: 1 for shards of the sequences, 2 for shards of the channels."""

    def __init__(self, axis: Axis, *, dim: int) -> None:
        self.axis, self.dim = axis, dim

    def cut(self, x_BLD: Tensor) -> Tensor:
        """Exchange shards for whole sequences [B / t, L, D]. The axis must divide B."""
        each = [x_BLD.shape[0] // self.axis.size] * self.axis.size
        rows = all_to_all(x_BLD.contiguous(), self.axis, send=each, receive=each)
        return torch.cat(rows.chunk(self.axis.size), self.dim)

    def join(self, y_BLD: Tensor) -> Tensor:
        """Exchange whole sequences for shards: the inverse of `cut`."""
        each = [y_BLD.shape[0]] * self.axis.size
        rows = torch.cat(y_BLD.chunk(self.axis.size, self.dim))
        return all_to_all(rows, self.axis, send=each, receive=each)

    def whole(self, x_BLD: Tensor) -> Tensor:
        """Gather all whole sequences on every rank."""
        return all_gather(x_BLD, self.axis, dim=self.dim)

    def mine(self, y_BLD: Tensor) -> Tensor:
        """Keep this rank's shard of a tensor that every rank has."""
        return y_BLD.chunk(self.axis.size, self.dim)[self.axis.index].contiguous()
