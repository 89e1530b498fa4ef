"""Optimizer with K-FAC's direction and the length of AdamW's step: grafting (Agarwal et al., arXiv 2002.11803).

    M, V   AdamW's moments of the gradients                   S = M^ / (sqrt(V^) + eps)      AdamW's step; M^, V^: with bias corrections
    D = G^-1 M A^-1                                           K-FAC's direction
    W  <-  W - lr (|S| / |D|) D - lr decay W                  for each matrix, with Frobenius norms; each expert is a matrix

A and G are K-FAC's factors (factors.py): second moments of a linear layer's inputs and of its output gradients. AdamW's learning rates
and schedules can be used, and the optimizer states are AdamW's M and V. Parameters outside of K-FAC, and linear layers whose factors have
no inverses yet, take AdamW's step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from parallel.data.engine import MOMENTS, Engine, Load
from parallel.data.stepped import Stepped
from parallel.kfac.factors import direction
from parallel.kfac.kfac import Kfac, Linear
from parallel.optim.shared import AdamWExcept, Group, decay_and_subtract
from parallel.watch.audit import Held, copies_of


class Grafted(AdamWExcept):
    """AdamW, except that the weights of K-FAC's linear layers take a step in K-FAC's direction with the length of AdamW's step. linears: id
    of a weight that this optimizer updates -> its linear layer; KfacEngine sets it."""

    def __init__(self, groups: list[Group], *, kfac: Kfac, **settings: Any) -> None:
        super().__init__(groups, **settings)
        self.kfac = kfac
        self.linears: dict[int, Linear] = {}

    def update_itself(self, weight: nn.Parameter, group: Group) -> bool:
        linear, grad = self.linears.get(id(weight)), weight.grad
        if linear is None or not self.kfac.has_inverses:
            return False
        assert grad is not None
        state: dict[str, Tensor] = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state |= {moment: torch.zeros_like(weight) for moment in MOMENTS}
        beta1, beta2 = group["betas"]
        state["step"] += 1
        steps = float(state["step"])
        mean, square = (state[moment] for moment in MOMENTS)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        adam = mean.float() / (1 - beta1**steps) / ((square.float() / (1 - beta2**steps)).sqrt_().add_(group["eps"]))
        update = grafted(direction(mean, *self.kfac.inverses(linear)), adam)
        decay_and_subtract(weight, update.mul_(group["lr"]), lr=group["lr"], decay=group["weight_decay"])
        return True


def grafted(direction: Tensor, length: Tensor) -> Tensor:
    """Return `direction` [..., rows, columns] scaled to the norm of `length`, matrix by matrix. If a matrix of `direction` is zero, the
    matrix of `length` is returned."""
    norm, wanted = (torch.linalg.matrix_norm(t, keepdim=True) for t in (direction, length))
    return torch.where(norm > 0, direction * (wanted / torch.where(norm > 0, norm, 1.0)), length)


class KfacEngine:
    """Wrapper of an engine whose optimizer is `Grafted`. Lets K-FAC record forward passes. Before each update, does the part of K-FAC's
    refresh (recomputation of factors and inverses) that is due. All other methods and attributes are the engine's."""

    def __init__(self, engine: Engine, kfac: Kfac) -> None:
        self.engine, self.kfac = engine, kfac
        assert isinstance(engine, Stepped) and isinstance(engine.optimizer, Grafted)
        # ids of the master weights, not of the model's weights, if these are casts of the master weights (precision.casts: step)
        engine.optimizer.linears = {id(engine.parameters[name]): linear for name, linear in kfac.linears.items()}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def forward(self, *args: Any, last: bool) -> Any:
        with self.kfac.recording():
            return self.engine.forward(*args, last=last)

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        self.kfac.finish()
        self.engine.step(lr, factor=factor)

    def drop_gradients(self) -> None:
        self.kfac.discard_step()
        self.engine.drop_gradients()

    def tensors(self) -> Iterator[Held]:
        """Yield the engine's tensors, running factors and inverses. Sums and next inverses are left out, because passes write them."""
        yield from self.engine.tensors()
        for (kind, name), factor in self.kfac.factors.items():
            yield copies_of(name, f"factor {kind}", factor.running, factor.layout)
            yield copies_of(name, f"inverse {kind}", factor.inverse, factor.layout)

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        self.engine.load_state(names, load, steps=steps)
        self.kfac.updates = steps
