"""Deferred weight gradients: the backward pass is split into input gradients (I) and weight gradients (W), for zero-bubble schedules
(arXiv 2401.10241, section 2).

    y = x W     I   dx = dy W^T      the previous stage waits for it     with defer_gradients() as pending: torch.autograd.backward(y, dy)
                W   dW = x^T dy      only the update waits for it        pending.compute()

In I, a matrix product returns no weight gradient, but adds a function that computes it to `pending`. Until W, only x and dy of each
product stay in memory, not the rest of the graph. W is a backward pass of a graph that contains only the weights, so autograd adds
gradients to the weights as usual. Small weights (gains, biases, rows of the embedding) get their gradients in I. Hooks on a weight run
in I without a gradient and again in W, so code that reduces gradients in hooks must wait for the last W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.numerics.precision import gradient_dtype

Gradients = Callable[[], Sequence[Tensor | None]]  # returns the gradients of several weights, in the order of the weights


class PendingGradients:
    """The deferred weight gradients of one backward pass."""

    def __init__(self) -> None:
        self._entries: list[tuple[tuple[Tensor, ...], Gradients]] = []

    def add(self, weights: tuple[Tensor, ...], compute: Gradients) -> None:
        """Defer compute(), which returns the gradients of `weights`. It should refer to inputs and output gradients only, not to ctx,
        which would keep the graph in memory."""
        self._entries.append((weights, compute))

    def weights(self) -> Iterator[tuple[Tensor, ...]]:
        """Yield the weights of each deferred function. A view of a weight counts as the weight."""
        return (tuple(w if w.is_leaf else w._base for w in weights) for weights, _ in self._entries)  # type: ignore[misc]

    def split(self, key: Callable[[Tensor], int]) -> dict[int, PendingGradients]:
        """Return a dict: key -> PendingGradients. Each deferred function moves from this object to the entry key(its first weight)."""
        parts: dict[int, PendingGradients] = {}
        for (first, *_), entry in zip(self.weights(), self._entries, strict=True):
            parts.setdefault(key(first), PendingGradients())._entries.append(entry)
        self._entries = []
        return parts

    def compute(self) -> None:
        """Compute the gradients, add them to each weight's .grad, and free the saved tensors. A second call does nothing."""
        if self in _open:
            raise RuntimeError("compute after the backward pass, not inside defer_gradients()")
        entries, self._entries = self._entries, []
        if entries:
            passes = [_Compute.apply(compute, *weights) for weights, compute in entries]
            del entries
            torch.autograd.backward(passes)


# the PendingGradients of the open context; at most one for all threads, because autograd runs a GPU's backward pass in another thread
_open: list[PendingGradients] = []


@contextmanager
def defer_gradients() -> Iterator[PendingGradients]:
    """Return a context in which backward passes defer weight gradients. Raise RuntimeError if nested, also in another thread."""
    if _open:
        raise RuntimeError("defer_gradients() inside defer_gradients(): one backward pass at a time")
    pending = PendingGradients()
    _open.append(pending)
    try:
        yield pending
    finally:
        _open.remove(pending)


def pending_for(*weights: Tensor) -> PendingGradients | None:
    """Return the PendingGradients of the surrounding `defer_gradients`; None outside one, or if a weight is frozen, or is neither a
    parameter nor a view of one."""
    return _open[0] if _open and all(w.requires_grad and (w.is_leaf or _is_view(w)) for w in weights) else None


def open_pending() -> PendingGradients | None:
    """Return the PendingGradients of the surrounding `defer_gradients`; None outside one."""
    return _open[0] if _open else None


def if_deferrable(*weights: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return `weights` for the caller to store as an attribute of ctx. Return () if a weight is neither a parameter nor a view of one: its
    gradient cannot be deferred, and as an attribute it would stay in memory longer than as a saved tensor."""
    return weights if all(w is None or w.is_leaf or _is_view(w) for w in weights) else ()


def _is_view(weight: Tensor) -> bool:
    return weight._base is not None and weight._base.is_leaf


def gradient_or_later(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """Return compute(), the gradient of `weight`. If the gradient can be deferred now (`pending_for`), defer the call and return None. The
    backward pass of an autograd.Function returns this result as the gradient of the weight.

    `weight`: the tensor to which the Function was applied. Keep it as an attribute of ctx, because saved tensors can be other objects."""
    return gradients_or_later((weight,), lambda: (compute(),))[0]


def gradients_or_later(weights: tuple[Tensor, ...], compute: Gradients) -> Sequence[Tensor | None]:
    """Return compute(), the gradients of `weights`. If they can be deferred now (`pending_for`), defer the call and return a None for each
    weight."""
    pending = pending_for(*weights)
    if pending is None:
        return compute()
    pending.add(weights, compute)
    return (None,) * len(weights)


def gradients_of_trained(
    weights: tuple[Tensor, ...], compute: Callable[[Sequence[int]], Sequence[Tensor]], *, wide: int | None = None
) -> list[Tensor | None]:
    """Return the gradients of several weights; None for a frozen weight, and for a weight with a deferred gradient. Only gradients of the
    first `wide` weights (None: all) may be deferred. The other weights are LoRA's narrow matrices, with gradients that cost
    little. compute: (indices of trained weights, all wide or all narrow) -> their gradients."""
    trained = [i for i, weight in enumerate(weights) if weight.requires_grad]
    late = [i for i in trained if wide is None or i < wide]
    now = trained[len(late) :]
    found: dict[int, Tensor | None] = dict(zip(now, compute(now) if now else (), strict=True))
    if late:
        found |= dict(zip(late, gradients_or_later(tuple(weights[i] for i in late), lambda: compute(late)), strict=True))
    return [found.get(i) for i in range(len(weights))]


def gradient_of(weight_OI: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of W [O, I] in y = x W^T, in the gradients' dtype, from grad [..., O] and x [..., I]."""
    return (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(gradient_dtype(weight_OI))


class _Compute(torch.autograd.Function):
    """Return a zero with an autograd node; its backward pass returns `compute()` as the gradients of the weights."""

    @staticmethod
    def forward(ctx: Any, compute: Gradients, *weights: Tensor) -> Tensor:
        ctx.compute = compute
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        compute, ctx.compute = ctx.compute, None  # ctx drops the function, so that its saved tensors are freed after it has run
        return None, *compute()


class Kernels(Protocol):
    """A module that multiplies tokens x [T, I] by a matrix W [O, I] of a wider dtype: x W^T, dy W, and dy^T x."""

    def forward(self, x_TI: Tensor, weight_OI: Tensor) -> Tensor: ...
    def of_input(self, grad_TO: Tensor, weight_OI: Tensor, dtype: torch.dtype) -> Tensor: ...
    def of_weight(self, grad_TO: Tensor, x_TI: Tensor) -> Tensor: ...


def linear(x: Tensor, weight_OI: Tensor, *, dtype: torch.dtype | None = None, kernels: Kernels | None = None) -> Tensor:
    """Return x W^T in `dtype` (None: x's); W is [out, in]. Forward and backward pass each cast x and W, so that no cast copy is saved.
    kernels: compute the three products without casts, for x [T, I]; None: torch's products."""
    y: Tensor = _Product.apply(x, weight_OI, True, dtype or x.dtype, kernels)
    return y


def product(x: Tensor, weight_IO: Tensor) -> Tensor:
    """Return x W in x's dtype; W is [in, out], and is cast to x's dtype in each pass."""
    y: Tensor = _Product.apply(x, weight_IO, False, x.dtype, None)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool, dtype: torch.dtype, kernels: Kernels | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.weight, ctx.transposed, ctx.dtype, ctx.kernels = weight, transposed, x.dtype, kernels
        if kernels is not None:
            return kernels.forward(x, weight)
        x, matrix = x.to(dtype), weight.to(dtype)
        return F.linear(x, matrix) if transposed else x @ matrix

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dtype, transposed, kernels = gradient_dtype(ctx.weight), ctx.transposed, ctx.kernels

        def of_weight() -> Tensor:
            if kernels is not None:
                return kernels.of_weight(grad, x).to(dtype)  # type: ignore[no-any-return]
            rows, grads = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
            found: Tensor = grads.t() @ rows if transposed else rows.t() @ grads
            return found.to(dtype)

        later = gradient_or_later(ctx.weight, of_weight) if ctx.needs_input_grad[1] else None  # None: deferred or frozen
        if not ctx.needs_input_grad[0]:
            return None, later, None, None, None
        if kernels is not None:
            return kernels.of_input(grad, weight, ctx.dtype), later, None, None, None
        matrix = weight.to(grad.dtype)
        return (grad @ matrix if transposed else F.linear(grad, matrix)).to(ctx.dtype), later, None, None, None


def splittable(model: nn.Module) -> None:
    """Make every module that has the attribute `recast` compute its matrix products by `linear` or `product`, which can defer weight
    gradients. Only for pipeline schedules that split the backward pass, because small products are slower this way."""
    for module in model.modules():
        if hasattr(module, "recast"):
            module.recast = True  # type: ignore[assignment]
