"""The sequences that every layout of `moe verify` trains on."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.verify.cases import BATCH, LENGTH

PADDING = -100  # stored in place of a token at positions after the end of a sequence


def batch(step: int, *, padded: bool = False, length: int = LENGTH, size: int = BATCH) -> Tensor:
    """Return the sequences of one step, int64 [size, length + 1]. Token ids are unevenly distributed, so that experts get unequal loads.

    The first two tokens of a sequence differ. Equal ones would give equal states, which a router that ranks tokens would order by rounding
    errors.
    `padded`: two of three sequences end early, later ones earlier, and the last one has no token, so that ranks and micro-batches have
    unequal numbers of tokens. Every fourth token is then an input but not a target; it is stored as -101 - id.
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
    """Token ids to read, from what `batch` stores: also of tokens that are not targets; 0 for PADDING."""
    return tokens.clone().apply_(lambda token: 0 if token == PADDING else token if token >= 0 else -101 - token)


def predicted(tokens: Tensor) -> Tensor:
    """Token ids to predict, from what `batch` stores: PADDING for tokens that are not targets."""
    return tokens.clone().apply_(lambda token: token if token >= 0 else PADDING)
