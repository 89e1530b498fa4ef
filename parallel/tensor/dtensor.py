"""1D tensor parallelism by torch's DTensor: the weights of linear_1d.py, and torch decides what travels from how tensors are placed.

    x  Replicate, or slices Shard(1)  --> Replicate                                                 layer.enter
    W1 Shard(0)                       x W1   Shard(-1), local again for attention and activation    module.product
    W2 Shard(1)                       h W2   Partial: sums of shares are due                        module.product
    y                                 Partial --> Replicate, or slices Shard(1)                     layer.leave

That is what ColwiseParallel, RowwiseParallel and PrepareModuleInput of torch's `parallelize_module` do at the edges of modules. They
take torch's own linears and make parameters DTensors; here parameters stay plain local tensors, as engines and checkpoints have them,
and are placed where they are used. Embedding, head and loss are those of 1D (parallel/tensor/vocabulary.py), norms those of sliced.py.

Cost: the sums of linear_1d.py, or the gathers and reduce-scatters of sliced.py, whose sums of the backward pass are then in the compute
dtype too; and torch's own time for each operation. The project's counts do not see them: torch's CommDebugMode does.
Sources: torch.distributed.tensor; Megatron-LM (arXiv 1909.08053), section 3; Korthikanti et al. (arXiv 2205.05198).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.layout import Layout
from parallel.mesh import Axis, Mesh
from parallel.tensor.linear_1d import Column, Row, layers_of
from parallel.tensor.style import Shape

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class DTensorColumn:
    """Outputs of a product over tp: Shard(0) of a weight [out, in]. Fills `product` of the module, and `enter` of its layer.

    `dim` 1: of a table by heads, which no product takes and whose layer alone has a slot.
    """

    dim: int = 0
    sliced: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        return Column(dim=self.dim).layout(name, shape)

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        ranks = Ranks(mesh.axis("tp"))
        for path in layers_of(layouts):
            model.get_submodule(path).enter = partial(enter, ranks=ranks, sliced=self.sliced)  # type: ignore[assignment]
        for name in layouts if self.dim == 0 else ():
            model.get_submodule(name.rpartition(".")[0]).product = partial(column_product, ranks=ranks)  # type: ignore[assignment]


@dataclass(frozen=True)
class DTensorRow:
    """Inputs of a product over tp: Shard(1) of a weight [out, in]. Fills `product` of the module, and `leave` of its layer."""

    sliced: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        return Row().layout(name, shape)

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        ranks = Ranks(mesh.axis("tp"))
        for path in layers_of(layouts):
            model.get_submodule(path).leave = partial(leave, sliced=self.sliced)  # type: ignore[assignment]
        for name in layouts:
            model.get_submodule(name.rpartition(".")[0]).product = partial(row_product, ranks=ranks)  # type: ignore[assignment]


class Ranks:
    """An axis as torch's DeviceMesh, which is made when a tensor is first placed: a plan is laid out without process groups."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._meshes: dict[str, DeviceMesh] = {}  # by type of device: one

    def placed(self, local: Tensor, placement: Placement) -> DTensor:
        """What each rank has as one tensor of them all; its gradient, if any, is placed as torch chooses for this placement."""
        from torch.distributed.tensor import DTensor  # here, because it takes a second to import

        return DTensor.from_local(local, self._device_mesh(local.device.type), [placement], run_check=False)

    def _device_mesh(self, kind: str) -> DeviceMesh:
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(self.axis.group, kind)
        return self._meshes[kind]


def enter(x_BLD: Tensor, *, ranks: Ranks, sliced: bool) -> Tensor:
    """x on all ranks, as a DTensor. Backward: the products' shares of its gradient become one sum, or of it this rank's slice."""
    from torch.distributed.tensor import Replicate, Shard

    if not sliced:
        return ranks.placed(x_BLD, Replicate())
    return ranks.placed(x_BLD, Shard(1)).redistribute(placements=[Replicate()])


def column_product(x: Tensor, weight_OI: Tensor, *, ranks: Ranks) -> Tensor:
    """x W^T of this rank's outputs, a plain tensor, of x as `enter` gives it."""
    from torch.distributed.tensor import DTensor, Shard

    y = F.linear(x, ranks.placed(weight_OI.to(x.dtype), Shard(0)))
    assert isinstance(y, DTensor)
    return y.to_local(grad_placements=[Shard(y.ndim - 1)])


def row_product(h: Tensor, weight_OI: Tensor, *, ranks: Ranks) -> Tensor:
    """h W^T of this rank's inputs, a DTensor of shares, for `leave`."""
    from torch.distributed.tensor import Shard

    return F.linear(ranks.placed(h, Shard(h.ndim - 1)), ranks.placed(weight_OI.to(h.dtype), Shard(1)))


def leave(y_BLD: Tensor, *, sliced: bool) -> Tensor:
    """The sum of the ranks' shares, or of it this rank's slice, a plain tensor. Backward: all ranks have the whole gradient."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    assert isinstance(y_BLD, DTensor)
    placement = Shard(1) if sliced else Replicate()
    return y_BLD.redistribute(placements=[placement]).to_local(grad_placements=[placement])
