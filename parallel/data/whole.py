"""How a parameter's whole matrices lie on ranks, for an optimizer that needs whole ones (parallel/optim/shared.py).

    parts over the ranks that an engine cut it over    -->  a rank's part by its layout
    parts over the axes that its layout names          -->  whole matrices

What stacks matrices (experts) is never gathered along the stack: each of them is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import all_gather
from parallel.gradients import data_axis
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Cut:
    """A dim, counted from the end, of `size` elements, of which a rank of the axis holds `each`; the last may hold less."""

    dim: int
    each: int
    size: int
    axis: Axis

    def run(self, place: int) -> tuple[int, int]:
        """Where the part of a place of the axis begins, and how long it is."""
        first = min(place * self.each, self.size)
        return first, min(self.each, self.size - first)

    def part_shape(self, shape: tuple[int, ...], place: int) -> tuple[int, ...]:
        """Of a tensor that has this shape on another place."""
        dim = self.dim % len(shape)
        return *shape[:dim], self.run(place)[1], *shape[dim + 1 :]


@dataclass(frozen=True)
class Whole:
    """`cuts` in the order in which they are undone; `copies`: the ranks that hold the same parts, where there are several, and have
    summed their gradients."""

    cuts: tuple[Cut, ...]
    copies: Axis | None = None

    @staticmethod
    def of(layout: Layout, mesh: Mesh) -> Whole | None:
        """By its layout alone; None for what is no matrix, and where this rank alone holds it, whole."""
        if len(layout.shape) < 2:
            return None
        cuts = tuple(cut for dim in range(len(layout.shape) - 2, len(layout.shape)) for cut in _undone(layout, dim, mesh))
        copies = data_axis(layout, mesh)
        return Whole(cuts, copies if copies.size > 1 else None) if cuts or copies.size > 1 else None

    @torch.no_grad()
    def gathered(self, part: Tensor) -> Tensor:
        """Whole matrices, from every rank's part. Collective."""
        for cut in self.cuts:
            missing = cut.each - part.shape[cut.dim]
            part = F.pad(part, [0, 0] * (-1 - cut.dim) + [0, missing]) if missing else part
            part = all_gather(part.contiguous(), cut.axis, dim=part.ndim + cut.dim).narrow(cut.dim, 0, cut.size)
        return part


def _undone(layout: Layout, dim: int, mesh: Mesh) -> Iterator[Cut]:
    """The axis that cut last comes first: it made the smallest parts."""
    axes = [axis for axis in map(mesh.axis, layout.cut_by(dim)) if axis.size > 1]
    size = layout.shape[dim]
    sizes = []
    for axis in axes:
        sizes.append(size)
        size //= axis.size
    for axis, held in reversed(list(zip(axes, sizes, strict=True))):
        yield Cut(dim - len(layout.shape), held // axis.size, held, axis)
