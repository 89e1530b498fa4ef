"""Linear layers, norms and dense networks. Precision is explicit: weights have the master dtype and are cast at each use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe.kernels import cpu
from moe.kernels.activation import GATED, activate
from moe.kernels.auto import kernels_of
from moe.nn.blocks import Blocks, Form
from moe.nn.context import Context
from moe.nn.lora import adapted, frozen_linear, widened
from moe.nn.lora import product as adapted_product
from moe.recipe.shapes import NORM_EPS
from parallel.data.tiling import Multiply, Products, Slot, Tiled, as_it_is, by, one_by_one, take
from parallel.mesh.layout import Layout, Tile
from parallel.mesh.regions import in_region
from parallel.numerics.precision import sum_dtype
from parallel.numerics.weight_gradient import linear

if TYPE_CHECKING:
    from moe.recipe.sections import Swiglu

# B batch, L length, D model, F hidden

WIDEST = 8192  # largest number of channels for Triton's norm: more do not fit into a program's registers


class Linear(nn.Module):
    """A linear layer x W^T without bias, in x's dtype; `weight` [out, in].
    `recast`: the backward pass casts the weight again, instead of keeping the cast one, and can defer the weight's gradient. `product(x,
    [W], [A])`: computes x W^T, and x A^T with LoRA, if ranks hold submatrices of x, W and A (parallel/tensor/); None: local products.
    `blocks`: {"weight": (a frozen weight quantized in blocks, which replaces the parameter; its layout)}, or empty."""

    def __init__(self, in_size: int, out_size: int, *, recast: bool = False) -> None:
        super().__init__()
        self.recast = recast
        self.product: Multiply | None = None
        self.blocks: dict[str, tuple[Blocks, Layout]] = {}
        self.weight = nn.Parameter(torch.empty(out_size, in_size))
        self.lora_a: nn.Parameter | None = None  # LoRA's A [rank, in] and B [out, rank], made by `adapt`
        self.lora_b: nn.Parameter | None = None

    def adapt(self, rank: int, scale: float) -> None:
        """Add LoRA's A and B. `rank`: number of rows of A (LoRA's r). `scale`: factor of B A."""
        out_size, in_size = self.weight.shape
        self.recast = True  # the backward pass casts the frozen weight again, so no cast copy is kept
        self.lora_a, self.lora_b, self.scale = nn.Parameter(torch.empty(rank, in_size)), nn.Parameter(torch.empty(out_size, rank)), scale

    def follow(self, device: torch.device) -> None:
        """Replace quantized blocks by copies on the device, if they are on another."""
        self.blocks = {name: (blocks.on(device), layout) for name, (blocks, layout) in self.blocks.items()}

    def keep_in_blocks(self, form: Form, layouts: dict[str, Layout], device: torch.device) -> None:
        """Replace the weight by quantized blocks; `Blocks.put` sets their values later. `layouts`: {"weight": its layout}. `form`: the
        quantization."""
        out_size, in_size = self.weight.shape
        self.blocks["weight"] = Blocks.empty(form, (1, in_size, out_size), device), layouts["weight"]
        self.weight = None  # type: ignore[assignment]

    @property
    def held(self) -> Tensor | Blocks:
        """The weight without LoRA: a parameter or quantized blocks."""
        return self.blocks["weight"][0] if self.blocks else self.weight

    def read(self, dtype: torch.dtype) -> Tensor | Blocks:
        """Return the matrix that multiplies inputs of this dtype: the weight, or with LoRA adapters W' = W + scale * B A."""
        if self.lora_a is None or self.lora_b is None:
            return self.held
        return adapted(self.held, self.lora_b, self.lora_a, scale=self.scale, dtype=dtype)

    def widened(self, y: Tensor, narrow: Tensor) -> Tensor:
        """Return y + scale * narrow B^T, given y = x W^T and narrow = x A^T."""
        assert self.lora_b is not None
        return widened(y, narrow, self.lora_b, scale=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is not None:
            return by(self.product, x, [self])[0]
        weight = self.held
        if self.lora_a is not None and self.lora_b is not None:
            return adapted_product(x, weight, self.lora_b, self.lora_a, scale=self.scale)
        if isinstance(weight, Blocks):
            return frozen_linear(x, weight)
        return linear(x, weight) if self.recast else F.linear(x, weight.to(x.dtype))


def linear_fp32(x_TI: Tensor, weight_OI: Tensor) -> Tensor:
    """Return x W^T in fp32, or in float64 if x is. Only x itself is saved for the backward pass, not its fp32 copy. For bf16 x on a
    GPU, tensor cores multiply x by three bf16 matrices whose sum is W, as exactly as in fp32 (moe/kernels/triton/wide.py). No product uses
    TF32, with which a router would choose other experts."""
    if x_TI.is_cuda and x_TI.dtype == torch.bfloat16 and weight_OI.dtype in (torch.float32, torch.bfloat16) and kernels_of(x_TI) is not cpu:
        from moe.kernels.triton import wide

        return linear(x_TI, weight_OI, dtype=torch.float32, kernels=wide)
    return linear(x_TI, weight_OI, dtype=sum_dtype(x_TI.dtype))


def normed(x: Tensor, gain_D: Tensor, *, centered: bool, eps: float) -> Tensor:
    """Apply RMSNorm, or LayerNorm (`centered`), to tokens [..., D], with statistics and gain in fp32 or wider. Keep x's dtype. On a GPU,
    one kernel normalizes 16-bit tokens without an fp32 copy."""
    if x.is_cuda and x.dtype.itemsize == 2 and x.shape[-1] <= WIDEST and kernels_of(x) is not cpu:
        from moe.kernels.triton.norm import norm

        return norm(x, gain_D, centered=centered, eps=eps)
    return normed_in_fp32(x, gain_D, centered=centered, eps=eps)


def normed_in_fp32(x: Tensor, gain_D: Tensor, *, centered: bool, eps: float) -> Tensor:
    """Apply RMSNorm, or LayerNorm (`centered`), by torch's operators on an fp32 copy of x. The result has x's dtype."""
    wide, norm = sum_dtype(x.dtype), F.layer_norm if centered else F.rms_norm
    return norm(x.to(wide), gain_D.shape, gain_D.to(wide), eps=eps).to(x.dtype)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467) or LayerNorm with a gain and no bias; statistics in fp32, output in x's dtype. `eps` None: 1e-6 for
    RMSNorm, 1e-5 for LayerNorm. `normed` can be replaced: by a function for sharded channels, or by a compiled one."""

    def __init__(self, size: int, kind: str, *, eps: float | None = None) -> None:
        super().__init__()
        self.kind, self.eps = kind, NORM_EPS[kind] if eps is None else eps
        self.normed: Callable[..., Tensor] = normed
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x, self.weight, centered=self.kind == "layernorm", eps=self.eps)


class Added(nn.Module):
    """A bias added to a product, in the product's dtype; `weight` [out]. A separate module, so that Linear holds only a matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, y: Tensor) -> Tensor:
        return y + self.weight.to(y.dtype)


class FeedForward(nn.Module):
    """The dense feed-forward network: (activation(x W1) * x W3) W2; only gated networks have W3. If a rank has a shard of the hidden units,
    the result is a partial sum. Tensor parallelism replaces `leave` (applied to the output), and either `enter` (applied to x) or
    `products` (of x with w1 and w3, so that x is sent once for both). A compiled function can replace `activate`."""

    def __init__(self, d_model: int, d_ff: int, ffn: str, *, swiglu: Swiglu | None = None, recast: bool = False) -> None:
        super().__init__()
        self.ffn, self.swiglu = ffn, swiglu
        self.w1 = Linear(d_model, d_ff, recast=recast)
        self.w2 = Linear(d_ff, d_model, recast=recast)
        self.w3 = Linear(d_model, d_ff, recast=recast) if ffn in GATED else None
        self.enter: Slot = as_it_is
        self.leave: Slot = as_it_is
        self.products: Products = one_by_one
        self.activate: Callable[..., Tensor] = activate

    @in_region("network")
    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BLF, *gate = self.products(self.enter(x_BLD), [self.w1] if self.w3 is None else [self.w1, self.w3])
        return self.leave(self.w2(self.activate(hidden_BLF, gate[0] if gate else None, self.ffn, self.swiglu)))

    def in_tiles(self, count: int) -> Tiled:
        """Return the same network as a sum of `count` narrower networks, each with a chunk of the hidden units."""
        d_ff, d_model = self.w1.weight.shape

        def tile(i: int) -> nn.Module:
            with torch.device("meta"):
                made = FeedForward(d_model, d_ff // count, self.ffn, swiglu=self.swiglu, recast=True)
            return take(made, self, lambda name: Tile(int(name.startswith("w2")), i, count))

        return Tiled(tile(i) for i in range(count))


def drop(x_BLD: Tensor, p: float, *, name: str, context: Context, first: int = 0) -> Tensor:
    """Apply dropout. Its random numbers depend on seed, step, `name`, token and channel, so they are equal on every layout. `first`: index
    of the first channel on this rank."""
    return x_BLD * context.dropout_scale(name, x_BLD.shape[-1], p, first=first).view_as(x_BLD).to(x_BLD.dtype)


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor
