"""Computes K-FAC's directions (Martens and Grosse, arXiv 1503.05671; damping as in section 6.3), one matrix at a time, for the plain twin
(the second implementation, twin.py). Shares no code with parallel/kfac. Matrix W: y = W a for a row (token) a, I inputs, O outputs, R rows.

    A = mean of a a^T over a step's rows, divided by tr A / I        G = the same for g = dL/dy, divided by tr G / O
    every `refresh_every` updates     A <- ema A + (1 - ema) A of this step, G likewise; the first A and G are taken as they are
    `delay` updates later             P = (A + sqrt(damping) 1)^-1 and Q = (G + sqrt(damping) 1)^-1 are used
    direction                         Q M P        M: first moment of W's gradient [O, I]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe.recipe.sections.training import Kfac


class Watched(dict[str, Tensor]):
    """Weights (name in checkpoints -> tensor) that keep the rows of each matrix. rows: name -> (inputs [R, I], outputs [R, O])."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__(weights)
        self.rows: dict[str, tuple[Tensor, Tensor]] = {}

    def note(self, name: str, x: Tensor, y: Tensor) -> None:
        """Keep the inputs x and outputs y of the matrix `name`, if y gets a gradient."""
        if y.requires_grad:
            y.retain_grad()
            self.rows[name] = x.detach(), y

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return name -> (sum of a a^T, sum of g g^T) over the step's rows, after its backward pass. a: inputs, g: gradients of outputs."""
        return {name: (_sum(x), _sum(torch.zeros_like(y) if y.grad is None else y.grad)) for name, (x, y) in self.rows.items()}


Moments = dict[str, tuple[Tensor, Tensor]]  # name of a matrix -> (sum of a a^T, sum of g g^T) over a step's rows, see the top


def _sum(rows: Tensor) -> Tensor:
    wide = rows.double()
    return torch.einsum("ri,rj->ij", wide, wide)


@dataclass
class PlainKfac:
    """K-FAC's state between updates. factors: name of a matrix -> [A, G], each None before the matrix has had a row. used: name -> their
    damped inverses (P, Q)."""

    settings: Kfac
    updates: int = 0
    factors: dict[str, list[Tensor | None]] = field(default_factory=dict)
    used: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def begin_update(self, moments: Moments) -> None:
        """Average this step's sums `moments` into A and G if a refresh begins in this step; compute their inverses P and Q if one ends.
        Called before each update."""
        since = self.updates % self.settings.refresh_every
        for name, sums in moments.items() if since == 0 else ():
            held = self.factors.setdefault(name, [None, None])
            held[:] = [self._averaged(*pair) for pair in zip(held, sums, strict=True)]
        if since == self.settings.delay:
            both = {name: (a, g) for name, (a, g) in self.factors.items() if a is not None and g is not None}
            self.used = {name: (self._inverse(a), self._inverse(g)) for name, (a, g) in both.items()}
        self.updates += 1

    def _averaged(self, old: Tensor | None, total: Tensor) -> Tensor | None:
        if total.trace() == 0:  # an expert without rows
            return old
        new = total / (total.trace() / len(total))
        return new if old is None else self.settings.ema * old + (1 - self.settings.ema) * new

    def _inverse(self, factor: Tensor) -> Tensor:
        added = max(math.sqrt(self.settings.damping), len(factor) * 2.0**-23)  # at least fp32's rounding
        inverse: Tensor = torch.linalg.inv(factor + added * torch.eye(len(factor), dtype=factor.dtype))
        return inverse

    def direction(self, name: str, moment: Tensor) -> Tensor | None:
        """Return the direction of a matrix with first moment `moment` (M): Q M P for [O, I], P M Q for an expert's [I, O], with the damped
        inverses P of A and Q of G; None for a parameter that AdamW updates."""
        if name not in self.used or ("experts" in name.split(".") and not self.settings.experts):
            return None
        inputs, outputs = (inverse.to(moment.dtype) for inverse in self.used[name])
        return inputs @ moment @ outputs if "experts" in name.split(".") else outputs @ moment @ inputs
