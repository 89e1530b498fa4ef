"""Random numbers that depend on what they are for, not on who draws them.

A number is a hash of (key, position, column): key says what it is for (seed, step, name), position is a token's global
index in the step. Jitter and dropout are therefore the same on one process and on any layout, whatever the
micro-batches, and a recomputed forward pass draws them again unchanged.

The mixer is a 32-bit multiply-xorshift hash (two rounds of the murmur3 finaliser's form); integer only, so every device agrees.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


def key_of(*parts: object) -> int:
    """A 31-bit key from anything that has a text: key_of(seed, step, "layers.3.jitter")."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


_CHUNK = 16384  # numbers hashed at a time: few enough to stay in the processor's cache


def _mix(x: Tensor, spare: Tensor) -> Tensor:
    """Scramble int32 in place; >> is arithmetic on int32, so the sign bits are masked off."""
    x.bitwise_xor_(torch.bitwise_right_shift(x, 16, out=spare).bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    return x.bitwise_xor_(torch.bitwise_right_shift(x, 15, out=spare).bitwise_and_(0x1FFFF)).mul_(-2073254261)  # 0x846CA68B as int32


def uniform(key: int, position_T: Tensor, width: int) -> Tensor:
    """Float32 [T, width] in [0, 1]: row t is a function of key and position_T[t] (int64) alone."""
    row_T = position_T.to(torch.int32) * -1640531527 + key  # golden-ratio stride keeps neighbours apart
    row_T = _mix(row_T, torch.empty_like(row_T))
    column_D = torch.arange(width, dtype=torch.int32, device=position_T.device) * 668265263
    out_TD = torch.empty(len(row_T), width, dtype=torch.float32, device=position_T.device)
    step = max(1, _CHUNK // max(width, 1)) if position_T.device.type == "cpu" else len(row_T)
    for start in range(0, len(row_T), step):
        bits = row_T[start : start + step].unsqueeze(1) + column_D
        _mix(bits, torch.empty_like(bits))
        out_TD[start : start + step] = bits
    return out_TD.mul_(2.0**-32).add_(0.5)  # the high bits are the well-mixed ones, and a float keeps those
