"""The backward pass in two parts, as zero-bubble schedules need it [2401.10241, section 2]: I with put_off(), W with Owed.pay().

    y = x W     I   dx = dy W^T      the stage before waits for it       with put_off() as owed: torch.autograd.backward(y, dy)
                W   dW = x^T dy      only the update waits for it        owed.pay()

In I, a matrix product hands over a function that computes its weight's gradient, and returns no gradient. Only x and dy of each product
stay alive until W, not the rest of the graph. W is also a backward pass, of a graph that contains only the weights: gradients are
added to the weights as autograd always does, in their gradient's dtype, and those of tiles or runs of one weight are summed first.

Only large products defer: small weights (gains, biases, rows of the embedding) get their gradients in I. Hooks on a weight run
in I without a gradient and again in W, so code that reduces gradients in hooks must wait for the last W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.precision import gradient_dtype

Gradients = Callable[[], Sequence[Tensor | None]]  # computes the gradients of some weights, in their order


class Owed:
    """The deferred weight gradients of one micro-batch of one stage. Made by put_off()."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[Tensor, ...], Gradients]] = []

    def add(self, weights: tuple[Tensor, ...], compute: Gradients) -> None:
        """`weights`: those given to owed_for. compute(): their gradients; it should hold inputs and output gradients only, and no ctx."""
        self._entries.append((weights, compute))

    def pay(self) -> None:
        """Compute the gradients, add them to each weight's .grad, and free what was kept. Works once: afterwards nothing is owed."""
        if self in _open:
            raise RuntimeError("pay after the backward pass, not inside put_off()")
        entries, self._entries = self._entries, []
        if entries:
            passes = [_Pay.apply(compute, *weights) for weights, compute in entries]
            del entries
            torch.autograd.backward(passes)


_open: list[Owed] = []  # at most one per process, not per thread: autograd runs GPU tensors' backward pass in a thread of its own


@contextmanager
def put_off() -> Iterator[Owed]:
    """A context: products whose backward pass runs inside defer their weights' gradients. Must not be nested, in any thread."""
    if _open:
        raise RuntimeError("put_off() inside put_off(): one backward pass at a time")
    owed = Owed()
    _open.append(owed)
    try:
        yield owed
    finally:
        _open.remove(owed)


def owed_for(*weights: Tensor) -> Owed | None:
    """The place to defer these weights' gradients to, or None. They must be parameters, or views of them (a run of experts)."""
    return _open[0] if _open and all(w.requires_grad and (w.is_leaf or _is_part(w)) for w in weights) else None


def _is_part(weight: Tensor) -> bool:
    return weight._base is not None and weight._base.is_leaf


def gradient_or_later(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """What the backward pass of an autograd.Function returns for a weight: its gradient, or None if that is deferred.

    `weight` is the tensor to which the Function was applied, kept as an attribute of ctx: saved tensors may come back as other objects.
    """
    return gradients_or_later((weight,), lambda: (compute(),))[0]


def gradients_or_later(weights: tuple[Tensor, ...], compute: Gradients) -> Sequence[Tensor | None]:
    """The same of several weights at once: their gradients, or so many None."""
    owed = owed_for(*weights)
    if owed is None:
        return compute()
    owed.add(weights, compute)
    return (None,) * len(weights)


class _Pay(torch.autograd.Function):
    """A zero that depends on some weights; its backward pass gives their gradients."""

    @staticmethod
    def forward(ctx: Any, compute: Gradients, *weights: Tensor) -> Tensor:
        ctx.compute = compute
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        compute, ctx.compute = ctx.compute, None  # frees what was kept, product by product
        return None, *compute()


# --- products --------------------------------------------------------------------------------------------------------------


def linear(x: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T in x's dtype. Saves nothing of the weight's size but the weight itself, which is cast again in the backward pass."""
    y: Tensor = _Product.apply(x, weight_OI, True)
    return y


def product(x: Tensor, weight_IO: Tensor) -> Tensor:
    """x W in x's dtype; see `linear`."""
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        left, right = (grad, x) if ctx.transposed else (x, grad)
        grad_x = later = None
        if ctx.needs_input_grad[1]:  # not where it is frozen
            dtype = gradient_dtype(ctx.weight)
            later = gradient_or_later(ctx.weight, lambda: (left.flatten(0, -2).t() @ right.flatten(0, -2)).to(dtype))
        if ctx.needs_input_grad[0]:
            matrix = weight.to(grad.dtype)
            grad_x = grad @ matrix if ctx.transposed else F.linear(grad, matrix)
        return grad_x, later, None


def splittable(model: nn.Module) -> None:
    """Make every module with the attribute `recast` multiply with the products of this file.

    torch's own products compute both gradients at once. Only for schedules with I and W, since small products are slower this way.
    """
    for module in model.modules():
        if hasattr(module, "recast"):
            module.recast = True  # type: ignore[assignment]
