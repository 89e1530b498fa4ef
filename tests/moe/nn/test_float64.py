"""Operations that compute narrower inputs in fp32 keep float64 inputs in float64, so that gradcheck can test their gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe.nn.linear import linear_fp32, normed
from moe.nn.vocabulary import summed_loss

B, L, D, V = 2, 3, 4, 7
TARGETS_BL = torch.tensor([[0, 6, 2], [-100, 1, 5]])

CASES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "rmsnorm": (lambda x, gain: normed(x, gain, centered=False, eps=1e-6), (D,)),
    "layernorm": (lambda x, gain: normed(x, gain, centered=True, eps=1e-5), (D,)),
    "router": (linear_fp32, (V, D)),
    "loss": (lambda x, table: summed_loss(x, TARGETS_BL, table, chunks=1), (V, D)),
    "bounded loss": (lambda x, table: summed_loss(x, TARGETS_BL, table, chunks=1, cap=3.0), (V, D)),
    "loss in chunks": (lambda x, table: summed_loss(x, TARGETS_BL, table, chunks=3), (V, D)),
}


@pytest.mark.parametrize("case", CASES)
def test_gradients_pass_gradcheck(case: str) -> None:
    function, shape = CASES[case]
    draw = torch.Generator().manual_seed(3)
    x_BLD, weight = (torch.randn(size, generator=draw, dtype=torch.float64, requires_grad=True) for size in ((B, L, D), shape))
    assert function(x_BLD, weight).dtype == torch.float64
    assert torch.autograd.gradcheck(function, (x_BLD, weight), eps=1e-6, atol=1e-7)


def test_a_loss_in_chunks_is_the_whole_loss() -> None:
    draw = torch.Generator().manual_seed(5)
    x_BLD, table_VD = (torch.randn(size, generator=draw, dtype=torch.float64) for size in ((B, L, D), (V, D)))
    whole, chunked = (summed_loss(x_BLD, TARGETS_BL, table_VD, chunks=chunks) for chunks in (1, 3))
    torch.testing.assert_close(chunked, whole, rtol=1e-13, atol=0)
