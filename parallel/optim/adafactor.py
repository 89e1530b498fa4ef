"""Adafactor (Shazeer and Stern, arXiv 1804.04235, algorithms 4 and 5) without first moment: an n x m matrix has n + m optimizer states.

    R  <-  b R + (1 - b) mean of (G^2 + eps) over columns        C: the same over rows        b = 1 - t^-0.8
    V = R C^T / mean(R)        U = G / sqrt(V)        U  <-  U / max(1, rms(U))
    W  <-  W - a U - lr decay W        a = lr max(floor, rms(W)) if `step` is relative, or lr if it is absolute

A vector keeps the mean of all its squares. Each expert is a matrix of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from parallel.data.engine import Rule, StateDims
from parallel.data.whole import Whole
from parallel.optim.step import Group, PerWeight, decay_and_subtract

ROW, COLUMN, SQUARE = "exp_avg_sq_row", "exp_avg_sq_column", "exp_avg_sq"  # names of the optimizer states: R and C; V of a vector
DECAY = 0.8  # in step t, the newest squares have weight t^-DECAY in the running means
EPS = 1e-30  # added to squared gradients, so that V is never 0
FLOOR = 1e-3  # lower bound of rms(W) in a relative step


@dataclass(frozen=True)
class Adafactor(Rule):
    """The Rule of Adafactor. step: relative to rms(W), or absolute. decays: (name, parameter) -> True if weight decay applies."""

    step: Literal["relative", "absolute"]
    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {ROW: -1, COLUMN: -2} if num_dims > 1 else {SQUARE: None}

    def build(self, groups: list[Group], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        assert not any(whole.cuts for whole in (wholes or {}).values()), "means are of whole matrices"
        return PerWeight(groups, self._update)

    def _update(self, weight: Tensor, state: dict[str, Tensor], group: Group) -> None:
        assert weight.grad is not None
        grad = weight.grad.float()
        square, dims = grad.square().add_(EPS), tuple(range(max(-2, -weight.ndim), 0))
        means = {ROW: square.mean(-1), COLUMN: square.mean(-2)} if weight.ndim > 1 else {SQUARE: square}
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state |= {kind: torch.zeros_like(mean, dtype=weight.dtype) for kind, mean in means.items()}
        state["step"] += 1
        new = state["step"] ** -DECAY  # weight of the newest squares; 1 in the first step
        for kind, mean in means.items():
            state[kind].copy_(torch.lerp(state[kind].float(), mean, new))
        update = grad * _inverse_root({kind: state[kind].float() for kind in means})
        update /= _rms(update, dims).clamp_min(1.0)
        if self.step == "relative":
            update *= _rms(weight.float(), dims).clamp_min(FLOOR)
        decay_and_subtract(weight, update.mul_(group["lr"]), lr=group["lr"], decay=group["weight_decay"])


def _inverse_root(means: dict[str, Tensor]) -> Tensor:
    """Return 1 / sqrt(V). means: ROW and COLUMN of matrices, or SQUARE of a vector."""
    if SQUARE in means:
        return means[SQUARE].rsqrt()
    rows, columns = means[ROW], means[COLUMN]
    return (rows / rows.mean(-1, keepdim=True)).rsqrt()[..., :, None] * columns.rsqrt()[..., None, :]


def _rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the root mean square of x over these dims, which keep size 1."""
    return x.square().mean(dims, keepdim=True).sqrt()
