"""The sequences that every layout of `moe verify` trains on."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.verify.cases import BATCH, LENGTH

PADDING = -100  # in place of a token


def batch(step: int, *, padded: bool = False, length: int = LENGTH, size: int = BATCH) -> Tensor:
    """The sequences of one step, int64 [size, length + 1]; tokens are uneven, so that experts are too.

    The first two differ: attention over equal tokens gives equal states, and a router that ranks tokens would order them by rounding.
    `padded`: two of three sequences end early, the later ones earlier, and the last one has no token at all, so that ranks and
    micro-batches have different numbers of tokens. Every fourth token is then read and not predicted: -101 - id is in its place.
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
    """The ids of tokens, also of those that are not predicted; 0 for PADDING."""
    return tokens.clone().apply_(lambda token: 0 if token == PADDING else token if token >= 0 else -101 - token)


def predicted(tokens: Tensor) -> Tensor:
    """The ids of tokens that are predicted, and PADDING for the others."""
    return tokens.clone().apply_(lambda token: token if token >= 0 else PADDING)
