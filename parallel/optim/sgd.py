"""SGD with momentum: one optimizer state for each weight, half as many as AdamW's.

    M  <-  mu M + G        W  <-  W - lr M - lr decay W

As torch's SGD without dampening, but with decoupled weight decay, so that a recipe's weight decay means the same for all optimizers.
Source: Polyak 1964.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.data.engine import Rule, StateDims
from parallel.data.whole import Whole
from parallel.optim.step import decay_and_subtract

MOMENTUM = "momentum"


@dataclass(frozen=True)
class Sgd(Rule):
    """Facts and settings of SGD."""

    momentum: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {MOMENTUM: None}

    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        return SgdOptimizer(groups, momentum=self.momentum)


class SgdOptimizer(torch.optim.Optimizer):
    """SGD as a torch.optim.Optimizer. It computes in fp32 for weights of any dtype."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.momentum = momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                held = updated_momentum(self.state[weight], weight, momentum=self.momentum)
                decay_and_subtract(weight, held.mul(group["lr"]), lr=group["lr"], decay=group["weight_decay"])


def updated_momentum(state: dict[str, Tensor], weight: Tensor, *, momentum: float) -> Tensor:
    """Add this step's gradient to the momentum. Returns it in fp32, and stores it in `state` in the weight's dtype."""
    assert weight.grad is not None
    if MOMENTUM not in state:
        state["step"] = torch.zeros((), device=weight.device)
        state[MOMENTUM] = torch.zeros_like(weight)
    state["step"] += 1
    held = state[MOMENTUM].float().mul(momentum).add_(weight.grad.float())
    state[MOMENTUM].copy_(held)
    return held
