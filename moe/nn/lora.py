"""LoRA: a matrix is frozen, and two narrow matrices are trained, whose product is added to it (Hu et al., arXiv 2106.09685, section 4.1).

    y  =  x W^T + s (x A^T) B^T        W [out, in], B [out, r] from zeros, A [r, in] from random values, s = alpha / r

The product B A is never made, nor is a gradient of W: dB = s dy^T (x A^T), dA = s (dy B)^T x and the gradient of x are computed from
narrow products, [tokens, r]. In stacks of experts, each expert has its own B and A, and rows are sorted by expert. W may be quantized
Blocks (moe/nn/blocks.py), which are dequantized for each product, one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.nn.blocks import Blocks
from parallel.numerics.precision import gradient_dtype, sum_dtype

if TYPE_CHECKING:
    from moe.recipe.sections import Lora

Value = TypeVar("Value")

# R rows, E experts, I and O a matrix's inputs and outputs, r rank of the adapters (A and B)

# last part of an adapter's parameter name
_ADAPTER = re.compile(r"lora_[ab]|w[123]_[ab]")
# target -> pattern of module paths; these modules have a method adapt(rank, scale), which adds parameters for B and A
TARGETS = {
    "attention": r"layers\.\d+\.(attention|cross)\.(q|k|v|out|(q|kv)_(down|up))",
    "dense": r"layers\.\d+\.(ffn|moe\.shared|moe\.residual)\.w[123]",
    "experts": r"layers\.\d+\.moe\.experts",
}


def adapt(model: nn.Module, lora: Lora) -> None:
    """Add adapters B and A of rank `lora.rank` to each matrix that `lora.targets` names; with lora.rank 0, to none. Must be called before
    initial values are set."""
    patterns = [TARGETS[target] for target in lora.targets] if lora.rank else []
    for path, module in model.named_modules():
        if any(re.fullmatch(pattern, path) for pattern in patterns):
            module.adapt(lora.rank, lora.scale)  # type: ignore[operator]


def freeze(model: nn.Module) -> None:
    """Freeze all parameters except the adapters."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def is_adapter(name: str) -> bool:
    return _ADAPTER.fullmatch(name.rpartition(".")[2]) is not None


def parts(layouts: Mapping[str, Value], model: nn.Module) -> tuple[dict[str, Value], dict[str, Value]]:
    """Split a mapping with parameter names as keys: return (adapters' entries, other entries). If `model`, a Transformer, was built
    without adapters, return (all entries, {}). A pipeline stage can lack adapters that other stages have: then the first dict is empty."""
    if not model.adapted:
        return dict(layouts), {}
    return {n: v for n, v in layouts.items() if is_adapter(n)}, {n: v for n, v in layouts.items() if not is_adapter(n)}


def adapted(weight: Tensor | Blocks, left: Tensor, right: Tensor, *, scale: float, dtype: torch.dtype) -> Tensor:
    """Return W + scale * left right, for matrices or stacks of them, in fp32 or wider. W is first rounded to `dtype`. left, right:
    B [out, r] and A [r, in] if W is [out, in]; the experts' adapters [E, in, r] and [E, r, out] if W is a stack [E, in, out]."""
    wide = sum_dtype(left.dtype if isinstance(weight, Blocks) else weight.dtype)
    return weight.to(dtype).to(wide) + scale * (left.to(wide) @ right.to(wide))


def product(x: Tensor, weight: Tensor | Blocks, left: Tensor, right: Tensor, *, scale: float) -> Tensor:
    """Return x (W + scale * left right)^T in x's dtype, for a frozen W [out, in]. left: B [out, r]. right: A [r, in]."""
    y: Tensor = _Product.apply(x, weight, left, right, scale)
    return y


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | Blocks, left: Tensor, right: Tensor, scale: float) -> Tensor:
        narrow = F.linear(x, right.to(x.dtype))
        ctx.blocks = weight if isinstance(weight, Blocks) else None
        ctx.save_for_backward(x, narrow, None if isinstance(weight, Blocks) else weight, left, right)
        ctx.scale, ctx.dtypes = scale, (gradient_dtype(left), gradient_dtype(right))
        return _added(F.linear(x, weight.to(x.dtype)), narrow, left.to(x.dtype).t(), scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, narrow, weight, left, right = ctx.saved_tensors
        grad_x, grad_narrow = None, (grad @ left.to(grad.dtype)).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            grad_x = _added(grad @ (ctx.blocks or weight).to(grad.dtype), grad_narrow, right.to(grad.dtype), 1.0)
        grad_left = _transposed(grad, narrow, ctx.dtypes[0]).mul_(ctx.scale)
        return grad_x, None, grad_left, _transposed(grad_narrow, x, ctx.dtypes[1]), None


def widened(y: Tensor, narrow: Tensor, left: Tensor, *, scale: float) -> Tensor:
    """Return y + scale * narrow left^T in y's dtype, given y = x W^T and narrow = x A^T. left: B [out, r]."""
    out: Tensor = _Widened.apply(y, narrow, left, scale)
    return out


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, narrow: Tensor, left: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(narrow, left)
        ctx.scale, ctx.dtype = scale, gradient_dtype(left)
        rows = torch.addmm(y.flatten(0, -2), narrow.flatten(0, -2), left.to(y.dtype).t(), alpha=scale)
        return rows.view(y.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        narrow, left = ctx.saved_tensors
        return grad, (grad @ left.to(grad.dtype)).mul_(ctx.scale), _transposed(grad, narrow, ctx.dtype).mul_(ctx.scale), None


def grouped_product(
    rows_RI: Tensor, weight_EIO: Tensor | Blocks, counts: list[int], first_EIr: Tensor, second_ErO: Tensor, *, scale: float
) -> Tensor:
    """Return rows @ (W + scale * first @ second) in the rows' dtype, for frozen matrices W of experts. The rows are sorted by expert;
    expert e has counts[e] rows. first, second: each expert's adapters [I, r] and [r, O]."""
    out: Tensor = _GroupedProduct.apply(rows_RI, weight_EIO, first_EIr, second_ErO, counts, scale)
    return out


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor | Blocks, first: Tensor, second: Tensor, counts: list[int], scale: float) -> Tensor:
        narrow = _times(rows, first, counts)
        ctx.blocks = weight if isinstance(weight, Blocks) else None
        ctx.save_for_backward(rows, narrow, None if isinstance(weight, Blocks) else weight, first, second)
        ctx.counts, ctx.scale, ctx.dtypes = counts, scale, (gradient_dtype(first), gradient_dtype(second))
        return _times(narrow, second, counts, onto=_times(rows, weight, counts), scale=scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows, narrow, weight, first, second), counts = ctx.saved_tensors, ctx.counts
        grad, grad_rows = grad.contiguous(), None
        grad_narrow = _times(grad, second.mT, counts).mul_(ctx.scale)
        if ctx.needs_input_grad[0]:
            weight = ctx.blocks or weight
            grad_rows = _times(grad_narrow, first.mT, counts, onto=_times(grad, weight.mT, counts))
        grad_first, grad_second = _outer(rows, grad_narrow, counts, ctx.dtypes[0]), _outer(narrow, grad, counts, ctx.dtypes[1])
        return grad_rows, None, grad_first, grad_second.mul_(ctx.scale), None, None


def frozen_linear(x: Tensor, blocks: Blocks) -> Tensor:
    """Return x W^T in x's dtype, for a frozen W [out, in] in quantized blocks."""
    y: Tensor = _FrozenLinear.apply(x, blocks)
    return y


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Blocks) -> Tensor:
        ctx.blocks = blocks
        return F.linear(x, blocks.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad @ ctx.blocks.to(grad.dtype), None


def frozen_product(rows_RI: Tensor, blocks: Blocks, counts: list[int]) -> Tensor:
    """Return rows @ W in the rows' dtype, for experts' frozen matrices W in quantized blocks. The rows are sorted by expert; expert e has
    counts[e] rows."""
    out: Tensor = _FrozenProduct.apply(rows_RI, blocks, counts)
    return out


class _FrozenProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, blocks: Blocks, counts: list[int]) -> Tensor:
        ctx.blocks, ctx.counts = blocks, counts
        return _times(rows, blocks, counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _times(grad.contiguous(), ctx.blocks.mT, ctx.counts), None, None


def _transposed(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return grad^T x, summed over tokens, in `dtype`."""
    return (grad.flatten(0, -2).t() @ x.flatten(0, -2)).to(dtype)


def _added(y: Tensor, narrow: Tensor, matrix: Tensor, scale: float) -> Tensor:
    """Return y + scale * narrow @ matrix, in y's memory."""
    rows = y.view(-1, y.shape[-1])  # a view, because results written into a copy would be lost
    torch.addmm(rows, narrow.flatten(0, -2), matrix, alpha=scale, out=rows)
    return y


def _times(rows_RI: Tensor, matrices_EIO: Tensor | Blocks, counts: list[int], *, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """Multiply each row by the matrix of its expert and by `scale`. Return [R, O] in the rows' dtype. onto: tensor to which the result is
    added in place, and which is returned; None: a new tensor."""
    out = rows_RI.new_empty(len(rows_RI), matrices_EIO.shape[2]) if onto is None else onto
    for expert, (rows, into) in enumerate(zip(rows_RI.split(counts), out.split(counts), strict=True)):
        if len(rows):  # without rows, the expert's matrix would be dequantized for nothing
            matrix = matrices_EIO[expert].to(rows.dtype)
            torch.addmm(into, rows, matrix, beta=0.0 if onto is None else 1.0, alpha=scale, out=into)
    return out


def _outer(rows_RI: Tensor, grads_RO: Tensor, counts: list[int], dtype: torch.dtype) -> Tensor:
    """Return rows^T @ grads of each expert: [E, I, O] of `dtype`."""
    return torch.stack([(rows.t() @ grads).to(dtype) for rows, grads in zip(rows_RI.split(counts), grads_RO.split(counts), strict=True)])


def pair_of(name: str) -> tuple[str, str]:
    """Return the names that the adapters of the weight `name` have in checkpoints: (left, right), with W' = W + s left right. Examples of
    `name`: layers.0.attention.q.weight, layers.1.experts.3.w1."""
    if name.endswith(".weight"):
        stem = name.removesuffix(".weight")
        return f"{stem}.lora_b", f"{stem}.lora_a"
    return f"{name}_a", f"{name}_b"  # an expert's matrix is [in, out], so `left` is A transposed, stored as w1_a
