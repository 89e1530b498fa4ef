"""Initial values ("first values") of a shard of a tensor: each element depends only on the tensor's key and the element's index in the
whole tensor.

    whole [6, 4]     rank 0 draws [0:3, :]        the same 24 numbers for any shards;
                     rank 1 draws [3:6, :]        time and memory are proportional to the shard

Each element gets the 64 bits of SplitMix64 at its index (Steele, Lea and Flood, OOPSLA 2014: doi 10.1145/2660193.2660195), a generator
that computes its n-th number directly. The inverse distribution function turns them into a normal number cut at 2 sigma. It uses
only additions, products and one division, which IEEE 754 rounds exactly, so every processor gives the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from parallel.mesh.layout import Box
from parallel.numerics.supposed import pretended

# R rows (all dims but the last), C columns (the last dim)

# fill(name, out, within=None) writes initial values of parameter `name` into `out`: this rank's shard, or only a box `within` of the shard
Fill = Callable[..., None]

_CHUNK = 1 << 15  # numbers drawn at a time, so that scratch memory stays in the CPU's cache
_STRIDE, _MIX, _MIX_2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))  # SplitMix64's constants

# minimax fit u P(s) / Q(s) of sqrt(2) erfinv(u erf(sqrt(2))), with s = 1 - u^2; relative error 7e-8. _P_TOP, _Q_TOP: coefficients of the
# highest powers of s. _P, _Q: the other coefficients, from high to low powers
_P = (54.2423591, 74.4911718, 24.256414, 1.99999986)
_Q = (55.2540454, 52.4260359, 13.8380257, 1.0)
_P_TOP, _Q_TOP = 4.38453206, 10.7060532


def key_of_tensor(seed: int, name: str) -> int:
    """Return a 64-bit key of the tensor's initial values. With 32 bits, two tensors of a large model could have the same key, and so the
    same values."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "little")


@torch.no_grad()
def truncated_normal(out: Tensor, *, key: int, shape: tuple[int, ...], region: Box, sigma: float) -> None:
    """Fill `out`, of any dtype and device, with the elements in `region` of a whole tensor of `shape`. `key` determines the whole tensor:
    normal numbers of standard deviation `sigma`, cut at 2 sigma."""
    assert tuple(out.shape) == tuple(r.stop - r.start for r in region), (out.shape, region)
    if not out.numel() or pretended(out):
        return
    row_R, width = _rows(shape, region), out.shape[-1]
    out_RC, first = out.view(len(row_R), width), region[-1].start
    columns = min(width, _CHUNK)
    rows = max(1, _CHUNK // columns)
    for left in range(0, width, columns):
        column_C = np.arange(first + left, first + min(left + columns, width), dtype=np.uint64)
        column_C *= _STRIDE
        column_C += np.uint64(key)
        for top in range(0, len(row_R), rows):
            value_RC = _normal(_bits(row_R[top : top + rows], column_C), sigma)
            out_RC[top : top + rows, left : left + columns] = torch.from_numpy(value_RC)


def _rows(shape: tuple[int, ...], region: Box) -> NDArray[np.uint64]:
    """Return the generator's state at the start of each row of the region: the first element's index in the whole tensor times _STRIDE."""
    row_R = np.zeros(1, np.uint64)
    for size, part in zip(shape[:-1], region[:-1], strict=True):
        row_R = np.add.outer(row_R * np.uint64(size), np.arange(part.start, part.stop, dtype=np.uint64)).ravel()
    row_R *= np.uint64(shape[-1])
    row_R *= _STRIDE  # modulo 2^64; numpy warns about overflow of scalars, not of arrays
    return row_R


def _bits(row_R: NDArray[np.uint64], column_C: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return SplitMix64 numbers [R, C] without the generator's last step, which changes only low bits that a float32 cannot hold."""
    x = np.add.outer(row_R, column_C)
    for shift, factor in ((np.uint64(30), _MIX), (np.uint64(27), _MIX_2)):
        x ^= x >> shift
        x *= factor
    return x.view(np.int64)


def _normal(bits: NDArray[np.int64], sigma: float) -> NDArray[np.float32]:
    """Return a normal number for each element of `bits`, float32, within 2 sigma, symmetric about 0."""
    u = bits.astype(np.float32)
    u *= np.float32(2.0**-63)
    s = np.float32(1.0) - u * u
    over, under = np.full_like(s, _P_TOP), np.full_like(s, _Q_TOP)
    for p, q in zip(_P, _Q, strict=True):
        over *= s
        over += np.float32(p)
        under *= s
        under += np.float32(q)
    u *= over
    u /= under
    u *= np.float32(sigma)
    return u
