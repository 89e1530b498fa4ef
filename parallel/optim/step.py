"""Base class and last operation of the project's optimizers: AdamW with exceptions, and the update of a weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class AdamWExcept(torch.optim.AdamW):
    """torch's AdamW for all weights but those that `update_itself` updates."""

    def update_itself(self, weight: nn.Parameter, group: dict[str, Any]) -> bool:
        """Update the weight and return True, or return False to let AdamW update it."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        moved: list[tuple[nn.Parameter, Tensor]] = []
        for group in self.param_groups:
            for weight in group["params"]:
                grad = weight.grad
                if grad is not None and self.update_itself(weight, group):
                    moved.append((weight, grad))
                    weight.grad = None  # so that AdamW skips it
        super().step()
        for weight, grad in moved:
            weight.grad = grad


def decay_and_subtract(weight: Tensor, step: Tensor, *, lr: float, decay: float) -> None:
    """Set W to W - lr decay W - step, in place. The fp32 `step` is rounded to the weight's dtype."""
    weight.mul_(1 - lr * decay).sub_(step.to(weight.dtype))
