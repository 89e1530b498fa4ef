"""Activation checkpointing: a part of the model saves only its input, and computes its forward pass again in the backward pass.

    forward        x --part--> y                  saved: x                 (otherwise: every activation inside the part)
    backward       x --part--> y', then its gradient                       costs about one more forward pass of the part

The second forward pass must not choose other experts. Slightly different bits, from another kernel or another order of a sum, could
change the choice, and the gradient would belong to another function. `Replay` stores decisions by name: the first pass makes them,
the second reuses them. Source: Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Value = TypeVar("Value")


def recomputed(part: Callable[..., Value], *args: Any) -> Value:
    """Return part(*args), and save only `args` for the backward pass, which computes the activations again. Example:
    `x_BLD, report = recomputed(block, x_BLD, context)`.

    Random numbers inside must be functions of the position (parallel/numerics/random.py), because torch's generator is not rewound. The
    second pass runs to the part's end, so that all ranks call the same collectives in the same order."""
    if not torch.is_grad_enabled():
        return part(*args)

    def whole(*args: Any) -> Any:
        out = part(*args)
        return (_Return.apply(out[0]), *out[1:]) if isinstance(out, tuple) else _Return.apply(out)

    out: Value = checkpoint(whole, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False)
    return out


class _Return(torch.autograd.Function):
    """Return x, the part's result. The backward pass reads a saved tensor here, so torch runs the second forward pass at this point, before
    FSDP and ZeRO-3 gather weights for the part's backward pass. A second forward pass after this gather would free these weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return grad


class Replay:
    """Stores the decisions (such as routing) of one forward pass by name, so that the recomputed pass makes the same decisions."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, name: str, decide: Callable[[], Value]) -> Value:
        """Return decide() on the first call with this name, and its stored result on later calls."""
        if name not in self._made:
            self._made[name] = decide()
        value: Value = self._made[name]
        return value
