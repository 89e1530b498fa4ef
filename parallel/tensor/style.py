"""A plan of styles: how a model's parameters lie on the mesh, as data that is applied from outside.

    layers.*.moe.experts.*      Stacked("ep", hidden="etp", ...)       pattern of a parameter's path -> style, the first that fits
    layers.*.moe.router.**      Copied("router")
    anything else               Copied()

A style says how a parameter is laid out, and puts into the slots of the layers that it fits what they need to compute with a part.
Cutting is the same for all and happens here, on the meta device: from then on the layouts alone say what a rank holds. In a pattern
`*` is any one word between dots and `**` any number of them; a tile (parallel/data/tiling.py) has the path of its whole.
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
from parallel.layout import Layout, dense, stacked_over
from parallel.mesh import Mesh

Shape = tuple[int, ...]


class Style(Protocol):
    """`layout`: of a parameter of the whole model, by its path. `fill`: the slots of the layers that hold these parameters here."""

    def layout(self, name: str, shape: Shape) -> Layout: ...

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None: ...


@dataclass(frozen=True)
class Copied:
    """Every rank of a stage holds it whole, and its layer computes as it does alone: all of tp the same, unless `alike` says other."""

    family: str = "dense"
    alike: tuple[str, ...] = ("tp",)

    def layout(self, name: str, shape: Shape) -> Layout:
        return dense(shape, self.family, alike=self.alike)

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        pass


@dataclass(frozen=True)
class Stacked:
    """A stack of networks over `axis` by dim 0, and of each its hidden units over the axis `hidden`: dim `hidden_dim[its last word]`.

    `name_of`: what checkpoints call the tensors of a stack, with `{}` for the number. The slot: `module.hold(numbers, hidden=units)`,
    which of the networks, and of their hidden units, are here.
    """

    axis: str
    hidden: str
    hidden_dim: Mapping[str, int]
    name_of: Callable[[str], str] = field(repr=False)
    family: str = "expert"

    def layout(self, name: str, shape: Shape) -> Layout:
        dim = self._dim(name)
        also: dict[int, str | tuple[str, ...]] = {} if dim is None else {dim: self.hidden}
        return stacked_over(self.axis, shape, unstack=self.name_of(name), family=self.family, also=also)

    def fill(self, model: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
        for path, (name, layout) in self.modules(layouts).items():
            whole, dim = replace(layout, tile=None), self._dim(name)
            assert dim is not None
            model.get_submodule(path).hold(whole.stacked(mesh), hidden=whole.region(mesh)[dim])  # type: ignore[operator]

    def _dim(self, name: str) -> int | None:
        """None: all of its ranks hold it whole, as no dim of it is that of hidden units."""
        return self.hidden_dim.get(name.rpartition(".")[2])

    def modules(self, layouts: Mapping[str, Layout]) -> dict[str, tuple[str, Layout]]:
        """Each stack by its path, with one of its parameters that have hidden units."""
        held = ((name, layout) for name, layout in layouts.items() if self._dim(name) is not None)
        return {without_tiles(name).rpartition(".")[0]: (name, layout) for name, layout in held}


@dataclass(frozen=True)
class Plan:
    """(pattern, style) in order; a parameter that none fits is copied. Printed, it is a table."""

    rows: tuple[tuple[str, Style], ...] = ()

    def style_of(self, name: str) -> Style:
        return next(style for pattern, style in self._all() if fits(pattern, name))

    def by_style(self, layouts: Mapping[str, Layout]) -> Iterator[tuple[Style, dict[str, Layout]]]:
        """Each style, once, with the parameters of its rows."""
        for style in {id(style): style for _, style in self._all()}.values():
            mine = {name: layout for name, layout in layouts.items() if self.style_of(name) is style}
            if mine:
                yield style, mine

    def _all(self) -> tuple[tuple[str, Style], ...]:
        return (*self.rows, ("**", _REST))

    def __str__(self) -> str:
        width = max(len(pattern) for pattern, _ in self._all())
        return "\n".join(f"{pattern:<{width}}  {style}" for pattern, style in self._all())


_REST = Copied()


def fits(pattern: str, name: str) -> bool:
    """Whether the path of a parameter or module has this form."""
    return _regex(pattern).fullmatch(without_tiles(name)) is not None


@cache
def _regex(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", "[^.]*"))


def lay_out(model: nn.Module, plan: Plan, *, tiled_dim: Callable[[str], int]) -> dict[str, Layout]:
    """Every parameter's layout by its path, of a model that is whole. `tiled_dim`: the dim that tiles of a parameter cut."""
    layouts = {}
    for name, parameter in model.named_parameters():
        tile, shape = tile_of(model, name, dim=tiled_dim(name)) or (None, tuple(parameter.shape))
        layouts[name] = replace(plan.style_of(name).layout(name, shape), tile=tile)
    return layouts


def apply(model: nn.Module, plan: Plan, layouts: Mapping[str, Layout], mesh: Mesh) -> None:
    """Leave this rank its parts of a model that is on the meta device, and fill its layers' slots."""
    for style, mine in plan.by_style(layouts):
        style.fill(model, mine, mesh)
    for name, parameter in list(model.named_parameters()):
        shape = layouts[name].local_shape(mesh)
        if tuple(parameter.shape) != shape:
            assert parameter.is_meta, f"{name} has values already"
            module, _, last = name.rpartition(".")
            setattr(model.get_submodule(module), last, nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta")))
