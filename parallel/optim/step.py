"""Base classes of the project's optimizers, and the last operation of an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Group = dict[str, Any]  # a parameter group of torch.optim


class PerWeight(torch.optim.Optimizer):
    """Optimizer that updates each weight separately. update: (weight, its optimizer states, its parameter group) -> None, in place."""

    def __init__(self, groups: list[Group], update: Callable[[Tensor, dict[str, Tensor], Group], None]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.update(weight, self.state[weight], group)


class AdamWExcept(torch.optim.AdamW):
    """torch's AdamW, except for weights that the subclass updates itself (`update_itself`)."""

    def update_itself(self, weight: nn.Parameter, group: Group) -> bool:
        """Return True if the subclass updates this weight, in this method or in its `step`; False: AdamW updates it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        updated: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                grad = weight.grad
                if grad is not None and self.update_itself(weight, group):
                    updated.append((weight, grad))
                    weight.grad = None  # so that AdamW skips it
        super().step()
        for weight, grad in updated:
            weight.grad = grad


def decay_and_subtract(weight: Tensor, step: Tensor, *, lr: float, decay: float) -> None:
    """Set `weight` to weight - lr * decay * weight - step, in place. `step` (fp32) is rounded to the weight's dtype."""
    if decay:
        weight.mul_(1 - lr * decay)
    weight.sub_(step.to(weight.dtype))
