"""Megatron-LM's sequence parallelism: between layers each rank of tp has a slice of every sequence, and norms and dropout work on that.

    1D       norm x, all tokens   --f--> products of a rank's heads --g--> y, all tokens, on every rank the same
    sliced   norm x, tokens of a slice --gather--> ............ --reduce-scatter--> y, tokens of the slice

    gather          forward: all slices of x       backward: sum of the gradients, and of it this rank's slice        enter
    reduce-scatter  forward: sum, this rank's slice       backward: all slices of the gradient                        leave

Cost: an all-reduce is a reduce-scatter and a gather, so the bytes are those of 1D; activations between layers, norms' and
dropout's among them, are 1/t. A norm has seen other tokens on each rank: its gradient is summed over tp.
Source: Korthikanti et al. (arXiv 2205.05198), section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from parallel.layout import Layout, dense
from parallel.mesh import Axis, Mesh
from parallel.tensor.style import Shape


@dataclass(frozen=True)
class Sliced:
    """A norm of what lies between layers, on each rank of other tokens. Fills the slot `places` of the block that has it, if any."""

    family: str = "dense"

    def layout(self, name: str, shape: Shape) -> Layout:
        return dense(shape, self.family, alike=())

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for name in layouts:
            block = model.get_submodule(name.rsplit(".", 2)[0]) if name.count(".") > 1 else None
            if block is not None:
                block.places = SlicePlaces(mesh.axis("tp"))  # type: ignore[assignment]


class SlicePlaces:
    """Which columns of [B, whole length] this rank has."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def __call__(self, length: int) -> slice:
        each = length // self.axis.size
        return slice(self.axis.index * each, (self.axis.index + 1) * each)
