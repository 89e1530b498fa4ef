"""Rotary positions (arXiv 2104.09864): channel pairs of a head turn by place * rate_i, rate_i = base^(-2i/C), angles in fp32.
A pair is (i, i + C/2), or with `pairs: neighbours` (2i, 2i + 1), as the paper and DeepSeek have it.
With a `fraction` below 1 (GPT-NeoX, arXiv 2204.06745) C counts the first channels of a head, and the others stay as they are.

none      rate                                                     places as in training
linear    rate / factor                                            places squeezed together (arXiv 2306.15595)
ntk       base * factor^(C / (C - 2)): the fastest pair keeps its rate, the slowest turns at rate / factor
                                                                   "NTK-aware"; YaRN's paper, section 3.1
dynamic   the same with factor * length / trained_length - (factor - 1), at least 1, of the sequences' length
                                                                   "Dynamic NTK" as transformers has it; the paper, section 3.3
llama3    rate where a pair turns more than `high` times in trained_length, rate / factor where less than `low` times,
          and a mixture between, linear in how often it turns      Llama 3.1
yarn      the same two ends, a mixture linear in the number of the pair; cos and sin times m(mscale) / m(mscale_all), and
          logits times m(mscale_all)^2, m(s) = 0.1 s ln(factor) + 1
                                                                   YaRN (arXiv 2309.00071, section 3.2 and eq. 22), DeepSeek-V2's code
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe.recipe import sections

# B batch, L length, H heads, C channels of a head

DEFAULT = sections.Rope()


def _pairs(x_BHLC: Tensor, pairs: str, count: int) -> tuple[Tensor, ...]:
    """The first and the second channels of so many pairs, as views."""
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
    """Turn the first channels' pairs; backward turns the gradient the other way."""

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
    """By how much the heads' pairs turn at each place: [L, C/2] in the dtype of what turns; and which channels are pairs."""

    cos_LC: Tensor
    sin_LC: Tensor
    pairs: str


def rotate(x_BHLC: Tensor, position_L: Tensor, rope: sections.Rope = DEFAULT) -> Tensor:
    """Every head's channel pairs, turned by their places, of whole sequences; x's shape and dtype back."""
    rope = rope.at(len(position_L))
    return turned(x_BHLC, turns_of(position_L, rope.turning(x_BHLC.shape[-1]), rope, dtype=x_BHLC.dtype))


def turned(x_BHLC: Tensor, turns: Turns) -> Tensor:
    """The same, of places whose turns are known."""
    out: Tensor = _Rotate.apply(x_BHLC, *turns) if torch.is_grad_enabled() else _rotated(x_BHLC, *turns)
    return out


def turns_of(position_L: Tensor, channels: int, rope: sections.Rope = DEFAULT, *, dtype: torch.dtype) -> Turns:
    """For heads of which so many channels turn: the same in every layer, so a pass keeps them (`Context.for_all_layers`)."""
    angle_LC = position_L.float().unsqueeze(1) * rates(rope, channels, device=position_L.device)
    cos_LC, sin_LC, size = angle_LC.cos(), angle_LC.sin(), _size(rope)
    if size != 1:
        cos_LC, sin_LC = cos_LC * size, sin_LC * size
    return Turns(cos_LC.to(dtype), sin_LC.to(dtype), rope.pairs)


def rates(rope: sections.Rope, channels: int, *, device: torch.device | str | None = None) -> Tensor:
    """Radians a place, fp32 [C/2], the fastest first."""
    half = channels // 2
    pair_C = torch.arange(half, dtype=torch.float32, device=device)
    rate_C = rope.base_of(channels) ** (-pair_C / half)
    assert rope.scaling != "dynamic", "Rope.at says what it is for a length"
    if rope.scaling in ("none", "ntk"):
        return rate_C
    if rope.scaling == "linear":
        return rate_C / rope.factor
    kept_C = _kept_by_turns(rope, rate_C) if rope.scaling == "llama3" else _kept_by_number(rope, pair_C, half)
    return kept_C * rate_C + (1 - kept_C) * rate_C / rope.factor


def _kept_by_turns(rope: sections.Rope, rate_C: Tensor) -> Tensor:
    """1 for pairs that turn `high` times in trained_length, 0 for those that turn `low` times, linear between."""
    turns_C = rope.length * rate_C / (2 * math.pi)
    return ((turns_C - rope.low) / (rope.most_turns - rope.low)).clamp(0, 1)


def _kept_by_number(rope: sections.Rope, pair_C: Tensor, half: int) -> Tensor:
    """1 up to the pair that turns `high` times in trained_length, 0 from the one that turns `low` times, linear between."""

    def turning(times: float) -> float:  # the number of the pair, between whole ones, that turns so many times
        return half * math.log(rope.length / (times * 2 * math.pi)) / math.log(rope.base)

    first, last = turning(rope.most_turns), turning(rope.low)
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    return 1 - ((pair_C - first) / max(last - first, 0.001)).clamp(0, 1)


def _size(rope: sections.Rope) -> float:
    """The factor on cos and sin: YaRN's, whose logits grow with the square of it."""
    return _longer(rope, rope.mscale) / _longer(rope, rope.mscale_all)


def logit_factor(rope: sections.Rope) -> float:
    """What logits are multiplied with: DeepSeek's form of YaRN, where channels that do not turn count as those that do."""
    return _longer(rope, rope.mscale_all) ** 2


def _longer(rope: sections.Rope, share: float) -> float:
    return 0.1 * share * math.log(rope.factor) + 1 if rope.scaling == "yarn" else 1.0
