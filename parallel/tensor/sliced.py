"""Megatron-LM's sequence parallelism: between layers, each rank of tp has a shard of every sequence, for norms and dropout too.

    1D       norm x, all tokens   --f--> products of a rank's heads --g--> y, all tokens, equal on every rank
    sliced   norm x, tokens of a shard --gather--> ............ --reduce-scatter--> y, tokens of the shard

    gather          forward: gather the shards of x       backward: sum gradients, keep this rank's shard        enter
    reduce-scatter  forward: sum, keep this rank's shard  backward: gather the shards of the gradient            leave

Cost: a reduce-scatter and a gather send as many bytes as 1D's all-reduce. Activations between layers, including norms and dropout, are
1/t. Each rank's norm sees other tokens, so its gradient is summed over tp.
Source: Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor.style import Shape


@dataclass(frozen=True)
class SlicedNorm:
    """A norm between layers, with other tokens on each rank. Fills the slot `columns` of its block, if it is in a block."""

    family: str = "dense"

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, family=self.family, alike=())

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for name in layouts:
            block = model.get_submodule(name.rsplit(".", 2)[0]) if name.count(".") > 1 else None
            if block is not None:
                block.columns = SliceColumns(mesh.axis("tp"))  # type: ignore[assignment]


class SliceColumns:
    """A function from the whole length L to this rank's columns of [B, L], as a slice."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, length: int) -> slice:
        each = length // self.axis.size
        return slice(self.axis.index * each, (self.axis.index + 1) * each)
