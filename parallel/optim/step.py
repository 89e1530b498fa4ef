"""What the project's optimizers share: AdamW for all but some weights, and the last line of a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AdamWBut(torch.optim.AdamW):
    """torch's AdamW, except for weights that `move` steps itself: it says whether it did."""

    def move(self, weight: nn.Parameter, group: dict[str, Any]) -> bool:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        moved: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                grad = weight.grad
                if grad is not None and self.move(weight, group):
                    moved.append((weight, grad))
                    weight.grad = None  # so that AdamW skips it
        super().step()
        for weight, grad in moved:
            weight.grad = grad


def decay_and_subtract(weight: Tensor, step: Tensor, *, lr: float, decay: float) -> None:
    """W <- W - lr decay W - step, in place; the step is fp32 and rounded to the weight's dtype."""
    weight.mul_(1 - lr * decay).sub_(step.to(weight.dtype))
