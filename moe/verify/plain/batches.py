"""Makes the batches on which `moe verify` trains both the layouts and the plain twin (a second implementation without parallelism)."""

from __future__ import annotations

import torch
from torch import Tensor

from moe.verify.cases import BATCH, LENGTH

PADDING = -100  # in place of a token after the end of a sequence
BEGIN = 2**32  # subtracted from the first token of each chat in a packed sequence, to mark it


def batch(step: int, *, padded: bool = False, packed: bool = False, length: int = LENGTH, size: int = BATCH) -> Tensor:
    """Return the sequences of one step, int64 [size, length + 1]. Low token ids are more frequent, so that experts get unequal loads.

    padded: ranks and micro-batches have unequal numbers of tokens, because about two of three sequences end early and the last one is
    empty. Every fourth token is then an input but not a target; it is stored as -101 - id.
    packed: as padded, with several chats in each sequence. The first token of each chat is not a target; it is stored as -101 - id - BEGIN.
    """
    generator = torch.Generator().manual_seed(step)
    tokens = (torch.rand(size, length + 1, generator=generator) ** 2 * 256).long()
    # two equal first tokens would have equal hidden states, and a router that sorts tokens would order them by rounding errors
    tokens[:, 1] = torch.where(tokens[:, 1] == tokens[:, 0], (tokens[:, 0] + 1) % 256, tokens[:, 1])
    for number in range(size) if padded or packed else ():
        unpredicted = slice(1 + number % 4, None, 4)
        tokens[number, unpredicted] = -101 - tokens[number, unpredicted]
        for first in range(0, length + 1, 5 + number % 4) if packed else ():
            tokens[number, first] = -101 - ids(tokens[number, first]) - BEGIN
        kept = length + 1 - (number % 3) * (number + step % 2) // 2
        tokens[number, max(2, kept) :] = PADDING
    if padded or packed:
        tokens[-1] = PADDING
    return tokens


def ids(tokens: Tensor) -> Tensor:
    """Return the input ids of `tokens`, which `batch` returned: stored values -101 - id and -101 - id - BEGIN become id, and PADDING
    becomes 0."""
    return tokens.clone().apply_(lambda token: 0 if token == PADDING else token if token >= 0 else (-101 - token) % BEGIN)


def predicted(tokens: Tensor) -> Tensor:
    """Return the target ids of `tokens`, which `batch` returned. Negative numbers mark tokens that are not targets; they become PADDING."""
    return tokens.clone().apply_(lambda token: token if token >= 0 else PADDING)
