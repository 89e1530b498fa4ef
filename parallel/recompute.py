"""Activation checkpointing: a part of the model keeps its input alone and runs forward once more when its gradient is needed.

    forward        x --part--> y                  kept: x                  (without: every activation inside the part)
    backward       x --part--> y', then its gradient                       about one more forward pass of the part

What a pass *decided* (which expert a token went to) must not be decided again: other bits, from another kernel or another
order of a sum, would choose otherwise and the gradient would be that of another function. `Replay` keeps decisions by
name: the first pass makes them, the second takes them over. Source: Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Value = TypeVar("Value")


def recomputed(part: Callable[..., Value], *args: Any) -> Value:
    """part(*args), whose activations are computed again in the backward pass; plain where no gradient is taken.

    Random numbers inside must be functions of their place (parallel/random.py): torch's generator is not rewound. The
    second pass runs to the part's end, so that ranks whose parts hold collectives make the same ones in the same order.
    """
    if not torch.is_grad_enabled():
        return part(*args)

    def whole(*args: Any) -> Any:
        out = part(*args)
        return (_Return.apply(out[0]), *out[1:]) if isinstance(out, tuple) else _Return.apply(out)

    out: Value = checkpoint(whole, *args, use_reentrant=False, preserve_rng_state=False, early_stop=False)
    return out


class _Return(torch.autograd.Function):
    """The part's result. Backward asks for what it kept, so that the second pass runs here, before anything inside the part is
    prepared for its backward pass: an engine frees a module's weights after each forward pass, those it has just gathered too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert len(ctx.saved_tensors) == 1
        return grad


class Replay:
    """Decisions of one pass, by name. One object a forward pass: it must not outlive it, nor serve another."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, name: str, decide: Callable[[], Value]) -> Value:
        """The value that `decide` gave for this name the first time."""
        if name not in self._made:
            self._made[name] = decide()
        value: Value = self._made[name]
        return value
