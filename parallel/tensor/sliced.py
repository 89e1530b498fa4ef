"""Megatron-LM's sequence parallelism: between layers, each rank of tp has a shard of every sequence, also in norms and dropout.

                                            forward                                 backward
    before attention or MLP (`enter`)       gather the shards                       sum gradients over ranks, keep this rank's shard
    after it (`leave`)                      sum over ranks, keep this rank's shard  gather the gradient's shards

An MoE layer needs neither: it routes each rank's own tokens (moe/experts/spread.py).

Costs: docs/parallel/tensor_slices.md. Source: Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import nn

from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor.style import Shape, Style


@dataclass(frozen=True)
class SlicedNorm(Style):
    """Style of a norm with an input that is split over tp by positions. If the norm is inside a Transformer block, also sets
    the block's function `columns`, which returns the positions that this rank holds."""

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, alike=())

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for name in layouts:
            if name.count(".") > 1:
                columns = partial(own_columns, axis=mesh.axis("tp"))
                model.get_submodule(name.rsplit(".", 2)[0]).columns = columns  # type: ignore[assignment]


def own_columns(length: int, *, axis: Axis) -> slice:
    """Return the slice of the positions 0 to length - 1 that this rank holds."""
    each = length // axis.size
    return slice(axis.index * each, (axis.index + 1) * each)
