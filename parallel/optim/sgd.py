"""SGD with momentum (Polyak 1964), like torch's SGD without dampening, but with decoupled weight decay as in AdamW.

M  <-  mu M + G        W  <-  W - lr M - lr decay W        W weights, G gradient, M momentum, lr learning rate
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.data.engine import Rule, StateDims
from parallel.data.whole import Whole
from parallel.optim.shared import Group, PerWeight, decay_and_subtract

MOMENTUM = "momentum"  # name of the optimizer state M


@dataclass(frozen=True)
class Sgd(Rule):
    """Settings of SGD with momentum, computed in fp32. decays: (name, parameter) -> True if weight decay applies."""

    momentum: float
    weight_decay: float
    decays: Callable[[str, Tensor], bool]

    def kept(self, name: str, num_dims: int) -> StateDims:
        return {MOMENTUM: None}

    def build(self, groups: list[Group], wholes: Mapping[int, Whole] | None = None) -> torch.optim.Optimizer:
        return PerWeight(groups, self._update)

    def _update(self, weight: Tensor, state: dict[str, Tensor], group: Group) -> None:
        momentum = updated_momentum(state, weight, momentum=self.momentum)
        decay_and_subtract(weight, momentum.mul(group["lr"]), lr=group["lr"], decay=group["weight_decay"])


def updated_momentum(state: dict[str, Tensor], weight: Tensor, *, momentum: float) -> Tensor:
    """Add the weight's gradient to the momentum M in `state`, which is stored in the weight's dtype. Return M in fp32. momentum: mu."""
    assert weight.grad is not None
    if MOMENTUM not in state:
        state["step"] = torch.zeros((), device=weight.device)
        state[MOMENTUM] = torch.zeros_like(weight)
    state["step"] += 1
    new = state[MOMENTUM].float().mul_(momentum).add_(weight.grad.float())  # .float() copies only narrower momenta
    if new is not state[MOMENTUM]:
        state[MOMENTUM].copy_(new)
    return new
