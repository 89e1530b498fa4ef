"""How the experts' matrix products are computed: one object for each policy, listed in PRODUCTS.

    plain          operands in the compute dtype, inside the kernels' fused operations
    any other      one call of its `product` for each matrix product, not fused (moe/kernels/network.py, ByProduct)

A policy decides which operands of products are quantized. A new one needs a class and an entry of PRODUCTS in this file, a name in recipes
(moe/recipe/sections, Experts.products), and a plain function in moe/verify/plain/layer.py. Recipes are checked before torch is loaded,
so torch is imported inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor

# R rows, E experts, I inputs and O outputs of a matrix


class Products:
    """One way to compute matrix products. Other code reads the attributes; a subclass overrides those whose default is wrong for it."""

    name: ClassVar[str]
    fused: ClassVar[bool] = False  # True: kernels compute these products inside fused operations, and keep less for the backward pass
    # True: operands are rounded to fewer bits than the compute dtype, so results of different parallel layouts can differ by 1e-5
    rounds: ClassVar[bool] = True
    kind: ClassVar[str | None] = None  # dtype whose FLOP rate the planner assumes, such as fp8; None: the compute dtype
    whole_rows: ClassVar[str | None] = None  # reason why hidden units cannot be cut over ranks (etp) or tiles; None: they can

    def product(self, rows_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
        """Multiply each row by the matrix of its expert. Return [R, O] in the rows' dtype, with gradients. Rows are sorted by expert.
        counts: number of rows of each expert."""
        raise NotImplementedError


class Plain(Products):
    """Operands in the compute dtype: weights are cast to it at each use."""

    name = "plain"
    fused = True
    rounds = False

    def product(self, rows_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
        import torch

        parts = zip(rows_RI.split(counts), weight_EIO, strict=True)
        return torch.cat([part @ weight.to(rows_RI.dtype) for part, weight in parts])


PRODUCTS: dict[str, Products] = {p.name: p for p in (Plain(),)}
