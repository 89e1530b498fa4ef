"""Describes how to gather a parameter's whole matrices from ranks, for optimizers that need them (parallel/optim/shared.py).

    FSDP's shards, over data-parallel ranks            -->  the rank's tensor- or expert-parallel shard
    tensor-parallel shards, over the layout's axes     -->  whole matrices

Stacks of experts are never gathered along the stack, because each expert is a separate matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.mesh.collectives import all_gather
from parallel.mesh.gradients import data_axis
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh


@dataclass(frozen=True)
class Cut:
    """Sharding of one dim over an axis. dim: negative, counted from the end. each: length of a rank's shard; the last
    ranks may have less. size: length of the dim once it is gathered over the axis."""

    dim: int
    each: int
    size: int
    axis: Axis

    def run(self, place: int) -> tuple[int, int]:
        """Return (first index along the dim, length) of the shard of the rank with index `place` on the axis."""
        first = min(place * self.each, self.size)
        return first, min(self.each, self.size - first)

    def part_shape(self, shape: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Return the shape of the shard of the rank with index `place` on the axis. `shape`: of any rank's shard; only its length
        along `dim` is replaced."""
        dim = self.dim % len(shape)
        return *shape[:dim], self.run(place)[1], *shape[dim + 1 :]


@dataclass(frozen=True)
class Whole:
    """Describes how to gather whole matrices from shards. cuts: in the order in which they are undone, the cut with the smallest shards
    first. copies: the axis of the ranks that hold equal shards and equal summed gradients; None for a single rank."""

    cuts: tuple[Cut, ...]
    copies: Axis | None = None

    @staticmethod
    def of(layout: Layout, mesh: Mesh) -> Whole | None:
        """Return how to undo a layout's cuts of a matrix or vector; None if no other rank has a shard or copy of it."""
        num_dims = len(layout.shape)
        cuts = tuple(cut for dim in range(max(0, num_dims - 2), num_dims) for cut in _cuts_of_dim(layout, dim, mesh))
        copies = data_axis(layout, mesh)
        return Whole(cuts, copies if copies.size > 1 else None) if cuts or copies.size > 1 else None

    @torch.no_grad()
    def gathered(self, part: Tensor) -> Tensor:
        """Return the whole matrices. part: this rank's shard. Collective."""
        for cut in self.cuts:
            missing = cut.each - part.shape[cut.dim]
            part = F.pad(part, [0, 0] * (-1 - cut.dim) + [0, missing]) if missing else part
            part = all_gather(part.contiguous(), cut.axis, dim=part.ndim + cut.dim).narrow(cut.dim, 0, cut.size)
        return part


def _cuts_of_dim(layout: Layout, dim: int, mesh: Mesh) -> list[Cut]:
    """Return how the layout's axes cut this dim of a parameter, the finest cut (with the smallest shards) first."""
    size, cuts = layout.shape[dim], list[Cut]()
    for axis in map(mesh.axis, layout.cut_by(dim)):
        if axis.size > 1:
            cuts.append(Cut(dim - len(layout.shape), size // axis.size, size, axis))
            size //= axis.size
    return cuts[::-1]
