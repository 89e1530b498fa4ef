"""3D tensor parallelism: a cube of q x q x q ranks, and of every tensor a rank holds 1/q^3 and nothing twice.

    rank (i, j, k)       x   sequences over i, then j; channels over k            between layers, and what a first product takes
                         y   sequences over i, then k; channels over j            what it gives: j and k have changed places
                         W   first: inputs over k, then i; outputs over j         second: inputs over j; outputs over k, then i

    forward     gather x over j | gather W over i | multiply | sum over k, of the sequences those that are this rank's
    backward    gather dy over k | gather W over i | multiply | sum dx over j          gather x over j | multiply | sum dW over i

A second product (a layer's last one) has j and k the other way round, so it gives what lies as x did. What is gathered for a product is
freed after it and gathered again in the backward pass, so no activation stays at more than 1/q^3.

Cost of a product, sent by a rank, in its parts of x, W and y: (q - 1) (x + W + y) forward and (q - 1) (2 x + 2 W + y) backward; a part is
1/q^3 of the tensor, so a rank sends less than in two dimensions on as many ranks. Source: 3D parallelism (arXiv 2105.14450).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.collectives import gathered, scattered_sum
from parallel.data.tiling import without_tiles
from parallel.layout import Layout
from parallel.mesh import GRID, Axis, Mesh
from parallel.precision import gradient_dtype
from parallel.tensor.style import Shape
from parallel.weight_gradient import gradient_or_later

# i, j, k are places on tp_depth, tp_row and tp_col; I inputs, O outputs of a weight that was gathered

# over what x is gathered, and y is scattered; the dim of the weight that depth cuts too: that of what lies between layers
FACES = {"first": ("tp_row", "tp_col", 1), "second": ("tp_col", "tp_row", 0)}


@dataclass(frozen=True)
class Cube:
    """A weight [out, in] over the whole cube; `place`: of the products between two norms, a first one or the second."""

    place: Literal["first", "second"]

    def layout(self, name: str, shape: Shape) -> Layout:
        outputs, inputs, deep = FACES[self.place]
        split: dict[int, str | tuple[str, ...]] = {0: outputs, 1: inputs}
        return Layout(shape, split | {deep: ((outputs, inputs)[deep], "tp_depth")}, GRID, alike=())

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for name in layouts:
            path = name.rpartition(".")[0]
            model.get_submodule(path).product = product_of(mesh, self.place, without_tiles(path))  # type: ignore[assignment]


def product_of(mesh: Mesh, place: str, label: str) -> partial[Tensor]:
    """`product` on this rank's lines of the cube."""
    *faces, deep = FACES[place]
    into, out, depth = (replace(mesh.axis(str(axis)), label=label) for axis in (*faces, "tp_depth"))
    return partial(product, into=into, out=out, depth=depth, deep=deep)


def product(x: Tensor, weight_OI: Tensor, *, into: Axis, out: Axis, depth: Axis, deep: int) -> Tensor:
    """x W^T in x's dtype, of parts [B, ..., channels] of x and of W [O, I], its dim `deep` in q parts, in any dtype.

    `into`: the ranks whose sequences are gathered; `out`: those over which the result is summed and its sequences are shared out, so
    that the sequences of the result are others.
    """
    y: Tensor = _Product.apply(x, weight_OI, into, out, depth, deep)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, into: Axis, out: Axis, depth: Axis, deep: int) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.weight, ctx.axes, ctx.deep = weight_OI, (into, out, depth), deep
        matrix_OI = gathered(weight_OI.to(x.dtype), depth, dim=deep)
        return scattered_sum(F.linear(gathered(x, into), matrix_OI), out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight_OI = ctx.saved_tensors
        into, out, depth = (replace(axis, label=f"{axis.label} backward") for axis in ctx.axes)
        dtype, deep, whole_grad = gradient_dtype(ctx.weight), ctx.deep, gathered(grad, out)
        grad_x = scattered_sum(whole_grad @ gathered(weight_OI.to(grad.dtype), depth, dim=deep), into)

        def of_weight() -> Tensor:
            grad_ON = whole_grad.flatten(0, -2).t()
            return scattered_sum((grad_ON @ gathered(x, into).flatten(0, -2)).to(dtype), depth, dim=deep)

        return grad_x, gradient_or_later(ctx.weight, of_weight), None, None, None, None
