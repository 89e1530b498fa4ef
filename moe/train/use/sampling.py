"""Chooses the next token from logits: the likeliest, or one drawn by softmax(logits / temperature) among the likely ones.

top_k    only the k likeliest                                               Fan et al., arXiv 1805.04833
top_p    the smallest set of likeliest tokens with total probability p      nucleus sampling, Holtzman et al., arXiv 1904.09751
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.errors import BadInput


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. `temperature` 0 takes the likeliest token; `top_k` and `top_p` None allow every token. Raises BadInput."""

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise BadInput("--temperature", got=self.temperature, needed="at least 0, and finite", fix="--temperature 0.8")
        if self.top_k is not None and self.top_k < 1:
            raise BadInput("--top_k", got=self.top_k, needed="at least 1 token", fix="--top_k 40")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise BadInput("--top_p", got=self.top_p, needed="more than 0, at most 1", fix="--top_p 0.9")

    def choose(self, logits_BV: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """Choose one token for each row of logits, fp32 on the host. Each row draws from its own generator. Raises BadInput."""
        if not logits_BV.isfinite().all():
            fix = "take an earlier checkpoint (--step), or lower optimizer.lr"
            raise BadInput("model", got="logits that are not finite", needed="finite weights", fix=fix)
        if self.temperature == 0:
            return logits_BV.argmax(-1).tolist()
        probs_BV = self._likely(logits_BV / self.temperature).softmax(-1)
        return [int(torch.multinomial(row, 1, generator=g)) for row, g in zip(probs_BV, generators, strict=True)]

    def _likely(self, logits_BV: Tensor) -> Tensor:
        """Set logits of excluded tokens to -inf. Tokens tied with the last of top_k stay."""
        if self.top_k is not None and self.top_k < logits_BV.shape[1]:
            least_B1 = logits_BV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
            probs_BV = sorted_BV.softmax(-1)
            enough_BV = probs_BV.cumsum(-1) - probs_BV >= self.top_p  # the tokens before it have p already
            logits_BV = logits_BV.masked_fill(torch.zeros_like(enough_BV).scatter(1, order_BV, enough_BV), -math.inf)
        return logits_BV
