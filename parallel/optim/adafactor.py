"""Adafactor: of a matrix's squared gradients it keeps the means of rows and of columns, n + m numbers in the place of 2 n m.

    R  <-  b R + (1 - b) mean of (G^2 + eps) over columns        C: over rows        b = 1 - t^-0.8
    V = R C^T / mean(R)        U = G / sqrt(V)        U  <-  U / max(1, rms(U))
    W  <-  W - a U - lr decay W        a = lr max(floor, rms(W)) relative, or lr

A vector keeps its squares whole. Each expert is a matrix of its own, with its own rms, so nothing depends on who holds it (Mesh
TensorFlow takes them together). No first moment, as Switch and GLaM trained. Source: Shazeer and Stern, arXiv 1804.04235, algorithms 4
and 5, with their constants; `optimizer.schedule: inverse_sqrt` is its rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.data.engine import Rule, StateDims
from parallel.data.whole import Whole
from parallel.optim.step import decay_and_subtract

ROW, COLUMN, SQUARE = "exp_avg_sq_row", "exp_avg_sq_column", "exp_avg_sq"
DECAY = 0.8  # squares are averaged with the weight t^-DECAY of the newest
EPS = 1e-30  # added to squares, which may all be 0
FLOOR = 1e-3  # of the weights' root mean square, to which steps are relative


@dataclass(frozen=True)
class Adafactor(Rule):
    """The optimizer as data. `step`: whether steps are relative to the weights' root mean square."""

    step: Literal["relative", "absolute"]
    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {ROW: -1, COLUMN: -2} if num_dims > 1 else {SQUARE: None}

    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        assert not any(whole.cuts for whole in (wholes or {}).values()), "means are of whole matrices"
        return Factored(groups, rule=self)


class Factored(torch.optim.Optimizer):
    """torch's form of it."""

    def __init__(self, groups: list[dict[str, Any]], *, rule: Adafactor) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.rule = rule

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._move(weight, group)

    def _move(self, weight: Tensor, group: dict[str, Any]) -> None:
        rule, state, grad = self.rule, self.state[weight], weight.grad
        assert grad is not None
        grad = grad.float()
        square, dims = grad.square().add_(EPS), tuple(range(max(-2, -weight.ndim), 0))
        means = {ROW: square.mean(-1), COLUMN: square.mean(-2)} if weight.ndim > 1 else {SQUARE: square}
        if not state:
            state["step"] = torch.zeros((), device=weight.device)
            state |= {kind: torch.zeros_like(mean, dtype=weight.dtype) for kind, mean in means.items()}
        state["step"] += 1
        new = state["step"] ** -DECAY  # 1 in the first step
        for kind, mean in means.items():
            state[kind].copy_(torch.lerp(state[kind].float(), mean, new))
        update = grad * _inverse_root({kind: state[kind].float() for kind in means})
        update /= _rms(update, dims).clamp_min(1.0)
        if rule.step == "relative":
            update *= _rms(weight.float(), dims).clamp_min(FLOOR)
        decay_and_subtract(weight, update.mul_(group["lr"]), lr=group["lr"], decay=group["weight_decay"])


def _inverse_root(held: dict[str, Tensor]) -> Tensor:
    """1 / sqrt(V)."""
    if SQUARE in held:
        return held[SQUARE].rsqrt()
    rows, columns = held[ROW], held[COLUMN]
    return (rows / rows.mean(-1, keepdim=True)).rsqrt()[..., :, None] * columns.rsqrt()[..., None, :]


def _rms(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Root mean square of a vector or of each matrix, with its dims kept at 1."""
    return x.square().mean(dims, keepdim=True).sqrt()
