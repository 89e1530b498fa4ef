"""Megatron-LM's sequence parallelism: between layers, each rank of tp has a shard of every sequence, for norms and dropout too.

    gather          forward: gather the shards of x       backward: sum gradients, keep this rank's shard        enter
    reduce-scatter  forward: sum, keep this rank's shard  backward: gather the shards of the gradient            leave

MoE layers route whole tokens. `Exchanged` exchanges shards of all sequences for some whole sequences, and back:

    x [B, L / t, D] or [B, L, D / t]     every rank has all sequences, with a shard of their positions or channels (`dim`)
    cut      [B / t, L, D]               all-to-all: every rank gets some whole sequences               join: the inverse
    whole    [B, L, D]                   all-gather: every rank gets all whole sequences                mine: keeps this rank's shard

Costs: docs/parallel/tensor_slices.md. Source: Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from parallel.mesh.collectives import all_gather, all_to_all
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor.style import Shape, Style

# B sequences, L length, D model, t ranks


@dataclass(frozen=True)
class SlicedNorm(Style):
    """A norm between layers, which sees different tokens on each rank. Fills the slot `columns` of its Transformer block, if any."""

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


class Exchanged:
    """The exchange over an axis of t ranks. `dim`: 1 for shards of the sequences, 2 for shards of the channels."""

    def __init__(self, axis: Axis, *, dim: int) -> None:
        self.axis, self.dim = axis, dim

    def cut(self, x_BLD: Tensor) -> Tensor:
        """Exchange shards of B sequences for B / t whole sequences. The axis must divide B."""
        each = [x_BLD.shape[0] // self.axis.size] * self.axis.size
        rows = all_to_all(x_BLD.contiguous(), self.axis, send=each, receive=each)
        return torch.cat(rows.chunk(self.axis.size), self.dim)

    def join(self, y_BLD: Tensor) -> Tensor:
        """Exchange whole sequences for shards: the inverse of `cut`."""
        each = [y_BLD.shape[0]] * self.axis.size
        rows = torch.cat(y_BLD.chunk(self.axis.size, self.dim))
        return all_to_all(rows, self.axis, send=each, receive=each)

    def whole(self, x_BLD: Tensor) -> Tensor:
        """Gather the B / t whole sequences of each rank to all B sequences on every rank."""
        return all_gather(x_BLD, self.axis, dim=self.dim)

    def mine(self, y_BLD: Tensor) -> Tensor:
        """Keep this rank's shard of a tensor that every rank has."""
        return y_BLD.chunk(self.axis.size, self.dim)[self.axis.index].contiguous()
