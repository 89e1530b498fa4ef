"""3D tensor parallelism: a cube of q x q x q ranks. A rank holds 1/q^3 of every tensor, without copies.

    rank (i, j, k)       x   sequences over i, then j; channels over k            between layers: input of a first product
                         y   sequences over i, then k; channels over j            output of a first product: j and k exchanged
                         W   first: inputs over k, then i; outputs over j     second (a layer's last): inputs over j; outputs over k, then i

    forward     gather x over j | gather W over i | multiply | sum over k, keep this rank's sequences
    backward    gather dy over k | gather W over i | multiply | sum dx over j          gather x over j | multiply | sum dW over i

In a second product, j and k are exchanged, so its output is split like x. Gathered tensors are freed after the product and gathered again
in the backward pass. Several products of one x (q, k and v) are computed as one, so x is gathered once.
Costs: docs/parallel/tensor_3d.md. Source: 3D parallelism (arXiv 2105.14450).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.mesh.collectives import gathered, scattered_sum
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh, view_of
from parallel.numerics.weight_gradient import gradient_of, gradients_of_trained
from parallel.tensor.grid import apart, fill_products, together
from parallel.tensor.style import Shape, Style

# i, j, k: indices on tp_depth, tp_row and tp_col. I, O: a rank's numbers of inputs and outputs once its weight is gathered over tp_depth

# place of a product in its layer -> (axis to gather x, axis to sum and scatter y, dim of the weight [out, in] that tp_depth also cuts)
FACES = {"first": ("tp_row", "tp_col", 1), "second": ("tp_col", "tp_row", 0)}


@dataclass(frozen=True)
class Cube(Style):
    """Sharding of a weight [out, in] over the cube. place: "second" for the last product of a layer, else "first". copied: whether the
    outputs are keys or values. If they have fewer heads than tp_row has ranks, neighbors along tp_row hold the same outputs. Apart from
    this, each rank holds a different part. `fill` replaces the function with which a module multiplies by its weight (attribute `product`)
    and, if place is "first", the function with which a layer multiplies one x by several weights (attribute `products`)."""

    place: Literal["first", "second"]
    copied: bool = False

    def layout(self, name: str, shape: Shape) -> Layout:
        outputs, inputs, deep = FACES[self.place]
        outputs = f"{outputs}_heads" if self.copied else outputs
        split: dict[int, str | tuple[str, ...]] = {0: outputs, 1: inputs}
        return Layout(shape, split | {deep: ((outputs, inputs)[deep], "tp_depth")}, view_of(outputs, inputs), alike=())

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for name in layouts:
            fill_products(model, name.rpartition(".")[0], partial(products_of, mesh, self.place), of_layer=self.place == "first")


def products_of(mesh: Mesh, place: str, label: str) -> partial[Sequence[Tensor]]:
    """Return `products` as a function of x and the weights, for this rank's axes of the cube. place: "first" or "second", see FACES. label:
    for error messages."""
    *faces, deep = FACES[place]
    into, out, depth = (mesh.axis(str(axis), label=label) for axis in (*faces, "tp_depth"))
    return partial(products, into=into, out=out, depth=depth, deep=deep)


def products(
    x: Tensor, weights_OI: Sequence[Tensor], narrow_rI: Sequence[Tensor] = (), *, into: Axis, out: Axis, depth: Axis, deep: int
) -> Sequence[Tensor]:
    """Return x W^T for each W, then x A^T for each A of `narrow_rI` (LoRA's A), all in x's dtype. x [B, ..., channels], W [O, I] and A are
    this rank's shards, of any dtype. A is cut along its inputs over `out`, as W is, but not over `depth`.
    `into`: axis over which the sequences of x are gathered before all products. `out`: axis over which each product is summed, and its
    sequences scattered. So a rank's results have other sequences than its x. `depth`: axis over which dim `deep` of W is gathered."""
    found: tuple[Tensor, ...] = _Products.apply(x, into, out, depth, deep, len(weights_OI), *weights_OI, *narrow_rI)
    return found


class _Products(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Axis, out: Axis, depth: Axis, deep: int, wide: int, *weights_OI: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[6:]) else None, *weights_OI)
        ctx.weights, ctx.axes, ctx.deep, ctx.wide = weights_OI, (into, out, depth), deep, wide
        # a second product (deep = 0) gathers W along outputs. It has only one W: the outputs of several would be interleaved
        ctx.sizes = [len(weight) * (depth.size if deep == 0 and i < wide else 1) for i, weight in enumerate(weights_OI)]
        return apart(scattered_sum(F.linear(gathered(x, into), _matrix(ctx, weights_OI, x.dtype)), out), ctx.sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights_OI = ctx.saved_tensors
        into, out, depth = (axis.backward() for axis in ctx.axes)
        weights, deep, wide, sizes, whole_grad = ctx.weights, ctx.deep, ctx.wide, ctx.sizes, gathered(together(grads, dim=-1), out)
        grad_x = scattered_sum(whole_grad @ _matrix(ctx, weights_OI, grads[0].dtype), into) if ctx.needs_input_grad[0] else None

        def of_weights(which: Sequence[int]) -> Sequence[Tensor]:
            mine = whole_grad if len(which) == len(sizes) else together([whole_grad.split(sizes, -1)[i] for i in which], dim=-1)
            found = gradient_of(weights[which[0]], mine, gathered(x, into))
            return torch.split(scattered_sum(found, depth, dim=deep) if which[0] < wide else found, [len(weights[i]) for i in which])

        return grad_x, None, None, None, None, None, *gradients_of_trained(weights, of_weights, wide=wide)


def _matrix(ctx: Any, weights_OI: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return one matrix in `dtype`: first the rows of each W, gathered over depth, then the rows of each A (LoRA), which is not split over
    depth."""
    wide, narrow = weights_OI[: ctx.wide], weights_OI[ctx.wide :]
    return together([gathered(together(wide, dtype=dtype), ctx.axes[2], dim=ctx.deep), *narrow], dtype=dtype)
