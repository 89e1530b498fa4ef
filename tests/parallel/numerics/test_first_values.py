"""Laws of first values: an element's value does not depend on the shard that is drawn; values are normal, cut at two sigma."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from parallel.mesh.layout import Box, Layout, Tile, stored
from parallel.mesh.mesh import EXPERT, Degrees, Mesh
from parallel.numerics.first_values import key_of_tensor, truncated_normal


def drawn(shape: tuple[int, ...], region: Box | None = None, *, key: int = 2**64 - 3, sigma: float = 1.0) -> Tensor:
    region = region or tuple(slice(0, size) for size in shape)
    out = torch.full([part.stop - part.start for part in region], math.nan)
    truncated_normal(out, key=key, shape=shape, region=region, sigma=sigma)
    return out


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((7,), (slice(2, 6),)),
        ((5, 9), (slice(1, 4), slice(3, 8))),
        ((5, 9), (slice(4, 5), slice(8, 9))),
        ((3, 4, 6), (slice(0, 2), slice(1, 4), slice(2, 3))),
        ((6, 1), (slice(2, 5), slice(0, 1))),
        ((3, 70001), (slice(1, 3), slice(40000, 70001))),  # a row longer than _CHUNK
        ((4, 5), (slice(2, 2), slice(0, 5))),
    ],
)
def test_a_region_is_that_region_of_the_whole(shape: tuple[int, ...], region: Box) -> None:
    assert torch.equal(drawn(shape, region), drawn(shape)[region])


def test_shards_of_a_huge_tensor_are_drawn() -> None:
    """In a tensor of 2^48 elements, elements with indices that differ by 1 or by 2^32 have different values."""
    shape = (2**24, 2**24)
    here = drawn(shape, (slice(2**23, 2**23 + 3), slice(0, 5)))
    there = drawn(shape, (slice(2**23 + 2**8, 2**23 + 2**8 + 3), slice(0, 5)))
    assert len(torch.cat([here, there]).unique()) == 30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_normal_and_cut_at_two_sigma(dtype: torch.dtype) -> None:
    """The empirical distribution of n = 10^6 values differs from the truncated normal one by less than 1.95 / sqrt(n) (Kolmogorov test)."""
    sigma, n = 0.25, 1_000_000
    out = torch.empty(1000, 1000, dtype=dtype)
    truncated_normal(out, key=5, shape=(1000, 1000), region=(slice(0, 1000), slice(0, 1000)), sigma=sigma)
    x = out.flatten().double().sort().values
    assert x.abs().max() <= 2 * sigma and x.abs().max() > 1.999 * sigma
    if dtype == torch.float32:
        below = (torch.erf(x / sigma / math.sqrt(2)) / math.erf(math.sqrt(2)) + 1) / 2
        assert (below - torch.arange(n) / n).abs().max() < 1.95 / math.sqrt(n)


def test_neighbors_in_both_dims_and_other_tensors_have_nothing_in_common() -> None:
    x, bound = drawn((1024, 1024)).double(), 5 / 1024  # five standard deviations of a correlation of 2^20 pairs
    others = [x.roll(1, 0), x.roll(1, 1), x.roll((1, 1), (0, 1)), x.roll(32, 1), x.t(), drawn((1024, 1024), key=2**64 - 2).double()]
    for other in others:
        assert abs((x * other).mean() / x.var()) < bound
    assert key_of_tensor(0, "a.w1") != key_of_tensor(1, "a.w1") != key_of_tensor(1, "a.w2")


def test_the_inverse_of_the_distribution_function_is_as_precise_as_float32() -> None:
    from parallel.numerics.first_values import _normal

    bits = torch.linspace(-1, 1, 10001, dtype=torch.float64).mul(2**62).long() * 2 - 1
    got = torch.from_numpy(_normal(bits.numpy(), 1.0)).double()
    want = math.sqrt(2) * torch.erfinv((bits.double() * 2.0**-63) * math.erf(math.sqrt(2)))
    assert ((got - want).abs() <= 5e-7 * want.abs() + 1e-18).all()


LAYOUTS = {
    "rows over tp": Layout((8, 6), {0: "tp"}),
    "columns over tp": Layout((8, 6), {1: "tp"}),
    "a tile of columns over tp": Layout((8, 12), {1: "tp"}, tile=Tile(1, 1, 3)),
    "experts over ep, units over etp": Layout((4, 3, 6), {0: "ep", 2: "etp"}, EXPERT, "expert", "e.{}"),
    "experts that changed places": Layout((4, 3, 6), {0: "ep"}, ("pp", "edp", "ep", "etp"), unstack="e.{}", placement=(2, 0, 3, 1)),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("degrees", [Degrees(), Degrees(dp=2, tp=2, ep=2, etp=2), Degrees(dp=2, tp=2, ep=4)], ids=str)
def test_every_rank_draws_its_region_of_the_tensors_of_one_process(layout: Layout, degrees: Degrees) -> None:
    def of(name: str, shape: tuple[int, ...], region: Box | None = None) -> Tensor:
        return drawn(shape, region, key=key_of_tensor(7, name))

    whole = {t.name: of(t.name, t.shape) for t in stored("x", Layout(layout.shape, unstack=layout.unstack), Mesh.of(Degrees()))}
    assert len(whole) == (4 if layout.unstack else 1)
    for rank in range(degrees.world):
        mesh = Mesh.of(degrees, rank)
        local = layout.local_shape(mesh)
        within = tuple(slice(size // 3, size) for size in local)
        for box in (None, within):
            found = list(stored("x", layout, mesh, box))
            sizes = [part.stop - part.start for part in box] if box else list(local)
            assert [t.entry for t in found] == (list(range(sizes[0])) if layout.unstack else [None])
            for tensor in found:
                part = of(tensor.name, tensor.shape, tensor.region)
                assert list(part.shape) == (sizes[1:] if layout.unstack else sizes)
                assert torch.equal(part, whole[tensor.name][tensor.region])
        if layout.unstack:
            assert [t.name for t in stored("x", layout, mesh)] == [f"e.{number}" for number in layout.stacked(mesh)]
