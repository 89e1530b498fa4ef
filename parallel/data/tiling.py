"""Memory-centric tiling: one large operator as a sum of small ones, to train a layer larger than the device's memory.

    y = act(x W1) W2,  W1 [D, F], W2 [F, D]      y = sum_i act(x W1_i) W2_i       tile i: a chunk of the F hidden units

A tile is a separate module, so engines that gather, free, offload or shard the weights of one module at a time (FSDP, ZeRO-3) do so tile by
tile. Tiles run one after another, last tile first in the backward pass. Checkpoints and initial values do not depend on tiles:
`layers.0.ffn.tiles.1.w1.weight` is a chunk of `layers.0.ffn.w1.weight`; its Layout (parallel/mesh/layout.py) says which chunk.
docs/parallel/tiling.md has the costs. Source: ZeRO-Infinity (arXiv 2104.07857), section 5.1.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.mesh.layout import Tile
from parallel.numerics.precision import sum_dtype

Slot = Callable[[Tensor], Tensor]  # a replaceable function of a layer: tensor parallelism puts collectives there
Products = Callable[[Tensor, Sequence[nn.Module]], Sequence[Tensor]]  # (x, modules) -> x W^T of each module
# x, weights W, LoRA matrices A -> x W^T of each W, then x A^T of each A
Multiply = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]

_TILE = re.compile(r"(?:^|\.)tiles\.(\d+)(?=\.|$)")


def as_it_is(x: Tensor) -> Tensor:
    """Return x unchanged: the default of a Slot (replaceable function of a layer), for layers that communicate nothing."""
    return x


def one_by_one(x: Tensor, modules: Sequence[nn.Module]) -> Sequence[Tensor]:
    """Return module(x) for each module: the default of a layer's slot `products`."""
    return [module(x) for module in modules]


def by(multiply: Multiply, x: Tensor, modules: Sequence[Any]) -> Sequence[Tensor]:
    """Return module(x) for modules whose products `multiply` computes together, so that ranks send x once. Weights are read here, in the
    layer's forward pass, so that engines can gather them layer by layer.

    A module with LoRA, y = x W^T + s (x A^T) B^T, has A as `lora_a`; its method `widened` adds s (x A^T) B^T."""
    narrow = [getattr(module, "lora_a", None) for module in modules]
    found = list(multiply(x, [module.weight for module in modules], [a for a in narrow if a is not None]))
    rest = iter(found[len(modules) :])
    for i, (module, a) in enumerate(zip(modules, narrow, strict=True)):
        if a is not None:
            found[i] = module.widened(found[i], next(rest))
    return found[: len(modules)]


class Tiled(nn.Module):
    """A layer cut into tiles: returns leave(sum of tile(enter(x)) over the tiles). The outputs of all tiles have one shape. enter, leave:
    slots for the collectives of tensor parallelism before and after the tiles; by default they return their input."""

    def __init__(self, tiles: Iterable[nn.Module]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.enter: Slot = as_it_is
        self.leave: Slot = as_it_is

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(summed(self.tiles, self.enter(x), lambda tile, x: tile(x)))


def summed(tiles: Iterable[nn.Module], x: Tensor, apply: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Return the sum of apply(tile, x) over tiles, in x's dtype. The outputs and the gradient of x are summed in fp32 or wider."""
    total = None
    for tile, branch in with_branches(tiles, x):
        y = apply(tile, branch)
        y = y.to(sum_dtype(y.dtype))
        total = y if total is None else total + y
    assert total is not None, "no tiles"
    return total.to(x.dtype)


def with_branches(tiles: Iterable[nn.Module], x: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Yield (tile, x) with a separate autograd node of x for each tile, so that the gradients of x are summed in fp32 or wider."""
    wide = x.to(sum_dtype(x.dtype))
    for tile in tiles:
        branch, wide = _Branch.apply(wide, x.detach())
        yield tile, branch


class _Branch(torch.autograd.Function):
    """Return (x for one tile, `wide` for the following tiles). `wide` is x in the dtype in which gradients are summed. In backward, the
    gradient of the returned `wide` is the sum over the following tiles; this tile's gradient of x is added to it."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad_wide: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_x is None or grad_wide is None:
            return grad_wide if grad_x is None else grad_x.to(sum_dtype(grad_x.dtype)), None
        return grad_wide + grad_x, None


def take(tile: nn.Module, whole: nn.Module, cut: Callable[[str], Tile]) -> nn.Module:
    """Set the tile's parameters to chunks of the parameters of the untiled module `whole`; return the tile. cut: parameter name -> its
    chunk, as a Tile."""
    for name, parameter in whole.named_parameters():
        module, _, last = name.rpartition(".")
        chunk = cut(name).of(parameter.detach()).clone(memory_format=torch.contiguous_format)
        setattr(tile.get_submodule(module), last, nn.Parameter(chunk))
    return tile


def tiles_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield all tiles in the order in which they run."""
    return (module for name, module in model.named_modules() if (found := _last(name)) is not None and found.end() == len(name))


def without_tiles(name: str) -> str:
    """Return the name of the untiled parameter, given the name of a tile's parameter."""
    return _TILE.sub("", name).lstrip(".")


def tile_of(model: nn.Module, name: str, *, dim: int) -> tuple[Tile, tuple[int, ...]] | None:
    """Return (Tile, shape of the untiled parameter) for a parameter `name` of a tile; None for any other parameter.
    dim: the dim of the parameter along which tiles cut it."""
    found = _last(name)
    if found is None:
        return None
    tiles, rest = model.get_submodule(name[: found.start(1) - 1]), name[found.end() + 1 :]
    assert isinstance(tiles, nn.ModuleList)
    shapes = [tile.get_parameter(rest).shape for tile in tiles]
    whole = list(shapes[0])
    whole[dim] = sum(shape[dim] for shape in shapes)
    return Tile(dim, int(found[1]), len(tiles)), tuple(whole)


def _last(name: str) -> re.Match[str] | None:
    return next(reversed(list(_TILE.finditer(name))), None)
