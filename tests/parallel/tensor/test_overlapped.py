"""1D products in chunks, with overlapped collectives, equal unchunked ones in results, gradients and bytes.

Only this test would notice if the sum of the input's gradient were awaited before the weights' gradients are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel.mesh.collectives import Started, all_gather, all_reduce, reduce_backward, reduce_scatter
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.numerics import weight_gradient
from parallel.numerics.weight_gradient import defer_gradients, linear
from parallel.process import process
from parallel.process.process import World
from parallel.tensor import overlapped
from parallel.tensor.overlapped import column_products, row_product
from tests.support.ranks import run_on_ranks

# B sequences, L length, IN inputs of all ranks, OUT outputs
B, L, IN, OUT = 3, 10, 8, 7
OUTS = (6, 2, 4)  # outputs on one rank of three products of one x


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def both_ways(axis: Axis, *, chunks: int | None, sliced: bool, waits: bool = False) -> list[Tensor]:
    """Return [output, gradients of input and weight] of `row_product`; chunks None: of a product and a sum after it. waits: the weight's
    gradient is deferred."""
    h = drawn(B, L, IN, seed=1).chunk(axis.size, 2)[axis.index].clone().requires_grad_()
    weight = nn.Parameter(drawn(OUT, IN, seed=2).chunk(axis.size, 1)[axis.index].clone())
    if chunks is not None:
        y = row_product(h, weight, axis=axis, chunks=chunks, sliced=sliced)
    else:
        y = reduce_scatter(linear(h, weight), axis, dim=1) if sliced else all_reduce(linear(h, weight), axis)
    grad = drawn(B, L, OUT, seed=3)
    return [y.detach(), *backward([y], [grad.chunk(axis.size, 1)[axis.index] if sliced else grad], h, [weight], waits=waits)]


def backward(outputs: Sequence[Tensor], grads: list[Tensor], x: Tensor, weights: list[nn.Parameter], *, waits: bool) -> list[Tensor]:
    """Return the gradients of the input, then of the weights."""
    if waits:
        with defer_gradients() as pending:
            torch.autograd.backward(outputs, grads)
        assert all(weight.grad is None for weight in weights)
        pending.compute()
    else:
        torch.autograd.backward(outputs, grads)
    found = [x.grad, *(weight.grad for weight in weights)]
    assert all(grad is not None for grad in found)
    return found  # type: ignore[return-value]


def columns_both_ways(axis: Axis, *, chunks: int | None, sliced: bool, waits: bool = False) -> list[Tensor]:
    """Return outputs and gradients of `column_products` with three weights; chunks None: of a collective, then three products."""
    x = drawn(B, L, IN, seed=4)
    x = (x.chunk(axis.size, 1)[axis.index] if sliced else x).clone().requires_grad_()
    weights = [nn.Parameter(drawn(out, IN, seed=10 * axis.index + out)) for out in OUTS]
    if chunks is not None:
        outputs: Sequence[Tensor] = column_products(x, weights, axis=axis, chunks=chunks, sliced=sliced, recast=waits)
    else:
        entered = all_gather(x, axis, dim=1) if sliced else reduce_backward(x, axis)
        outputs = [linear(entered, weight) for weight in weights]
    grads = [drawn(B, L, out, seed=10 * axis.index + out + 5) for out in OUTS]
    return [*(y.detach() for y in outputs), *backward(outputs, grads, x, weights, waits=waits)]


@pytest.mark.parametrize("sliced", [False, True])
def test_column_products_in_chunks_equal_unchunked_ones(sliced: bool) -> None:
    """Also in more chunks than tokens, and with deferred weight gradients. Bytes are equal."""

    def work(rank: int) -> list[Any]:
        mesh = process.connect(Degrees(tp=2), World(rank, 2))
        want = columns_both_ways(mesh.axis("tp"), chunks=None, sliced=sliced)
        seen = []
        for chunks, waits in ((1, False), (1, True), (3, False), (3, True), (4 * L, False)):
            mesh.communicator.reset_counts()
            got = columns_both_ways(mesh.axis("tp"), chunks=chunks, sliced=sliced, waits=waits)
            assert len(got) == len(want) == 2 * len(OUTS) + 1
            for mine, other in zip(got, want, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
            seen.append({name: (c.calls, c.bytes) for (_, name), c in mesh.communicator.counts().items()})
        return seen

    whole, tokens = B * L * IN * 8, L // 2 if sliced else B * L
    for calls, found in zip((1, 1, 3, 3, tokens), run_on_ranks(work, 2)[0], strict=True):
        sums = {"reduce_scatter": (calls, whole), "all_gather": (calls, whole // 2)} if sliced else {"all_reduce": (calls, whole)}
        assert found == sums


@pytest.mark.parametrize(("chunks", "sliced"), [(1, False), (3, False), (1, True), (3, True)])
def test_sums_of_the_inputs_gradient_overlap_with_the_weights_gradients(monkeypatch: pytest.MonkeyPatch, chunks: int, sliced: bool) -> None:
    """In the backward pass, collectives of all chunks start before the weights' gradients are computed, and are awaited after that."""
    happened: list[str] = []

    class Noted(Started):
        def wait(self) -> Tensor:
            happened.append("there")
            return super().wait()

    def start(tensor: Tensor, axis: Axis) -> Started:
        happened.append("leaves")
        return Noted(tensor, None)

    def computed(weights: tuple[Tensor, ...], compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        happened.append("weights")
        return compute()

    monkeypatch.setattr(overlapped, "start_scatter_sum" if sliced else "start_sum", start)
    monkeypatch.setattr(weight_gradient, "gradients_or_later", computed)
    columns_both_ways(Mesh.of(Degrees()).axis("tp"), chunks=chunks, sliced=sliced)
    assert happened == ["leaves"] * chunks + ["weights"] + ["there"] * chunks


@pytest.mark.parametrize("sliced", [False, True])
def test_row_products_in_chunks_equal_unchunked_ones(sliced: bool) -> None:
    """Also in more chunks than tokens, and with deferred weight gradients. Bytes are equal, with one call for each chunk."""

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
