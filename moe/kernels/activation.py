"""The activations a feed-forward network may have: relu, gelu, or gated (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.recipe.shapes import GATED as GATED


def activate(hidden: Tensor, gate: Tensor | None, ffn: str) -> Tensor:
    """The activation `ffn`: relu(h), gelu(h), gelu(h) * g or silu(h) * g. gelu is the tanh form, as in T5 and GLaM."""
    if ffn == "relu":
        return F.relu(hidden)
    activated = F.silu(hidden) if ffn == "swiglu" else F.gelu(hidden, approximate="tanh")
    return activated if gate is None else activated * gate


def activate_backward(grad: Tensor, hidden: Tensor, gate: Tensor | None, ffn: str) -> tuple[Tensor, Tensor | None]:
    """Gradients of `hidden` and `gate` from `grad`, the gradient of activate's result. Overwrites `grad` with the first of them."""
    aten = torch.ops.aten
    if ffn == "relu":
        return aten.threshold_backward.grad_input(grad, hidden, 0, grad_input=grad), None
    grad_gate = None
    if gate is not None:
        grad_gate = activate(hidden, None, ffn).mul_(grad)
        grad.mul_(gate)
    if ffn == "swiglu":
        return aten.silu_backward.grad_input(grad, hidden, grad_input=grad), grad_gate
    return aten.gelu_backward.grad_input(grad, hidden, approximate="tanh", grad_input=grad), grad_gate
