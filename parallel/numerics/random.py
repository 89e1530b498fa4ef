"""Random numbers that depend on their purpose, not on the rank that draws them.

A number is a hash of (key, position, column). The key gives its purpose (seed, step, name), and the position is a token's global
index in the step. So jitter and dropout are equal for any number of ranks and micro-batches, and for any parallelism. A recomputed
forward pass draws the same numbers again.

The hash is 32-bit multiply-xorshift (two rounds of the murmur3 finalizer's form), in integers, so all devices give equal numbers.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from parallel.numerics.supposed import supposed


def key_of(*parts: object) -> int:
    """Return a 31-bit key for any values, by their text. Example: key_of(seed, step, "layers.3.jitter")."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


_CHUNK = 16384  # numbers hashed at a time, so that they fit into the CPU's cache


def _mix(x: Tensor, spare: Tensor) -> Tensor:
    """Hash int32 numbers in place; return them. `spare`: scratch of x's shape. >> on int32 copies the sign bit, hence the masks."""
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=spare).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=spare).bitwise_and_(0x1FFFF)).mul_(-2073254261)  # = 0x846CA68B


def uniform(key: int, position_T: Tensor, width: int, *, first: int = 0) -> Tensor:
    """Return random numbers in [0, 1], fp32 [T, width]. Each depends only on key, position_T[t] and the number of its column. first: number
    of the first column."""
    row_T = position_T.to(torch.int32) * -1640531527 + key  # neighboring positions get distant numbers (golden ratio)
    row_T = _mix(row_T, torch.empty_like(row_T))
    column_D = torch.arange(first, first + width, dtype=torch.int32, device=position_T.device) * 668265263
    out_TD = torch.empty(len(row_T), width, dtype=torch.float32, device=position_T.device)
    # In a rehearsal (a run on fake tensors), results have values only if they are computed from tensors with values. So give `out_TD` any
    # values; the loop below overwrites all of them.
    out_TD = supposed(out_TD, lambda: torch.empty(len(row_T), width))
    step = max(1, _CHUNK // max(width, 1)) if position_T.device.type == "cpu" else len(row_T)
    for start in range(0, len(row_T), step):
        bits = row_T[start : start + step].unsqueeze(1) + column_D
        _mix(bits, torch.empty_like(bits))
        out_TD[start : start + step] = bits
    return out_TD.mul_(2.0**-32).add_(0.5)  # a float keeps the high bits, which are mixed best
