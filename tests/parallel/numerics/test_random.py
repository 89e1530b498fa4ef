"""Keyed random numbers depend only on (key, position, column), and pass tests of uniformity and independence.

Statistical bounds are five standard errors. The numbers are fixed by their keys, so no run fails by chance.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from parallel.numerics.random import key_of, uniform

KEYS = [0, 1, 2**31 - 1, key_of(0, 1, "layers.1.router.jitter"), key_of(0, 2, "layers.1.router.jitter")]


def plain(key: int, position: int, column: int) -> float:
    """Return one number of `uniform`, computed with Python's integers modulo 2^32."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        return (x ^ (x >> 15)) * 0x846CA68B % 2**32

    bits = mix((mix((position * (2**32 - 1640531527) + key) % 2**32) + column * 668265263) % 2**32)
    signed = bits - 2**32 if bits >= 2**31 else bits
    return float(torch.tensor(signed, dtype=torch.int32).float() * 2.0**-32 + 0.5)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])


@given(st.integers(0, 2**31 - 1), st.integers(0, 2**40), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_equals_the_plain_definition(key: int, position: int, width: int) -> None:
    got = uniform(key, torch.tensor([position, position + 1]), width)
    want = [[plain(key, (position + i) % 2**32, c) for c in range(width)] for i in range(2)]
    assert got.dtype == torch.float32 and got.tolist() == want


@given(st.integers(0, 2**31 - 1), st.integers(1, 60), st.integers(1, 11), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_a_row_depends_on_its_position_alone(key: int, tokens: int, width: int, random: object) -> None:
    position = torch.arange(17, 17 + tokens)
    whole = uniform(key, position, width)
    random.shuffle(order := list(range(tokens)))  # type: ignore[attr-defined]
    cut = len(order) // 3
    assert torch.equal(torch.cat([uniform(key, position[:cut], width), uniform(key, position[cut:], width)]), whole)
    assert torch.equal(uniform(key, position[order], width), whole[order])
    assert torch.equal(uniform(key, position, width + 3)[:, :width], whole)


def test_rows_beyond_one_chunk_are_the_same_numbers() -> None:
    """Numbers do not depend on the chunks in which `uniform` computes them, or on the call that contains their position."""
    position = torch.arange(7000)
    whole = uniform(5, position, 7)
    assert torch.equal(torch.cat([uniform(5, part, 7) for part in position.split(611)]), whole)
    assert torch.equal(uniform(5, torch.tensor([3]), 40000)[:, :7], whole[3:4])


@pytest.mark.parametrize("width", [0, 3])
def test_no_positions_and_no_columns_are_fine(width: int) -> None:
    assert uniform(1, torch.arange(0), width).shape == (0, width)
    assert uniform(1, torch.arange(4), 0).shape == (4, 0)


@pytest.mark.parametrize("key", KEYS)
def test_mean_variance_and_every_bin_are_those_of_a_uniform(key: int) -> None:
    numbers = uniform(key, torch.arange(2000), 50).double().flatten()
    n, bins = len(numbers), 64
    assert numbers.min() >= 0 and numbers.max() <= 1
    assert abs(numbers.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs((numbers - 1 / 2).square().mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    chi2 = (torch.histc(numbers, bins, 0, 1) - n / bins).square().sum() / (n / bins)
    assert chi2 < bins - 1 + 5 * math.sqrt(2 * (bins - 1))


@pytest.mark.parametrize("key", KEYS)
def test_neighbors_are_uncorrelated(key: int) -> None:
    """Serial correlations along positions and columns, of the numbers and of their squares, are at most five standard errors."""
    grid = uniform(key, torch.arange(2000), 50).double() - 1 / 2
    bound = 5 / math.sqrt(grid.numel())
    for values in (grid, grid.square()):
        for lag in (1, 2, 3, 8, 16):
            assert abs(correlation(values[lag:], values[:-lag])) < bound * 1.1
            assert abs(correlation(values[:, lag:], values[:, :-lag])) < bound * 1.3


def test_sums_over_a_row_spread_as_independent_numbers_do() -> None:
    """The variance of the mean of n numbers of a row or column is the variance of one number divided by n."""
    for key in KEYS:
        grid = uniform(key, torch.arange(1500), 40).double()
        for dim, other in ((0, 40), (1, 1500)):
            means = grid.mean(dim)
            ratio = means.var() * grid.shape[dim] * 12
            assert abs(ratio - 1) < 5 * math.sqrt(2 / other)


def test_different_uses_get_different_numbers() -> None:
    names = [("a", 0), ("a", 1), ("b", 0), ("layers.1.router.jitter", 0), ("layers.11.router.jitter", 0)]
    keys = [key_of(seed, step, name) for name, seed in names for step in (0, 1, 2)]
    assert len(set(keys)) == len(keys) and all(0 <= key < 2**31 for key in keys)
    position = torch.arange(1000)
    grids = [uniform(key, position, 20).double() for key in keys]
    bound = 5 / math.sqrt(20 * 1000)
    for i, a in enumerate(grids):
        for b in grids[:i]:
            assert abs(correlation(a, b)) < bound and (a == b).double().mean() < 1e-3


def test_a_key_is_the_same_on_every_machine() -> None:
    """key_of(0, 1, "x") is fixed: the first four bytes of SHA-256 of "0/1/x", little-endian, divided by 2. Resumed runs need equal keys."""
    assert key_of(0, 1, "x") == 0x43AE8F09
