"""Backward in two passes, as zero-bubble schedules ask for it [2401.10241, section 2]: I with put_off(), W with Owed.pay().

    y = x W     I   dx = dy W^T      the stage before waits for it       with put_off() as owed: torch.autograd.backward(y, dy)
                W   dW = x^T dy      only the update waits for it        owed.pay()

In I a matrix product hands in how its weight's gradient is computed, and returns none; what stays alive until W is x and dy of
each product, without the rest of the graph. W is a backward pass too, of a graph that knows the weights alone: gradients are
summed in the weights as autograd always does, in their gradient's dtype, and tiles or runs of one weight meet first.

Only products with something to gain put off: what is small (gains, biases, rows of the embedding) has its gradient in I. Hooks on
a weight run in I without a gradient and again in W, so who reduces gradients in hooks must wait for the last W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.precision import gradient_dtype

Gradients = Callable[[], Sequence[Tensor | None]]  # gives the gradients of some weights, in their order


class Owed:
    """The weight gradients of one micro-batch of one stage that have been put off. Made by put_off()."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[Tensor, ...], Gradients]] = []

    def add(self, weights: tuple[Tensor, ...], compute: Gradients) -> None:
        """`weights`: what owed_for gave; compute(): their gradients. It should hold inputs and output gradients alone, and no ctx."""
        self._entries.append((weights, compute))

    def pay(self) -> None:
        """Compute the gradients, add them to each weight's .grad, and let go of what was kept. Once: afterwards nothing is owed."""
        if self in _open:
            raise RuntimeError("pay after the backward pass, not inside put_off()")
        entries, self._entries = self._entries, []
        if entries:
            passes = [_Pay.apply(compute, *weights) for weights, compute in entries]
            del entries
            torch.autograd.backward(passes)


_open: list[Owed] = []  # one at most, of the process: autograd runs the backward pass of a GPU's tensors in a thread of its own


@contextmanager
def put_off() -> Iterator[Owed]:
    """Products whose backward pass runs inside put their weights' gradients off. Not inside another, in whatever thread."""
    if _open:
        raise RuntimeError("put_off() inside put_off(): one backward pass at a time")
    owed = Owed()
    _open.append(owed)
    try:
        yield owed
    finally:
        _open.remove(owed)


def owed_for(*weights: Tensor) -> Owed | None:
    """Where gradients of these may be put now: parameters, or views of them (a run of experts), whose graphs keep nothing. Else None."""
    return _open[0] if _open and all(w.requires_grad and (w.is_leaf or _is_part(w)) for w in weights) else None


def _is_part(weight: Tensor) -> bool:
    return weight._base is not None and weight._base.is_leaf


def gradient_or_later(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """What the backward pass of an autograd.Function returns for a weight: its gradient, or None and it is put off.

    `weight` is what the Function was applied to, kept as an attribute of ctx: what it saved may come back as another tensor.
    """
    owed = owed_for(weight)
    if owed is None:
        return compute()
    owed.add((weight,), lambda: (compute(),))
    return None


class _Pay(torch.autograd.Function):
    """Nothing, of some weights; its backward pass is their gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Gradients, *weights: Tensor) -> Tensor:
        ctx.compute = compute
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        compute, ctx.compute = ctx.compute, None  # product by product, what was kept goes
        return None, *compute()


# --- products --------------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T in x's dtype. It keeps nothing of the weight's size but the weight, which is cast again in the backward pass."""
    y: Tensor = _Product.apply(x, weight_OI, True)
    return y


def product(x: Tensor, weight_IO: Tensor) -> Tensor:
    """x W, likewise."""
    y: Tensor = _Product.apply(x, weight_IO, False)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.transposed = weight, transposed
        matrix = weight.to(x.dtype)
        return F.linear(x, matrix) if transposed else x @ matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        left, right = (grad, x) if ctx.transposed else (x, grad)
        dtype = gradient_dtype(ctx.weight)
        later = gradient_or_later(ctx.weight, lambda: (left.flatten(0, -2).t() @ right.flatten(0, -2)).to(dtype))
        matrix = weight.to(grad.dtype)
        return (grad @ matrix if ctx.transposed else F.linear(grad, matrix)), later, None


def splittable(model: nn.Module) -> None:
    """Have every part of the model that chooses (by its attribute `recast`) multiply with the products of this file.

    Torch's own would compute both gradients at once. It is for a schedule with I and W: with small products these are slower.
    """
    for module in model.modules():
        if hasattr(module, "recast"):
            module.recast = True  # type: ignore[assignment]
