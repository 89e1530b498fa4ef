"""A plan: for each parameter the way it is split over ranks (its style). A plan is data; the function `apply` applies it to a model.

    layers.*.moe.experts.*      Stacked("ep", hidden="etp", ...)       pattern of a parameter's path -> style; the first match counts
    layers.*.moe.router.**      Copied("router")
    anything else               Copied()

A style returns a parameter's layout. It also fills the slots (replaceable functions) of the layers that hold its parameters, so that
they compute with shards. In a pattern, `*` is one word between dots, and `**` any number of words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol

import torch
from torch import nn

from parallel.data.tiling import tile_of, without_tiles
from parallel.mesh.layout import Layout, Layouts
from parallel.mesh.mesh import EXPERT, Mesh

Shape = tuple[int, ...]


class Style(Protocol):
    """How the parameters of one kind are split over ranks, and how their layers then compute."""

    def layout(self, name: str, shape: Shape) -> Layout:
        """Return the layout of the parameter at path `name`, given the shape of the whole tensor."""

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        """Fill the slots (replaceable functions) of the layers that hold these parameters. By default fill no slot, so that the layers
        compute as on one rank."""
        return None

    def low_rank(self, half: str, shape: Shape) -> Layout:
        """Return the layout of LoRA's matrix A (`half` "a") or B ("b") for a weight of this style."""
        return low_rank(self.layout("", shape), half, shape)


def low_rank(weight: Layout, half: str, shape: Shape) -> Layout:
    """Return the layout of A [r, in] or B [out, r] in y = x W^T + s (x A^T) B^T, given the layout `weight` of W.

    Dim `in` of A and dim `out` of B are cut as in W. So x A^T is computed from shards of x, each rank adds LoRA's term to its own outputs,
    and the products with A and B send no more than the product with W. Layout.alike (axes along which copies have equal gradients) is
    copied from W, too. If it is empty, the gradients of A's or B's copies differ and are summed. In 3D tensor parallelism, W is also cut
    over tp_depth; A and B are not."""
    dim = 0 if half == "b" else 1
    axes = weight.cut_by(dim)[:1]
    return replace(weight, shape=shape, split=dict.fromkeys([dim], axes[0]) if axes else {})


@dataclass(frozen=True)
class Copied(Style):
    """Every rank of a pipeline stage holds the whole parameter. family: a label by which gradient norms are grouped. alike: the axes along
    which ranks see the same tokens."""

    family: str = "dense"
    alike: tuple[str, ...] = ("tp",)

    def layout(self, name: str, shape: Shape) -> Layout:
        return Layout(shape, family=self.family, alike=self.alike)


@dataclass(frozen=True)
class Stacked(Style):
    """A stack of networks (experts), split along dim 0 over `axis`, and along its hidden units over the axis `hidden`.
    hidden_dim: last word of a parameter's path -> its dim of hidden units. name_of: a stacked parameter's path -> the name of one
    network's tensor in checkpoints, with `{}` for the network's index. `fill` calls the module's method hold(indices of this rank's
    networks, hidden=slice of this rank's hidden units)."""

    axis: str
    hidden: str
    hidden_dim: Mapping[str, int]
    name_of: Callable[[str], str] = field(repr=False)

    def layout(self, name: str, shape: Shape) -> Layout:
        dim = self._dim(name)
        also: dict[int, str | tuple[str, ...]] = {} if dim is None else {dim: self.hidden}
        return Layout(shape, {0: self.axis, **also}, EXPERT, "expert", self.name_of(name))

    def fill(self, model: nn.Module, layouts: Layouts, mesh: Mesh) -> None:
        for path, (name, layout) in self.modules(layouts).items():
            whole, dim = replace(layout, tile=None), self._dim(name)
            assert dim is not None
            model.get_submodule(path).hold(whole.stacked(mesh), hidden=whole.region(mesh)[dim])  # type: ignore[operator]

    def _dim(self, name: str) -> int | None:
        """Return the parameter's dim of hidden units; None if it has none, so that it is not split over `hidden`."""
        return self.hidden_dim.get(name.rpartition(".")[2])

    def modules(self, layouts: Layouts) -> dict[str, tuple[str, Layout]]:
        """Return a dict: path of each stack -> (name, layout) of one of its parameters that have a dim of hidden units."""
        held = ((name, layout) for name, layout in layouts.items() if self._dim(name) is not None)
        return {without_tiles(name).rpartition(".")[0]: (name, layout) for name, layout in held}


@dataclass(frozen=True)
class Plan:
    """Rows (pattern, style). The first row with a pattern that matches a parameter gives its style; if none matches, the style is Copied().
    str(plan) is a table of the rows."""

    rows: tuple[tuple[str, Style], ...] = ()

    def style_of(self, name: str) -> Style:
        return next(style for pattern, style in self._all() if fits(pattern, name))

    def layout(self, name: str, shape: Shape) -> Layout:
        """Return the layout of the parameter at path `name`, given the shape of the whole tensor."""
        if (found := _LOW_RANK.fullmatch(name)) is not None:
            return self.style_of(f"{found[1]}.weight").low_rank(found[2], shape)
        return self.style_of(name).layout(name, shape)

    def by_style(self, layouts: Mapping[str, Layout]) -> Iterator[tuple[Style, dict[str, Layout]]]:
        """Yield (style, name -> layout of the parameters with this style), each style once."""
        found: dict[int, tuple[Style, dict[str, Layout]]] = {id(style): (style, {}) for _, style in self._all()}
        for name, layout in layouts.items():
            found[id(self.style_of(name))][1][name] = layout
        yield from ((style, mine) for style, mine in found.values() if mine)

    def _all(self) -> tuple[tuple[str, Style], ...]:
        return (*self.rows, ("**", _REST))

    def __str__(self) -> str:
        width = max(len(pattern) for pattern, _ in self._all())
        return "\n".join(f"{pattern:<{width}}  {style}" for pattern, style in self._all())


_REST = Copied()
_LOW_RANK = re.compile(r"(.*)\.lora_([ab])")  # path of a LoRA matrix, such as MODULE.lora_a, which adapts MODULE.weight


def fits(pattern: str, name: str) -> bool:
    """Return whether the path of a parameter or module matches the pattern."""
    return _regex(pattern).fullmatch(without_tiles(name)) is not None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def lay_out(model: nn.Module, plan: Plan, *, tiled_dim: Callable[[str], int]) -> dict[str, Layout]:
    """Return path -> layout of every parameter of a whole model. `tiled_dim`: path -> dim that memory-centric tiling (tiling.py) cuts."""
    layouts = {}
    for name, parameter in model.named_parameters():
        tile, shape = tile_of(model, name, dim=tiled_dim(name)) or (None, tuple(parameter.shape))
        layouts[name] = replace(plan.layout(name, shape), tile=tile)
    return layouts


def apply(model: nn.Module, plan: Plan, layouts: Layouts, mesh: Mesh) -> None:
    """Fill the layers' slots (replaceable functions), and cut a model on the meta device to this rank's shards."""
    for style, mine in plan.by_style(layouts):
        style.fill(model, mine, mesh)
    for name, parameter in list(model.named_parameters()):
        shape = layouts[name].local_shape(mesh)
        if tuple(parameter.shape) != shape:
            assert parameter.is_meta, f"{name} is not on the meta device"
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta")))
