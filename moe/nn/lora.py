"""LoRA: a matrix stays as it is, and two narrow ones beside it are trained (Hu et al., arXiv 2106.09685, section 4.1).

    W'  =  W + s B A        W [out, in], B [out, r] from zeros, A [r, in] from random values, s = alpha / r

W' is made where the weight is read, so every kernel, exchange and split of a layer works as it does without: experts' stacks have a
B and an A for each expert. With B = 0 it is W, bit for bit. W is read in the dtype that the model computes in, W' is fp32 or wider.
The gradient of W' is needed by nobody, and of a linear layer it is never made: dB = s dy^T (x A^T) and dA = s (dy B)^T x are narrow.

    Adapted       a module that can be given such matrices
    product       x W'^T, which keeps x alone for the backward pass, and makes W' again there
    adapt         gives a model's modules theirs; `freeze` leaves nothing else to be trained
    trained       of a model's parameters by name, those that are trained
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.precision import gradient_dtype

if TYPE_CHECKING:
    from moe.recipe.sections import Lora

Value = TypeVar("Value")

_ADAPTER = re.compile(r"lora_[ab]|w[123]_[ab]")
# modules by path, of each target
TARGETS = {
    "attention": r"layers\.\d+\.(attention|cross)\.(q|k|v|out|(q|kv)_(down|up))",
    "dense": r"layers\.\d+\.(ffn|moe\.shared|moe\.residual)\.w[123]",
    "experts": r"layers\.\d+\.moe\.experts",
}


class Adapted(Protocol):
    def adapt(self, rank: int, scale: float) -> None:
        """Make room for B and A; before the weights are made."""
        ...


def adapt(model: nn.Module, lora: Lora) -> None:
    """Beside the targets' matrices, B and A of rank `lora.rank`; 0: nothing."""
    patterns = [TARGETS[target] for target in lora.targets] if lora.rank else []
    for path, module in model.named_modules():
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            module.adapt(lora.rank, lora.scale)  # type: ignore[operator]


def freeze(model: nn.Module) -> None:
    """Train the adapters alone, where there are any."""
    names = {name for name, _ in model.named_parameters()}
    here = trained(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in here)


def is_adapter(name: str) -> bool:
    return _ADAPTER.fullmatch(name.rpartition(".")[2]) is not None


def trained(names: Iterable[str]) -> set[str]:
    """The adapters among these parameters, or all of them where there are none."""
    names = set(names)
    return {name for name in names if is_adapter(name)} or names


def parts(layouts: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """(of what is trained, of what is frozen), by name."""
    here = trained(layouts)
    return {n: v for n, v in layouts.items() if n in here}, {n: v for n, v in layouts.items() if n not in here}


def adapted(weight: Tensor, left: Tensor, right: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """W + s left right, of matrices or of stacks of them, in fp32 or wider; W as it is read in `dtype`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype).to(wide) + scale * (left.to(wide) @ right.to(wide))


def product(x: Tensor, weight: Tensor, left: Tensor, right: Tensor, *, scale: float) -> Tensor:
    """x W'^T in x's dtype, of a frozen W [out, in]."""
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
        wide = torch.promote_types(x.dtype, torch.float32)
        grad_TO, x_TI = grad.flatten(0, -2).to(wide), x.flatten(0, -2).to(wide)
        of_left = grad_TO.t() @ (x_TI @ right.to(wide).t())
        of_right = (grad_TO @ left.to(wide)).t() @ x_TI
        return grad_x, None, of_left.mul_(ctx.scale).to(ctx.dtypes[0]), of_right.mul_(ctx.scale).to(ctx.dtypes[1]), None


def merged(weight: Tensor, left: Tensor, right: Tensor, *, scale: float) -> Tensor:
    """The same in the weight's dtype, for a model that has no adapters any more."""
    return adapted(weight, left, right, scale=scale, dtype=weight.dtype).to(weight.dtype)


def pair_of(name: str) -> tuple[str, str]:
    """What checkpoints call the two matrices, left and right, of a weight: layers.0.attention.q.weight, layers.1.experts.3.w1."""
    if name.endswith(".weight"):
        stem = name.removesuffix(".weight")
        return f"{stem}.lora_b", f"{stem}.lora_a"
    return f"{name}_a", f"{name}_b"  # experts' matrices are [in, out]
