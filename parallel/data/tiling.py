"""Memory-centric tiling: one big operator as a sum of small ones, so that a layer larger than the device's memory trains.

    y = act(x W1) W2,  W1 [D, F], W2 [F, D]      y = sum_i act(x W1_i) W2_i       tile i: a run of the F hidden units

    untiled   gather | W1 ------------- W2 -------------- | free           weight and gradient alive: 2 * out * in
    q tiles   gather | W1_0 W2_0 | free, gather | W1_1 W2_1 | free, ...                               2 * out * in / q

A tile is a module of its own, so whatever gathers, frees, offloads or shards weights by module (FSDP, ZeRO-3) does it tile by
tile. Tiles run one after another, in the backward pass last tile first. Partial results, and the gradient of x, are added in
fp32 at least. In checkpoints and for first values tiles do not exist: `layers.0.ffn.tiles.1.w1.weight` is a part of
`layers.0.ffn.w1.weight`, which its Layout names. Source: ZeRO-Infinity (arXiv 2104.07857), section 5.1.3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.layout import Tile

Slot = Callable[[Tensor], Tensor]  # what a layer's input or output passes, where ranks share the layer
Products = Callable[[Tensor, Sequence[nn.Module]], Sequence[Tensor]]  # of one x with the matrices of several modules, where x travels once

_TILE = re.compile(r"(?:^|\.)tiles\.(\d+)(?=\.|$)")


def as_it_is(x: Tensor) -> Tensor:
    """A slot that nobody has filled."""
    return x


def one_by_one(x: Tensor, modules: Sequence[nn.Module]) -> Sequence[Tensor]:
    """The same of products."""
    return [module(x) for module in modules]


class Tiled(nn.Module):
    """The sum of its tiles, modules that map x to something of one shape. The slots are its own: x enters once, and the sum leaves."""

    def __init__(self, tiles: Iterable[nn.Module]) -> None:
        super().__init__()
        self.tiles = nn.ModuleList(tiles)
        self.enter: Slot = as_it_is
        self.leave: Slot = as_it_is

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(summed(self.tiles, self.enter(x), lambda tile, x: tile(x)))


def summed(tiles: Iterable[nn.Module], x: Tensor, apply: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """The sum of apply(tile, x) over tiles in x's dtype; it and the gradient of x are added up in fp32 at least."""
    total = None
    for tile, x_here in with_branches(tiles, x):
        part = apply(tile, x_here)
        part = part.to(torch.promote_types(part.dtype, torch.float32))
        total = part if total is None else total + part
    assert total is not None, "no tiles"
    return total.to(x.dtype)


def with_branches(tiles: Iterable[nn.Module], x: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """Each tile with x for it alone, whose gradients are added up in fp32 at least before they are x's."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    for tile in tiles:
        x_here, wide = _Branch.apply(wide, x.detach())
        yield tile, x_here


class _Branch(torch.autograd.Function):
    """x for one tile, and `wide` for those to come; backward: their wide gradient plus this tile's."""

    @staticmethod
    def forward(ctx: Any, wide: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x.view_as(x), wide.view_as(wide)

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad_wide: Tensor | None) -> tuple[Tensor | None, None]:
        if grad_x is None or grad_wide is None:
            return grad_wide if grad_x is None else grad_x.to(torch.promote_types(grad_x.dtype, torch.float32)), None
        return grad_wide + grad_x, None


def take(tile: nn.Module, whole: nn.Module, cut: Callable[[str], Tile]) -> nn.Module:
    """The tile, with its part of each of the whole's parameters in the place of its own; `cut(name)`: which part."""
    for name, parameter in whole.named_parameters():
        module, _, last = name.rpartition(".")
        setattr(
            tile.get_submodule(module), last, nn.Parameter(cut(name).of(parameter.detach()).clone(memory_format=torch.contiguous_format))
        )
    return tile


def tiles_of(model: nn.Module) -> Iterator[nn.Module]:
    """Every tile, in the order in which they run: the units that an engine gathers and frees."""
    return (module for name, module in model.named_modules() if (found := _last(name)) is not None and found.end() == len(name))


def without_tiles(name: str) -> str:
    """The name of the whole that a tile's parameter is a part of."""
    return _TILE.sub("", name).lstrip(".")


def tile_of(model: nn.Module, name: str, *, dim: int) -> tuple[Tile, tuple[int, ...]] | None:
    """Which tile a parameter is, and the shape of the whole tensor, whose dim `dim` the tiles cut; None if it is no tile."""
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
