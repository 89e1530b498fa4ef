"""Draws the random numbers of the plain twin (the reference model of `moe verify`) by the hash of parallel/numerics/random.py, here
reimplemented with 64-bit integers.

h(x) = two rounds of xor-shift and multiply, 32 bits     number = 0.5 + signed h(h(token * 0x9E3779B9 + key) + column * 668265263) / 2^32
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF  # the lower 32 bits


def key_of(*parts: object) -> int:
    """Return a 31-bit key: the first 32 bits (little-endian) of the SHA-256 of the parts' text, joined by slashes, divided by 2."""
    return int.from_bytes(hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()[:4], "little") // 2


def uniform(key: int, places_T: Tensor, width: int) -> Tensor:
    """Return random numbers in [0, 1], fp32 [T, width]. Each depends only on the key, the token's index (places_T) and the column."""
    rows_T1 = _mix(places_T.long() * 0x9E3779B9 + key).unsqueeze(1)
    bits_TD = _mix(rows_T1 + torch.arange(width) * 668265263)
    signed_TD = bits_TD - (bits_TD >= 2**31) * 2**32
    return signed_TD.float() / 2**32 + 0.5


def _mix(x: Tensor) -> Tensor:
    """Hash the lower 32 bits of int64 numbers by two rounds of xor-shift and multiply."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x & _LOW
        x = (x ^ (x >> shift)) * factor
    return x & _LOW
