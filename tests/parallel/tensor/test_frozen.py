"""Products of tensor parallelism with frozen weights and narrow matrices: only what is trained has a gradient, for which x is kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Axis
from parallel.tensor import linear_2d, linear_3d
from parallel.tensor.linear_1d import Column, Row
from parallel.tensor.linear_3d import Cube
from parallel.tensor.overlapped import column_products, row_product
from parallel.tensor.style import low_rank

ONE = Axis("tp")
PRODUCTS: dict[str, Callable[..., Sequence[Tensor]]] = {
    "1d": lambda x, w, a: column_products(x, w, a, axis=ONE),
    "sliced": lambda x, w, a: column_products(x, w, a, axis=ONE, sliced=True),
    "overlapped rows": lambda x, w, a: [row_product(x, matrix, axis=ONE, chunks=2, sliced=False) for matrix in (*w, *a)],
    "2d": lambda x, w, a: linear_2d.products(x, w, a, row=ONE, column=ONE),
    "3d": lambda x, w, a: linear_3d.products(x, w, a, into=ONE, out=ONE, depth=ONE, deep=0),
}


@pytest.mark.parametrize("kind", PRODUCTS)
def test_only_what_is_trained_has_a_gradient_and_keeps_x(kind: str) -> None:
    draw = torch.Generator().manual_seed(1)
    x, w, v, a, gw, gv, ga = (
        torch.randn(*shape, generator=draw, dtype=torch.float64) for shape in ((2, 3, 5), (4, 5), (6, 5), (2, 5), (4,), (6,), (2,))
    )
    kept: list[Tensor] = []
    for trained in ("xa", "xwa", "a", "xwv", "x"):
        x_, w_, v_, a_ = leaves = [t.clone().requires_grad_(name in trained) for name, t in zip("xwva", (x, w, v, a), strict=True)]
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            found = PRODUCTS[kind](x_, [w_, v_], [a_])
        want = [x_ @ matrix.T for matrix in (w_, v_, a_)]
        held = [leaf for leaf in leaves if leaf.requires_grad]
        totals = [torch.stack([(y @ g).sum() for y, g in zip(ys, (gw, gv, ga), strict=True)]).sum() for ys in (found, want)]
        got, right = (torch.autograd.grad(total, held) for total in totals)
        for one, other in zip((*found, *got), (*want, *right), strict=True):
            torch.testing.assert_close(one, other)
        assert any(t.numel() == x.numel() and torch.equal(t.view_as(x), x) for t in kept) == (trained != "x")


def test_an_addition_of_low_rank_is_cut_along_one_side_as_its_weight() -> None:
    for style, a, b in (
        (Column(), {}, {0: "tp"}),
        (Column("tp_row_heads"), {}, {0: "tp_row_heads"}),
        (Row(), {1: "tp"}, {}),
        (linear_2d.Block(), {1: "tp_row"}, {0: "tp_col"}),
        (Cube("first"), {1: "tp_col"}, {0: "tp_row"}),
        (Cube("second"), {1: "tp_row"}, {0: "tp_col"}),
    ):
        for half, shape, split in (("a", (3, 8), a), ("b", (8, 3), b)):
            layout = style.low_rank(half, shape)
            assert (layout.shape, dict(layout.split), layout.alike) == (shape, split, ()), (style, half)
    assert Row(chunks=2).low_rank("b", (8, 3)).alike == ("tp",), "x A^T is summed before B multiplies it"
    assert low_rank(Layout((8, 6)), "a", (3, 6)) == Layout((3, 6)), "W's copies have equal gradients"
