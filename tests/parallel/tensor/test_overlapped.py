"""Sums over tp that begin before their product ends: the same results and gradients, the same bytes in more calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel import process
from parallel.collectives import all_reduce, reduce_scatter
from parallel.mesh import Axis, Degrees
from parallel.process import World
from parallel.tensor.overlapped import row_product
from parallel.weight_gradient import linear, put_off
from tests.support.ranks import run_on_ranks

# B sequences, L length, IN inputs of all ranks, OUT outputs
B, L, IN, OUT = 3, 10, 8, 7


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both_ways(axis: Axis, *, chunks: int | None, sliced: bool, waits: bool = False) -> list[Tensor]:
    """Output, gradients of input and weight; `chunks` None: a product, then its sum. `waits`: the weight's gradient is put off."""
    h = drawn(B, L, IN, seed=1).chunk(axis.size, 2)[axis.index].clone().requires_grad_()
    weight = nn.Parameter(drawn(OUT, IN, seed=2).chunk(axis.size, 1)[axis.index].clone())
    if chunks is not None:
        y = row_product(h, weight, axis=axis, chunks=chunks, sliced=sliced)
    else:
        y = reduce_scatter(linear(h, weight), axis, dim=1) if sliced else all_reduce(linear(h, weight), axis)
    grad = drawn(B, L, OUT, seed=3)
    grad = grad.chunk(axis.size, 1)[axis.index] if sliced else grad
    if waits:
        with put_off() as owed:
            y.backward(grad)
        assert weight.grad is None
        owed.pay()
    else:
        y.backward(grad)
    assert h.grad is not None and weight.grad is not None
    return [y.detach(), h.grad, weight.grad]


@pytest.mark.parametrize("sliced", [False, True])
def test_runs_give_what_one_product_and_its_sum_give(sliced: bool) -> None:
    """Also in more runs than there are tokens, and where weights' gradients are put off. The same bytes, and as many calls as runs."""

    def work(rank: int) -> list[Any]:
        mesh = process.connect(Degrees(tp=2), World(rank, 2))
        want = both_ways(mesh.axis("tp"), chunks=None, sliced=sliced)
        seen = []
        for chunks, waits in ((1, False), (3, False), (3, True), (4 * L, False)):
            mesh.communicator.reset_counts()
            got = both_ways(mesh.axis("tp"), chunks=chunks, sliced=sliced, waits=waits)
            for mine, other in zip(got, want, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
            seen.append({name: (c.calls, c.bytes) for (_, name), c in mesh.communicator.counts().items()})
        return seen

    whole, tokens = B * L * OUT * 8, L // 2 if sliced else B * L
    for calls, found in zip((1, 3, 3, tokens), run_on_ranks(work, 2)[0], strict=True):
        sums = {"reduce_scatter": (calls, whole), "all_gather": (calls, whole // 2)} if sliced else {"all_reduce": (calls, whole)}
        assert found == sums
