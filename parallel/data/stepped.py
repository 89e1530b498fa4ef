"""Common base of the engines in which torch's optimizer updates this rank's parameters: unsharded parameters (DDP), or local shards
(FSDP). Also sets the learning rate of an optimizer's next step, and the factor by which it multiplies gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel.data.engine import Load, OfStages, Rule
from parallel.data.load import fill_stepped, held_of, kept_of
from parallel.mesh.layout import Layouts
from parallel.mesh.mesh import Mesh
from parallel.watch.audit import Held, copies_of


@contextmanager
def at_rate(
    lr: float, factor: float, optimizer: torch.optim.Optimizer, *, weights: Iterable[Tensor], grads: Iterable[Tensor] = ()
) -> Iterator[None]:
    """Return a context in which optimizer.step() updates `weights` with learning rate `lr` and with the gradients times `factor`. torch's
    fused AdamW divides gradients by its `grad_scale` (1 / factor, in fp32) when it reads them. For other optimizers, and for fp64 weights,
    the gradients `grads` are multiplied in place."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    first = next(iter(weights), None)
    if factor == 1.0 or first is None:
        yield
    elif _divides(optimizer, factor) and first.dtype != torch.float64:
        optimizer.grad_scale = torch.full((), 1 / factor, dtype=torch.float32, device=first.device)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            optimizer.grad_scale = None  # type: ignore[attr-defined]
    else:
        multiplied = list(grads)
        assert multiplied, f"{type(optimizer).__name__} does not divide gradients itself: a factor of {factor} needs `grads`"
        torch._foreach_mul_(multiplied, factor)
        yield


def _divides(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """Return whether the optimizer divides by `grad_scale`: all its groups are fused AdamW's, and 1 / factor is finite in fp32."""
    fused = type(optimizer) is torch.optim.AdamW and all(group["fused"] for group in optimizer.param_groups)
    return fused and abs(factor) > 1 / torch.finfo(torch.float32).max


class Stepped(OfStages):
    """Base class of DDP and FSDP. Subclasses define `reduce`, which sums gradients over ranks. rule: the optimizer's settings. parameters:
    parameter name -> the tensor that the optimizer updates."""

    rule: Rule
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]

    def __init__(self, module: nn.Module, *, layouts: Layouts, mesh: Mesh) -> None:
        self.module, self.layouts, self.mesh = module, layouts, mesh

    def forward(self, *args: Any, last: bool) -> Any:
        return self.module(*args)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        if last:
            self.reduce()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (parameter name, gradient), with the shape of the tensor that the optimizer updates."""
        return ((name, p.grad) for name, p in self.parameters.items() if p.grad is not None)

    def held(self, name: str, kind: str, tensor: Tensor) -> Held:
        """Return `tensor` with the axes along which ranks hold copies of it. name: the parameter's name. kind: "weight", "gradient", ..."""
        return copies_of(name, kind, tensor, self.layouts[name])

    def owned_gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, grad in self.gradients():
            if self.layouts[name].is_owner(self.mesh):
                yield self.layouts[name].family, grad

    def tensors(self) -> Iterator[Held]:
        for name, parameter in self.parameters.items():
            for kind, tensor in held_of(parameter, self.optimizer):
                yield self.held(name, kind, tensor)

    def summed_gradients(self) -> Iterator[Held]:
        return (self.held(name, "gradient", grad) for name, grad in self.gradients())

    def copy_again(self) -> bool:
        return False

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        weights = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        grads = [parameter.grad for parameter in weights if parameter.grad is not None]
        with at_rate(lr, factor, self.optimizer, weights=weights, grads=grads):
            self.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def gradient(self, name: str) -> Tensor:
        return dict(self.gradients())[name]

    def state(self, name: str) -> dict[str, Tensor]:
        parameter = self.parameters[name]
        kept = self.rule.kept(name, parameter.ndim) if parameter.requires_grad else {}
        return {"weight": parameter.detach()} | kept_of(parameter, self.optimizer, kept)

    def load_state(self, names: Iterable[str], load: Load, *, steps: int) -> None:
        for name in names:
            parameter, start = self.parameters[name], self.start(name)
            if parameter.numel():
                kept = self.rule.kept(name, parameter.ndim)
                fill_stepped(parameter, self.optimizer, partial(load, name), kept=kept, steps=steps, start=start)

    def start(self, name: str) -> Sequence[int]:
        """Return the index of the first element that this rank's optimizer updates, one number for each dim, within the rank's tensor- or
        expert-parallel shard. An empty sequence means index 0 in every dim."""
        return ()
