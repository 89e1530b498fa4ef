"""Activation checkpointing: a part of the model keeps only its input, and runs forward again when its gradient is needed.

    forward        x --part--> y                  kept: x                  (otherwise: every activation inside the part)
    backward       x --part--> y', then its gradient                       costs about one more forward pass of the part

What a pass *decided* (which expert a token went to) must not be decided again. Slightly different bits, from another kernel or
another order of a sum, could change the choice, and the gradient would be that of another function. `Replay` keeps decisions by
name: the first pass makes them, the second reuses them. Source: Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Value = TypeVar("Value")


def recomputed(part: Callable[..., Value], *args: Any) -> Value:
    """part(*args), whose activations are computed again in the backward pass. Without gradients it is a plain call.

    Random numbers inside must be functions of their place (parallel/random.py), since torch's generator is not rewound. The
    second pass runs to the part's end, so that ranks whose parts contain collectives run the same ones in the same order.
    """
    if not torch.is_grad_enabled():
        return part(*args)

    def whole(*args: Any) -> Any:
        out = part(*args)
        return (_Return.apply(out[0]), *out[1:]) if isinstance(out, tuple) else _Return.apply(out)

    out: Value = checkpoint(whole, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False)
    return out


class _Return(torch.autograd.Function):
    """Identity on the part's result. Its backward asks for what it saved, so that the second pass runs here, before anything inside the
    part is prepared for its backward pass: engines free a module's weights after each forward pass, even if just gathered for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return grad


class Replay:
    """The decisions of one pass, by name. One object per forward pass: it must not outlive that pass, nor serve another."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, name: str, decide: Callable[[], Value]) -> Value:
        """The value that the first call of `decide` for this name gave."""
        if name not in self._made:
            self._made[name] = decide()
        value: Value = self._made[name]
        return value
