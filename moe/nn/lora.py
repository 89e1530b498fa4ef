"""LoRA: a matrix is frozen, and two narrow matrices added to it are trained (Hu et al., arXiv 2106.09685, section 4.1).

    W'  =  W + s B A        W [out, in], B [out, r] from zeros, A [r, in] from random values, s = alpha / r

W' is made when the weight is read, so kernels, exchanges and splits do not change. Stacks of experts have a B and an A for each expert.
A linear layer never makes the gradient of W': dB = s dy^T (x A^T) and dA = s (dy B)^T x are narrow. It saves only x, and makes W' again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.numerics.precision import gradient_dtype, sum_dtype

if TYPE_CHECKING:
    from moe.recipe.sections import Lora

Value = TypeVar("Value")

_ADAPTER = re.compile(r"lora_[ab]|w[123]_[ab]")
# target -> pattern of module paths; these modules have a method adapt(rank, scale), which adds parameters for B and A
TARGETS = {
    "attention": r"layers\.\d+\.(attention|cross)\.(q|k|v|out|(q|kv)_(down|up))",
    "dense": r"layers\.\d+\.(ffn|moe\.shared|moe\.residual)\.w[123]",
    "experts": r"layers\.\d+\.moe\.experts",
}


def adapt(model: nn.Module, lora: Lora) -> None:
    """Add B and A of rank `lora.rank` to the targets' matrices, before first values are set. Rank 0 adds nothing."""
    patterns = [TARGETS[target] for target in lora.targets] if lora.rank else []
    for path, module in model.named_modules():
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            module.adapt(lora.rank, lora.scale)  # type: ignore[operator]


def freeze(model: nn.Module) -> None:
    """Freeze all parameters but the adapters. Without adapters, freeze nothing."""
    names = {name for name, _ in model.named_parameters()}
    trainable = trained(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)


def is_adapter(name: str) -> bool:
    return _ADAPTER.fullmatch(name.rpartition(".")[2]) is not None


def trained(names: Iterable[str]) -> set[str]:
    """Return the adapters among these parameters, or all parameters if there is no adapter."""
    names = set(names)
    return {name for name in names if is_adapter(name)} or names


def parts(layouts: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Split a mapping with parameter names as keys: return (entries of trained parameters, entries of frozen parameters)."""
    trainable = trained(layouts)
    return {n: v for n, v in layouts.items() if n in trainable}, {n: v for n, v in layouts.items() if n not in trainable}


def adapted(weight: Tensor, left: Tensor, right: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """Return W + s left right, for matrices or stacks of them, in fp32 or wider. W is first rounded to `dtype`."""
    wide = sum_dtype(weight.dtype)
    return weight.to(dtype).to(wide) + scale * (left.to(wide) @ right.to(wide))


def product(x: Tensor, weight: Tensor, left: Tensor, right: Tensor, *, scale: float) -> Tensor:
    """Return x (W + s left right)^T in x's dtype, for a frozen W [out, in]."""
    y: Tensor = _Product.apply(x, weight, left, right, scale)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, left: Tensor, right: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x, weight, left, right)
        ctx.scale, ctx.dtypes = scale, (gradient_dtype(left), gradient_dtype(right))
        return F.linear(x, adapted(weight, left, right, scale=scale, dtype=x.dtype).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, left, right = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ adapted(weight, left, right, scale=ctx.scale, dtype=x.dtype).to(grad.dtype)
        wide = sum_dtype(x.dtype)
        grad_TO, x_TI = grad.flatten(0, -2).to(wide), x.flatten(0, -2).to(wide)
        grad_left = grad_TO.t() @ (x_TI @ right.to(wide).t())
        grad_right = (grad_TO @ left.to(wide)).t() @ x_TI
        return grad_x, None, grad_left.mul_(ctx.scale).to(ctx.dtypes[0]), grad_right.mul_(ctx.scale).to(ctx.dtypes[1]), None


def merged(weight: Tensor, left: Tensor, right: Tensor, *, scale: float) -> Tensor:
    """Return W + s left right in the weight's dtype, to replace W in a model without adapters."""
    return adapted(weight, left, right, scale=scale, dtype=weight.dtype).to(weight.dtype)


def pair_of(name: str) -> tuple[str, str]:
    """Return the names in checkpoints of the B and A of a weight, such as layers.0.attention.q.weight or layers.1.experts.3.w1."""
    if name.endswith(".weight"):
        stem = name.removesuffix(".weight")
        return f"{stem}.lora_b", f"{stem}.lora_a"
    return f"{name}_a", f"{name}_b"  # an expert's matrix is [in, out], so W' = W + s w1_a w1_b
