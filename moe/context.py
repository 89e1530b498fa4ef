"""What one forward pass knows beside its tokens: where they stand in the run, and the scale of auxiliary losses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.random import key_of, uniform


@dataclass(frozen=True)
class Context:
    """`position_T` int64 [T]: each token's index in the whole step, so that noise is the same on every layout.

    `auxiliary_scale` multiplies balance and z losses as they join the backward pass: this pass's share of the global
    batch, times the loss scale.
    """

    seed: int
    step: int
    position_T: Tensor
    auxiliary_scale: float = 1.0

    @staticmethod
    def of(tokens_BL: Tensor, *, seed: int = 0, step: int = 0, first_sequence: int = 0, auxiliary_scale: float = 1.0) -> Context:
        """For tokens [B, L] that are sequences first_sequence, first_sequence + 1, ... of the step."""
        batch, length = tokens_BL.shape
        start = first_sequence * length
        return Context(seed, step, torch.arange(start, start + batch * length, device=tokens_BL.device), auxiliary_scale)

    @staticmethod
    def fresh(tokens_BL: Tensor) -> Context:
        """For a model that is used alone: noise seeded from torch's own generator."""
        return Context.of(tokens_BL, seed=int(torch.randint(2**31, ()).item()))

    def uniform(self, name: str, width: int) -> Tensor:
        """Float32 [T, width] in [0, 1] for one use in one layer."""
        return uniform(key_of(self.seed, self.step, name), self.position_T, width)

    def dropout_scale(self, name: str, width: int, p: float) -> Tensor:
        """Float32 [T, width]: 0 with probability p, else 1 / (1 - p)."""
        return (self.uniform(name, width) >= p).float() / (1 - p)
