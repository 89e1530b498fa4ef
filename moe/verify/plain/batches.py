"""The sequences that every layout of `moe verify` trains on."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.verify.cases import BATCH, LENGTH

PADDING = -100  # takes the place of a missing token


def batch(step: int, *, padded: bool = False, length: int = LENGTH, size: int = BATCH) -> Tensor:
    """The sequences of one step, int64 [size, length + 1]. Tokens are unevenly distributed, so that experts are unevenly loaded.

    The first two tokens differ. Attention over equal tokens gives equal states, and a router that ranks tokens would then order them by
    rounding errors.
    `padded`: two of three sequences end early, later ones earlier, and the last has no token at all, so that ranks and micro-batches have
    different numbers of tokens. Every fourth token is then an input but not a target; it is stored as -101 - id.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.rand(size, length + 1, generator=generator) ** 2 * 256).long()
    tokens[:, 1] = torch.where(tokens[:, 1] == tokens[:, 0], (tokens[:, 0] + 1) % 256, tokens[:, 1])
    for number in range(size) if padded else ():
        unpredicted = slice(1 + number % 4, None, 4)
        tokens[number, unpredicted] = -101 - tokens[number, unpredicted]
        kept = length + 1 - (number % 3) * (number + step % 2) // 2
        tokens[number, max(2, kept) :] = PADDING
    if padded:
        tokens[-1] = PADDING
    return tokens


def ids(tokens: Tensor) -> Tensor:
    """The ids of tokens, also of tokens that are not targets; 0 for PADDING."""
    return tokens.clone().apply_(lambda token: 0 if token == PADDING else token if token >= 0 else -101 - token)


def predicted(tokens: Tensor) -> Tensor:
    """The ids of tokens that are targets, and PADDING for all others."""
    return tokens.clone().apply_(lambda token: token if token >= 0 else PADDING)
