"""1D tensor parallelism by torch's DTensor: the layouts of linear_1d.py, but torch derives the communication from placements.
`sliced`: with sequence parallelism between layers.

    x  Replicate, or sliced: Shard(1) --> Replicate                                                 layer.enter
    W1 Shard(0)                       x W1   Shard(-1), then local for attention and activation     module.product
    W2 Shard(1)                       h W2   Partial: not yet summed over ranks                     module.product
    y                                 Partial --> Replicate, or sliced: Shard(1)                    layer.leave

Parameters stay plain local tensors, as engines and checkpoints need them, and become DTensors at each use. (torch's
`parallelize_module` makes parameters DTensors.) The project's counters of communication do not see these collectives; torch's CommDebugMode
does. Embedding, head and loss are in vocabulary.py, norms in sliced.py. Costs: docs/parallel/tensor_dtensor.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh
from parallel.tensor.linear_1d import Column, Row, layers_of
from parallel.tensor.style import Shape, Style

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


@dataclass(frozen=True)
class DTensorColumn(Style):
    """Splits a product's outputs over tp: Shard(0) of a weight [out, in]. Fills two slots (replaceable functions, style.py): `product` of
    the weight's module, and `enter` of its layer. sliced: with sequence parallelism between layers (sliced.py)."""

    sliced: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        return Column().layout(name, shape)

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        ranks = Ranks(mesh.axis("tp"))
        for path in layers_of(layouts):
            layer = model.get_submodule(path)
            layer.enter = partial(enter, ranks=ranks, sliced=self.sliced)  # type: ignore[assignment]
            if hasattr(layer, "for_heads"):
                layer.for_heads = for_heads  # type: ignore[assignment]
        for name in layouts:
            model.get_submodule(name.rpartition(".")[0]).product = partial(column_products, ranks=ranks)  # type: ignore[assignment]


@dataclass(frozen=True)
class DTensorRow(Style):
    """Splits a product's inputs over tp: Shard(1) of a weight [out, in]. Fills two slots (replaceable functions, style.py): `product` of
    the weight's module, and `leave` of its layer. sliced: with sequence parallelism between layers (sliced.py)."""

    sliced: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        return Row().layout(name, shape)

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        ranks = Ranks(mesh.axis("tp"))
        for path in layers_of(layouts):
            model.get_submodule(path).leave = partial(leave, ranks=ranks, sliced=self.sliced)  # type: ignore[assignment]
        for name in layouts:
            model.get_submodule(name.rpartition(".")[0]).product = partial(row_products, ranks=ranks)  # type: ignore[assignment]


class Ranks:
    """An axis as torch's DeviceMesh, made at its first use, because layers are split before process groups exist."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._meshes: dict[str, DeviceMesh] = {}  # device type -> mesh

    def placed(self, local: Tensor, placement: Placement) -> DTensor:
        """Return the DTensor made of each rank's `local`: shards or copies, as `placement` says. torch chooses the gradient's placement."""
        from torch.distributed.tensor import DTensor  # not at the top: the import takes a second

        return DTensor.from_local(local, self._device_mesh(local.device.type), [placement], run_check=False)

    def _device_mesh(self, kind: str) -> DeviceMesh:
        if kind not in self._meshes:
            self._meshes[kind] = DeviceMesh.from_group(self.axis.group, kind)
        return self._meshes[kind]


def enter(x_BLD: Tensor, *, ranks: Ranks, sliced: bool) -> Tensor:
    """Return the layer's input x as a DTensor with all values on each rank. Backward: sum partial gradients; if `sliced`, keep a shard."""
    from torch.distributed.tensor import Replicate, Shard

    if not sliced:
        return ranks.placed(x_BLD, Replicate())
    return ranks.placed(x_BLD, Shard(1)).redistribute(placements=[Replicate()])


def for_heads(x: Tensor) -> Tensor:
    """Return a DTensor from `enter`, or a part of it, as a plain tensor that each rank uses for its heads. Backward: gradients are partial
    sums."""
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(x, DTensor)
    return x.to_local(grad_placements=[Partial()])


def column_products(x: Tensor, weights_OI: Sequence[Tensor], narrow_rI: Sequence[Tensor], *, ranks: Ranks) -> list[Tensor]:
    """Return, as plain tensors, this rank's outputs of x W^T for each W, then x A^T for each of LoRA's narrow matrices A, of which each
    rank holds all. x is a DTensor from `enter`."""
    from torch.distributed.tensor import DTensor, Partial, Shard

    assert isinstance(x, DTensor)
    found = [F.linear(x, ranks.placed(weight_OI.to(x.dtype), Shard(0))) for weight_OI in weights_OI]
    local = [y.to_local(grad_placements=[Shard(y.ndim - 1)]) for y in found if isinstance(y, DTensor)]
    return local + [F.linear(x.to_local(grad_placements=[Partial()]), a.to(x.dtype)) for a in narrow_rI]


def row_products(h: Tensor, weights_OI: Sequence[Tensor], narrow_rI: Sequence[Tensor], *, ranks: Ranks) -> list[Tensor]:
    """Return this rank's partial sums of h W^T for each W, as DTensors, which `leave` adds over ranks. With LoRA's narrow matrices A,
    return plain tensors instead: h W^T for each W, then h A^T for each A. LoRA's terms are added to the h W^T before `leave`."""
    from torch.distributed.tensor import Shard

    if narrow_rI:
        return [F.linear(h, matrix.to(h.dtype)) for matrix in (*weights_OI, *narrow_rI)]
    return [F.linear(ranks.placed(h, Shard(h.ndim - 1)), ranks.placed(weight_OI.to(h.dtype), Shard(1))) for weight_OI in weights_OI]


def leave(y_BLD: Tensor, *, ranks: Ranks, sliced: bool) -> Tensor:
    """Return the sum over ranks of the layer's output, as a plain tensor; if `sliced`, this rank's shard of it. Backward: gather the
    gradient if `sliced`; otherwise every rank has it."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    partial_sums = y_BLD if isinstance(y_BLD, DTensor) else ranks.placed(y_BLD, Partial())
    placement = Shard(1) if sliced else Replicate()
    return partial_sums.redistribute(placements=[placement]).to_local(grad_placements=[placement])
