"""Optimizer that takes K-FAC's direction with the length of AdamW's step.

    M   mean of the gradients (AdamW's first moment)          S = M^ / (sqrt(V^) + eps)      AdamW's step, with bias corrections
    D = G^-1 M A^-1
    W  <-  W - lr (S's norm / D's norm) D - lr decay W        each matrix, each expert, with its own norms

Grafting (Agarwal et al., arXiv 2002.11803) combines the direction of one method with the length of another. So AdamW's learning rates and
schedules can be used, and K-FAC's bound on the step (KL clip) is not needed. The optimizer states are AdamW's two moments, in the same
checkpoints. Parameters outside K-FAC, and linears that have no inverses yet, take AdamW's step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from parallel.data.engine import Engine, Load
from parallel.kfac.factors import direction
from parallel.kfac.kfac import Kfac
from parallel.optim.step import AdamWExcept, decay_and_subtract

Group = dict[str, Any]


class Grafted(AdamWExcept):
    """AdamW in which the linears of `kfac` take the grafted step."""

    def __init__(self, groups: list[Group], *, kfac: Kfac, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.kfac = kfac
        self.linears = {id(linear.weight): linear for linear in kfac.linears.values()}

    def update_itself(self, weight: nn.Parameter, group: Group) -> bool:
        linear, grad = self.linears.get(id(weight)), weight.grad
        if linear is None or not self.kfac.has_inverses:
            return False
        assert grad is not None
        state = self._state_of(weight)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = float(state["step"])
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        adam = mean.float() / (1 - beta1**steps) / ((square.float() / (1 - beta2**steps)).sqrt_().add_(group["eps"]))
        moved = grafted(direction(mean, *self.kfac.inverses(linear)), adam)
        decay_and_subtract(weight, moved.mul_(group["lr"]), lr=group["lr"], decay=group["weight_decay"])
        return True

    def _state_of(self, weight: nn.Parameter) -> dict[str, Tensor]:
        """Return AdamW's states of the weight, created as AdamW would create them."""
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state |= {moment: torch.zeros_like(weight) for moment in ("exp_avg", "exp_avg_sq")}
            self.state[weight] = state
        return state


def grafted(direction: Tensor, length: Tensor) -> Tensor:
    """Scale each matrix of `direction` to the norm of the same matrix of `length`. Where the direction is zero, return `length`."""
    norm, wanted = (torch.linalg.matrix_norm(t, keepdim=True) for t in (direction, length))
    return torch.where(norm > 0, direction * (wanted / torch.where(norm > 0, norm, 1.0)), length)


class KfacEngine:
    """An engine with a `Grafted` optimizer. It also records forward passes, and finishes K-FAC's work before each update.

    All other methods and attributes are those of `engine`.
    """

    def __init__(self, engine: Engine, kfac: Kfac) -> None:
        self.engine, self.kfac = engine, kfac

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, *args: Any, last: bool) -> Any:
        with self.kfac.recording():
            return self.engine.forward(*args, last=last)

    def step(self, lr: float) -> None:
        self.kfac.finish()
        self.engine.step(lr)

    def drop_gradients(self) -> None:
        self.kfac.forget()
        self.engine.drop_gradients()

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        self.engine.load_state(names, load, steps=steps)
        self.kfac.updates = steps
