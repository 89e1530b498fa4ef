"""Common parts of 2D, 2.5D and 3D tensor parallelism. Between layers, a rank has some sequences and a shard of their channels.

x [B, L, D]   sequences are split over tp_depth and tp_row (moe/data/token_shard.py), channels over tp_col

norm          needs all channels: ranks along tp_col exchange two numbers a token
MoE layer     needs all channels of a token: `Exchanged`
3D            a rank has other sequences inside a layer than between layers (linear_3d.py): `Turn` converts one split to the other
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from parallel.data.tiling import Multiply, by, without_tiles
from parallel.mesh.collectives import Messages, all_to_all, gathered, paired, sum_over
from parallel.mesh.exchange import run_lengths
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import Axis, Mesh, view_of
from parallel.numerics.precision import sum_dtype
from parallel.tensor.style import Shape, Style

# B sequences, L length, D channels of a token on this rank, A tokens whose channels are split over ranks, T tokens of this rank's chunk


def fill_products(model: nn.Module, path: str, made: Callable[[str], Multiply], *, of_layer: bool = True) -> None:
    """Fill the slot `product` of the module at `path`, and with `of_layer` the slot `products` of its layer, if the layer has it. A slot is
    a replaceable function of a module (style.py).

    `made(label)` returns the function that multiplies. `label`: path of the module or layer, which error messages show."""
    around = path.rpartition(".")[0]
    layer = model.get_submodule(around)
    model.get_submodule(path).product = made(without_tiles(path))  # type: ignore[assignment]
    if of_layer and hasattr(layer, "products"):
        layer.products = partial(by, made(without_tiles(around)))  # type: ignore[assignment]


def of_one(multiply: Multiply) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function (x, weight) -> x W^T that calls `multiply` with a single weight."""
    return lambda x, weight: multiply(x, [weight], [])[0]


def together(tensors: Sequence[Tensor], *, dim: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """Return the tensors cast to `dtype` (None: unchanged) and concatenated along dim. A single tensor is not copied."""
    cast = [tensor.to(dtype or tensor.dtype) for tensor in tensors]
    return cast[0] if len(cast) == 1 else torch.cat(cast, dim)


def apart(y: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split the last dim into these sizes. Each result has its own memory, so that saving one result does not keep y in memory."""
    return (y,) if len(sizes) == 1 else tuple(part.contiguous() for part in y.split(list(sizes), -1))


@dataclass(frozen=True)
class Channels(Style):
    """A parameter with channels or heads along `dim`, split over `axis`. Ranks along the other axes of tp hold copies."""

    axis: str = "tp_col"
    dim: int = 0

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, {self.dim: self.axis}, view_of(self.axis), alike=())


@dataclass(frozen=True)
class ChannelsNorm(Style):
    """A norm over channels that are split over `axis`: the model's channels between layers, or the channels of all heads of queries or
    keys. Replaces the norm's function `normed`. If the block or model that holds the norm has an attribute `first_channel`, sets it to the
    index of this rank's first channel."""

    axis: str = "tp_col"

    def layout(self, name: str, shape: Shape) -> Layout:
        return Channels(self.axis).layout(name, shape)

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for name, layout in layouts.items():
            path = name.rpartition(".")[0]
            model.get_submodule(path).normed = partial(normed, axis=mesh.axis(self.axis, label=path))  # type: ignore[assignment]
            block = model.get_submodule(path.rpartition(".")[0])
            if hasattr(block, "first_channel"):
                block.first_channel = layout.region(mesh)[0].start


def normed(x: Tensor, gain_D: Tensor, *, centered: bool, eps: float, axis: Axis) -> Tensor:
    """Apply RMSNorm, or LayerNorm (`centered`), to tokens with channels that are split over the axis. Return x's dtype.

    Statistics and the gain are in fp32 or wider. One exchange of one or two numbers a token forward, and one backward."""
    wide = sum_dtype(torch.promote_types(x.dtype, gain_D.dtype))
    y: Tensor = _Normed.apply(x, gain_D.to(wide), centered, eps, axis)
    return y


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain_D: Tensor, centered: bool, eps: float, axis: Axis) -> Tensor:
        wide = x.to(gain_D.dtype)
        mean, variance = _moments(wide, axis) if centered else (wide.new_zeros(()), _means([wide.square()], axis)[0])
        scale = (variance + eps).rsqrt()
        ctx.save_for_backward(x, gain_D, mean, scale)
        ctx.centered, ctx.axis = centered, axis
        return ((wide - mean) * scale * gain_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gain_D, mean, scale = ctx.saved_tensors
        unit, wide_grad = (x.to(scale.dtype) - mean) * scale, grad.to(scale.dtype)
        inner = wide_grad * gain_D
        parts = [inner * unit, inner] if ctx.centered else [inner * unit]
        means = _means(parts, ctx.axis.backward())
        grad_x = inner - unit * means[0] - (means[1] if ctx.centered else 0)
        return (grad_x * scale).to(x.dtype), (wide_grad * unit).flatten(0, -2).sum(0), None, None, None


def _means(parts: Sequence[Tensor], axis: Axis) -> Tensor:
    """Return the means of several tensors over all ranks' channels, [tensors, ..., 1], by one sum over the axis."""
    return sum_over(torch.stack([x.sum(-1, keepdim=True) for x in parts]), axis) / (parts[0].shape[-1] * axis.size)


def _moments(x: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Return (mean, variance) over all ranks' channels, [..., 1] each, merged as in Chan et al. (1979), without cancellation."""
    mean = x.mean(-1, keepdim=True)
    both = gathered(torch.stack((mean, (x - mean).square().mean(-1, keepdim=True))).unsqueeze(0), axis)
    means, variances = both.unbind(1)
    overall = means.mean(0)
    return overall, (variances + (means - overall).square()).mean(0)


@dataclass(frozen=True)
class Exchanged:
    """All-to-alls over `axis`, whose ranks hold different channels of the same A tokens. cut: from this rank's channels of all A
    tokens to all channels of its chunk of T tokens. join: the reverse (total: A)."""

    axis: Axis

    def cut(self, x_AD: Tensor) -> Tensor:
        lengths = run_lengths(len(x_AD), self.axis.size)
        mine = lengths[self.axis.index]
        rows = all_to_all(x_AD.contiguous(), self.axis, send=lengths, receive=[mine] * self.axis.size)
        return torch.cat(rows.split(mine), 1)

    def join(self, y_TD: Tensor, *, total: int) -> Tensor:
        rows = torch.cat(y_TD.chunk(self.axis.size, 1))
        return all_to_all(rows, self.axis, send=[len(y_TD)] * self.axis.size, receive=run_lengths(total, self.axis.size))


@dataclass(frozen=True)
class Turn:
    """For 3D tensor parallelism: changes the axis over which sequences are split. Before, x is split over `held`, with copies along
    `other`; after, x is split over `other`, with copies along `held`."""

    held: Axis
    other: Axis

    def __call__(self, x: Tensor) -> Tensor:
        """Gather x over axis `held`, then keep this rank's shard over axis `other`, both along dim 0. Backward does the reverse with the
        gradient."""
        return paired(x, self.held, _turned, _turned_back, other=self.other)

    def back(self, x: Tensor) -> Tensor:
        return Turn(self.other, self.held)(x)


def _turned(x: Tensor, held: Axis, *, other: Axis) -> Tensor:
    return gathered(x, held).chunk(other.size)[other.index].contiguous()


def _turned_back(grad: Tensor, held: Axis, *, other: Axis) -> Tensor:
    return _turned(grad, other, other=held)


def transposed(x: Tensor, grid: Axis) -> Tensor:
    """Send x from rank (row, column) to rank (column, row), and return the received tensor. Backward does the same with gradients.
    grid: axis over q x q ranks, row by row."""
    return paired(x, grid, _across, _across)


def _across(x: Tensor, grid: Axis) -> Tensor:
    row, column = divmod(grid.index, math.isqrt(grid.size))
    if row == column:
        return x
    there, mine = column * math.isqrt(grid.size) + row, x.contiguous()
    return Messages(grid, send=[(mine, there)], receive=[(torch.empty_like(mine), there)]).wait()[0]
