"""Multiplies on one process as the ranks of a grid do: each product in q x q blocks, with partial products rounded before they are summed.

    y_j = sum over t of x_t W_tj, each term in the compute dtype; in the backward pass dx_t = sum over j of dy_j W_tj^T likewise

In 16 bits such sums differ from whole ones. moe/verify/expected.py measures by how much. Nothing is sent.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.model.transformer import Transformer
from moe.nn.linear import Linear
from moe.nn.vocabulary import Product, Rows, TiledRows
from parallel.numerics.precision import sum_dtype
from parallel.tensor.style import fits


def in_blocks(model: Transformer, side: int) -> None:
    """Change a whole model: attention, dense networks and an untied head. MoE layers stay whole, because a grid does not cut them."""
    for name, module in model.named_modules():
        if isinstance(module, Linear) and fits("layers.*.attention.*", name) | fits("layers.*.ffn.*", name):
            module.product = partial(product, side=side)
    if isinstance(model.head, Rows | TiledRows):
        model.head.others = _Alone(side)


def product(x: Tensor, weight_OI: Tensor, *, side: int) -> Tensor:
    """x W^T in blocks. Each part of the outputs has its own x, whose gradient is rounded before the parts are summed."""
    outputs = []
    for rows in weight_OI.to(x.dtype).tensor_split(side, 0):
        pairs = zip(x.view_as(x).tensor_split(side, -1), rows.tensor_split(side, 1), strict=True)
        shares = torch.stack([F.linear(x_t, matrix) for x_t, matrix in pairs])
        outputs.append(shares.to(sum_dtype(x.dtype)).sum(0).to(x.dtype))
    return torch.cat(outputs, -1)


class _Alone:
    """A stand-in for `Others` of moe/nn/vocabulary.py on one process: only the product is in blocks."""

    def __init__(self, side: int) -> None:
        self.product: Product | None = partial(product, side=side)

    def tokens(self, tokens: Tensor) -> Tensor:
        return tokens

    columns = rows = enter = targets = scores = loss = logits = tokens
