"""SGD with momentum: one tensor in addition to each weight, half of AdamW's states.

    M  <-  mu M + G        W  <-  W - lr M - lr decay W

As in torch's SGD without dampening, but with decoupled decay, so that a recipe's decay means the same for every kind.
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
    """The optimizer as data."""

    momentum: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {MOMENTUM: None}

    def build(self, groups: list[dict[str, Any]], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        return Momentum(groups, momentum=self.momentum)


class Momentum(torch.optim.Optimizer):
    """torch's form of it; sums in fp32, whatever the weights' dtype."""

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
                held = moved(self.state[weight], weight, momentum=self.momentum)
                decay_and_subtract(weight, held.mul(group["lr"]), lr=group["lr"], decay=group["weight_decay"])


def moved(state: dict[str, Tensor], weight: Tensor, *, momentum: float) -> Tensor:
    """The momentum after this step's gradient, in fp32; the state has it in the weight's dtype."""
    assert weight.grad is not None
    if MOMENTUM not in state:
        state["step"] = torch.zeros((), device=weight.device)
        state[MOMENTUM] = torch.zeros_like(weight)
    state["step"] += 1
    held = state[MOMENTUM].float().mul(momentum).add_(weight.grad.float())
    state[MOMENTUM].copy_(held)
    return held
