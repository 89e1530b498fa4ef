"""A parameter's matrices put together from what ranks hold of them, for an optimizer that needs whole ones, and cut again.

    parts over the ranks that an engine cut it over    --all-gather-->  a rank's part by its layout
    parts over the axes that its layout names          --all-gather-->  whole matrices           .part_of(whole): back

What stacks matrices (experts) is never gathered along the stack: each of them is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.collectives import all_gather
from parallel.layout import Layout
from parallel.mesh import Axis, Mesh


@dataclass(frozen=True)
class Cut:
    """A dim, counted from the end, of `size` elements, of which a rank of the axis holds `each`; the last may hold less."""

    dim: int
    each: int
    size: int
    axis: Axis


@dataclass(frozen=True)
class Whole:
    """`cuts` in the order in which they are undone."""

    cuts: tuple[Cut, ...]

    @staticmethod
    def of(layout: Layout, mesh: Mesh) -> Whole | None:
        """By its layout alone; None where a rank holds whole matrices."""
        cuts = tuple(cut for dim in range(max(0, len(layout.shape) - 2), len(layout.shape)) for cut in _undone(layout, dim, mesh))
        return Whole(cuts) if cuts and len(layout.shape) > 1 else None

    @torch.no_grad()
    def gathered(self, part: Tensor) -> Tensor:
        """Whole matrices, from every rank's part. Collective."""
        for cut in self.cuts:
            missing = cut.each - part.shape[cut.dim]
            part = F.pad(part, [0, 0] * (-1 - cut.dim) + [0, missing]) if missing else part
            part = all_gather(part.contiguous(), cut.axis, dim=part.ndim + cut.dim).narrow(cut.dim, 0, cut.size)
        return part

    def part_of(self, whole: Tensor) -> Tensor:
        """What this rank holds of whole matrices."""
        for cut in reversed(self.cuts):
            first = min(cut.axis.index * cut.each, cut.size)
            whole = whole.narrow(cut.dim, first, min(cut.each, cut.size - first))
        return whole


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
