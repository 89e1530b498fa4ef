"""1D tensor parallelism: a layer's two products are split so that nothing is sent between them.

            x, the same on all ranks        f: identity forward, sum of gradients backward        layer.products
          /                          \\
      x W1_0                        x W1_1      Column   W1 [hidden, in], split along dim 0: each rank has some hidden units, or heads
    activation                    activation             (attention works within a head, an activation within a unit)
      h_0 W2_0                      h_1 W2_1    Row      W2 [out, hidden], split along dim 1: partial sums of every output
          \\                          /
            y = sum of partial sums         g: sum forward, identity backward                     layer.leave

With fewer key-value heads than the t ranks of tp, t / heads adjacent ranks hold copies of the same head (`Column("tp_row_heads")`, with
a mesh whose tp_row_copies is t / heads). Each copy serves different query heads, so the gradients are summed over the copies.
Costs: docs/parallel/tensor_1d.md. Source: Megatron-LM (arXiv 1909.08053), section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from parallel.data.tiling import by, without_tiles
from parallel.mesh.collectives import all_gather, all_reduce, reduce_backward, reduce_scatter
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh, view_of
from parallel.tensor.overlapped import column_products, row_product
from parallel.tensor.style import Shape, Style, low_rank


@dataclass(frozen=True)
class Column(Style):
    """Splits a product's outputs over an axis: dim 0 of a weight [out, in].

    Fills the slot `products` of the layer (a replaceable function, style.py). Fills the slot `enter` of a layer that
    lacks `products`, such as a sum of tiles (parallel/data/tiling.py): the gradient of x is then summed over ranks once for all tiles.
    sliced: with sequence parallelism between layers (sliced.py). chunks: largest number of chunks into which products are cut, so that the
    collective of one chunk overlaps with the products of the next (overlapped.py)."""

    axis: str = "tp"
    sliced: bool = False
    chunks: int = 1

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {0: self.axis}, view_of(self.axis), alike=())

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for path in layers_of(layouts):
            axis, layer = mesh.axis("tp", label=path), model.get_submodule(path)
            if hasattr(layer, "products"):
                layer.products = partial(_products_of, axis=axis, chunks=self.chunks, sliced=self.sliced)  # type: ignore[assignment]
            else:
                enter = partial(all_gather, axis=axis, dim=1) if self.sliced else partial(reduce_backward, axis=axis)
                layer.enter = enter  # type: ignore[assignment]


@dataclass(frozen=True)
class Row(Style):
    """Splits a product's inputs over tp: dim 1 of a weight [out, in]. Fills the slot `leave` of the layer (a replaceable function,
    style.py). With `chunks` above 1, fills `product` of the module instead, so that the first chunk is summed over ranks
    while the next is computed (overlapped.py).
    sliced, chunks: as in Column."""

    sliced: bool = False
    chunks: int = 1

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {1: "tp"}, alike=())

    def low_rank(self, half: str, shape: Shape) -> Layout:
        found = low_rank(self.layout("", shape), half, shape)
        # in chunks, LoRA's x A^T is summed over ranks before it is multiplied by B^T, so all ranks compute the same gradient of B
        return replace(found, alike=("tp",)) if half == "b" and self.chunks > 1 and not self.sliced else found

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        if self.chunks > 1:
            return self._overlap(model, layouts, mesh)
        for path in layers_of(layouts):
            axis = mesh.axis("tp", label=path)
            leave = partial(reduce_scatter, axis=axis, dim=1) if self.sliced else partial(all_reduce, axis=axis)
            model.get_submodule(path).leave = leave  # type: ignore[assignment]

    def _overlap(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for name in layouts:
            assert without_tiles(name) == name, f"{name} is a tile: only the sum of all tiles is summed over ranks"
            axis = mesh.axis("tp", label=name.rsplit(".", 2)[0])
            product = partial(_row_products, axis=axis, chunks=self.chunks, sliced=self.sliced)
            model.get_submodule(name.rpartition(".")[0]).product = product  # type: ignore[assignment]


def _products_of(x: Tensor, modules: Sequence[Any], *, axis: Axis, chunks: int, sliced: bool) -> Sequence[Tensor]:
    return by(partial(column_products, axis=axis, chunks=chunks, sliced=sliced, recast=modules[0].recast), x, modules)


def _row_products(h: Tensor, weights: Sequence[Tensor], narrow: Sequence[Tensor], **how: Any) -> Sequence[Tensor]:
    return [row_product(h, matrix, **how) for matrix in (*weights, *narrow)]


def layers_of(layouts: Layouts) -> list[str]:
    """Return the paths of the layers that hold these weights: `layers.0.ffn` for `layers.0.ffn.tiles.1.w1.weight`."""
    return list(dict.fromkeys(without_tiles(name).rsplit(".", 2)[0] for name in layouts))
