"""The activations a feed-forward network may have: relu, gelu, or gated (GLU variants, arXiv 2002.05202).

h and g are the input times w1 and w3; swiglu is silu(h) * g. A recipe may bound h and g and change the slope (model.swiglu), as in GPT-OSS:

    swiglu = h' sigmoid(alpha h') * (g' + offset)    with h' = min(h, limit), g' = clamp(g, -limit, limit)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.shapes import GATED as GATED

if TYPE_CHECKING:  # kernels run without the packages that read recipes
    from moe.recipe.sections import Swiglu


class Activation(NamedTuple):
    """The last two arguments of `activate`. ffn: name of the activation. swiglu: constants of a bounded swiglu; None: silu(h) * g."""

    ffn: str
    swiglu: Swiglu | None = None


def activate(hidden: Tensor, gate: Tensor | None, ffn: str, swiglu: Swiglu | None = None) -> Tensor:
    """Return relu(h), gelu(h) in its tanh form, gelu(h) * g or silu(h) * g, as `ffn` says, in h's dtype. `hidden` is h, `gate` is g.
    `swiglu`: alpha, limit and offset of a bounded swiglu, h sigmoid(alpha h) (g + offset), which is computed in fp32 or wider; None: no
    bounds.
    """
    if ffn == "relu":
        return F.relu(hidden)
    if ffn == "swiglu" and swiglu is not None and gate is not None:
        out: Tensor = _Bounded.apply(hidden, gate, swiglu)
        return out
    activated = F.silu(hidden) if ffn == "swiglu" else F.gelu(hidden, approximate="tanh")
    return activated if gate is None else activated * gate


def activate_backward(
    grad: Tensor, hidden: Tensor, gate: Tensor | None, ffn: str, swiglu: Swiglu | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of `hidden` and `gate`, given `grad`, the gradient of activate's result. The memory of `grad` is overwritten
    with the gradient of `hidden`."""
    aten = torch.ops.aten
    if ffn == "relu":
        return aten.threshold_backward.grad_input(grad, hidden, 0, grad_input=grad), None
    if ffn == "swiglu" and swiglu is not None and gate is not None:
        of_hidden, of_gate = _bounded_backward(grad, hidden, gate, swiglu)
        return grad.copy_(of_hidden), of_gate
    grad_gate = None
    if gate is not None:
        grad_gate = activate(hidden, None, ffn).mul_(grad)
        grad.mul_(gate)
    if ffn == "swiglu":
        return aten.silu_backward.grad_input(grad, hidden, grad_input=grad), grad_gate
    return aten.gelu_backward.grad_input(grad, hidden, approximate="tanh", grad_input=grad), grad_gate


def _bounded(hidden: Tensor, gate: Tensor, s: Swiglu) -> tuple[Tensor, Tensor]:
    """Return alpha min(h, limit) and clamp(g, -limit, limit), in fp32 or wider, because a sigmoid of 16-bit numbers would be inexact."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide).clamp(max=s.bound) * s.alpha, gate.to(wide).clamp(-s.bound, s.bound)


def _bounded_backward(grad: Tensor, hidden: Tensor, gate: Tensor, s: Swiglu) -> tuple[Tensor, Tensor]:
    scaled, bounded = _bounded(hidden, gate, s)
    wide = grad.to(scaled.dtype)
    grad_gate = (wide * F.silu(scaled) / s.alpha).masked_fill_(gate.abs() > s.bound, 0)
    # d/dh [silu(alpha h) / alpha] = silu'(alpha h)
    grad_hidden = torch.ops.aten.silu_backward(wide * (bounded + s.offset), scaled).masked_fill_(hidden > s.bound, 0)
    return grad_hidden.to(hidden.dtype), grad_gate.to(gate.dtype)


class _Bounded(torch.autograd.Function):
    """Bounded swiglu. Saves only its two inputs: autograd would save six tensors, four of them fp32."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, gate: Tensor, s: Swiglu) -> Tensor:
        ctx.save_for_backward(hidden, gate)
        ctx.swiglu = s
        scaled, bounded = _bounded(hidden, gate, s)
        return (F.silu(scaled) / s.alpha * (bounded + s.offset)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden, gate = ctx.saved_tensors
        return *_bounded_backward(grad, hidden, gate, ctx.swiglu), None
