"""Sets the learning rate of an optimizer's next step, and the factor by which it multiplies gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


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
