"""Rotary positions (arXiv 2104.09864): channel pairs of a head rotate by position * rate_i, rate_i = base^(-2i/C), angles in fp32.

A pair is (i, i + C/2), or with `pairs: neighbours` (2i, 2i + 1). With a `fraction` below 1, only the first C channels of a head rotate.
Values of `scaling`, and what each makes of the rate (ntk, dynamic: of the base):

linear    rate / factor                                                         position interpolation (arXiv 2306.15595)
ntk       base * factor^(C / (C - 2))                                           YaRN's paper, section 3.1
dynamic   ntk with the factor max(1, factor * length / trained_length - (factor - 1))       the same, section 3.3
llama3    rate for pairs with many rotations in trained_length, rate / factor for pairs with few; else a mix, linear in the rotations
yarn      as llama3, but the mix is linear in the pair's index; cos and sin times m(mscale) / m(mscale_all), and logits times
          m(mscale_all)^2, with m(s) = 0.1 s ln(factor) + 1 (arXiv 2309.00071, section 3.2 and eq. 22; DeepSeek-V2's code)
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.recipe import sections

# B batch, L length, H heads, C channels of a head (in names of cosines, sines, angles and rates: channel pairs)

DEFAULT = sections.Rope()


def _pairs(x_BHLC: Tensor, pairs: str, count: int) -> tuple[Tensor, ...]:
    """Return views of x: (the first channels of its first `count` pairs, the second channels of these pairs)."""
    turning_BHLC = x_BHLC if 2 * count == x_BHLC.shape[-1] else x_BHLC[..., : 2 * count]
    return turning_BHLC.chunk(2, dim=-1) if pairs == "halves" else turning_BHLC.unflatten(-1, (-1, 2)).unbind(-1)


def _rotated(x_BHLC: Tensor, cos_LC: Tensor, sin_LC: Tensor, pairs: str) -> Tensor:
    count = cos_LC.shape[-1]
    a, b = _pairs(x_BHLC, pairs, count)
    out = torch.empty_like(x_BHLC)
    first, second = _pairs(out, pairs, count)
    torch.mul(a, cos_LC, out=first).addcmul_(b, sin_LC, value=-1)
    torch.mul(b, cos_LC, out=second).addcmul_(a, sin_LC)
    if 2 * count < x_BHLC.shape[-1]:
        out[..., 2 * count :] = x_BHLC[..., 2 * count :]
    return out


class _Rotate(torch.autograd.Function):
    """Rotation of channel pairs. Backward rotates the gradient by the negative angle."""

    @staticmethod
    def forward(ctx: Any, x_BHLC: Tensor, cos_LC: Tensor, sin_LC: Tensor, pairs: str) -> Tensor:
        ctx.save_for_backward(cos_LC, sin_LC)
        ctx.pairs = pairs
        return _rotated(x_BHLC, cos_LC, sin_LC, pairs)

    @staticmethod
    def backward(ctx: Any, grad_BHLC: Tensor) -> tuple[Tensor, None, None, None]:
        cos_LC, sin_LC = ctx.saved_tensors
        out: Tensor = _Rotate.apply(grad_BHLC, cos_LC, -sin_LC, ctx.pairs)
        return out, None, None, None


class Turns(NamedTuple):
    """The rotation at each position: cosines and sines [L, C/2] in the dtype of queries and keys. `pairs`: "halves" if channels
    i and i + C/2 form a pair, "neighbours" if 2i and 2i + 1 do."""

    cos_LC: Tensor
    sin_LC: Tensor
    pairs: str


def rotate(x_BHLC: Tensor, position_L: Tensor, rope: sections.Rope = DEFAULT) -> Tensor:
    """Rotate the channel pairs of every head by the angles of the positions int64 [L]. Keep x's shape and dtype. `dynamic` scaling takes L
    as the length of the sequence, so x must then have all tokens of the sequence."""
    rope = rope.at(len(position_L))
    return turned(x_BHLC, turns_of(position_L, rope.turning(x_BHLC.shape[-1]), rope, dtype=x_BHLC.dtype))


def turned(x_BHLC: Tensor, turns: Turns) -> Tensor:
    out: Tensor = _Rotate.apply(x_BHLC, *turns) if torch.is_grad_enabled() else _rotated(x_BHLC, *turns)
    return out


def turns_of(position_L: Tensor, channels: int, rope: sections.Rope = DEFAULT, *, dtype: torch.dtype) -> Turns:
    """Return the rotation at these positions for heads with `channels` rotary channels. All layers of a forward pass share it."""
    angle_LC = position_L.float().unsqueeze(1) * rates(rope, channels, device=position_L.device)
    cos_LC, sin_LC, size = angle_LC.cos(), angle_LC.sin(), _size(rope)
    if size != 1:
        cos_LC, sin_LC = cos_LC * size, sin_LC * size
    return Turns(cos_LC.to(dtype), sin_LC.to(dtype), rope.pairs)


def rates(rope: sections.Rope, channels: int, *, device: torch.device | str | None = None) -> Tensor:
    """Return the angle in radians by which each channel pair rotates per position, fp32 [C/2], the largest first."""
    half = channels // 2
    pair_C = torch.arange(half, dtype=torch.float32, device=device)
    rate_C = rope.base_of(channels) ** (-pair_C / half)
    assert rope.scaling != "dynamic", "call Rope.at(length) first"
    if rope.scaling in ("none", "ntk"):
        return rate_C
    if rope.scaling == "linear":
        return rate_C / rope.factor
    kept_C = _kept_by_rotations(rope, rate_C) if rope.scaling == "llama3" else _kept_by_index(rope, pair_C, half)
    return kept_C * rate_C + (1 - kept_C) * rate_C / rope.factor


def _kept_by_rotations(rope: sections.Rope, rate_C: Tensor) -> Tensor:
    """Return for each channel pair the weight w in its new rate w * rate + (1 - w) * rate / factor: 1 for pairs with at least `high`
    rotations in trained_length, 0 for pairs with at most `low`, and between them linear in the number of rotations."""
    turns_C = rope.length * rate_C / (2 * math.pi)
    return ((turns_C - rope.low) / (rope.most_turns - rope.low)).clamp(0, 1)


def _kept_by_index(rope: sections.Rope, pair_C: Tensor, half: int) -> Tensor:
    """Return for each channel pair the weight w in its new rate w * rate + (1 - w) * rate / factor: 1 up to the pair with `high` rotations
    in trained_length, 0 from the pair with `low` rotations on, and between them linear in the pair's index. half: number of pairs."""

    def pair_with(rotations: float) -> float:  # index of the pair with this number of rotations, not rounded
        return half * math.log(rope.length / (rotations * 2 * math.pi)) / math.log(rope.base)

    first, last = pair_with(rope.most_turns), pair_with(rope.low)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    return 1 - ((pair_C - first) / max(last - first, 0.001)).clamp(0, 1)


def _size(rope: sections.Rope) -> float:
    """Return YaRN's factor on cos and sin. Queries and keys both get it, so the rotary channels' part of a logit gets its square."""
    return _mscale(rope, rope.mscale) / _mscale(rope, rope.mscale_all)


def logit_factor(rope: sections.Rope) -> float:
    """Return the factor of logits in DeepSeek's form of YaRN, which also scales the channels that do not rotate."""
    return _mscale(rope, rope.mscale_all) ** 2


def _mscale(rope: sections.Rope, share: float) -> float:
    """Return m(share) of YaRN (top of this file), or 1 for other scalings."""
    return 0.1 * share * math.log(rope.factor) + 1 if rope.scaling == "yarn" else 1.0
