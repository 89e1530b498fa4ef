"""The layout of a parameter: which mesh axes cut which tensor dim, which ranks hold copies, over which ranks gradients are summed.

    copies()        axes along which ranks hold the same elements     one rank's copy counts in the norm and is saved
    summed_over()   of these, axes along which tokens differ          gradients are summed
    `alike`         of these, axes along which tokens are equal       gradients are equal already: a sum would count them twice

    parameter (weight [out, in]) view     split                            copies            alike    summed over
    dense                        DENSE    {}                               dp, sp, tp        tp       dp, sp
    norm, tokens cut over tp     DENSE    {}                               dp, sp, tp                 dp, sp, tp
    1D: outputs cut over tp      DENSE    {0: "tp"}                        dp, sp                     dp, sp
    1D: few key-value heads      HEADS    {0: "tp_row_heads"}              dp, sp, tp_row_copies      dp, sp, tp_row_copies
    2D, 2.5D: a matrix           GRID     {0: "tp_col", 1: "tp_row"}       dp, sp, tp_depth           dp, sp, tp_depth
    2D, 2.5D: a norm             GRID     {0: "tp_col"}                    all but tp_col             all but tp_col
    3D: a first product's weight GRID     {0: "tp_row", 1: ("tp_col", "tp_depth")}  dp, sp            dp, sp
    experts                      EXPERT   {0: "ep", 2: "etp"}              edp                        edp

A view is one of the arrangements of ranks into axes in mesh.py. In 2D, a product's backward pass already sums the gradients over the grid.
2.5D's grids have different tokens, so gradients are also summed over depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from parallel.errors import BadInput
from parallel.mesh.mesh import DENSE, Mesh

if TYPE_CHECKING:  # the planner reads layouts without torch
    from torch import Tensor

Box = tuple[slice, ...]  # a rectangular region of a tensor: a slice for each dim


@dataclass(frozen=True)
class Tile:
    """Chunk number `index` of `count` chunks along a dim. If `count` does not divide the dim's size, chunks differ by one element."""

    dim: int
    index: int
    count: int

    def run(self, size: int) -> slice:
        """Return the slice of this tile along a dim of `size` elements."""
        return slice(self.index * size // self.count, (self.index + 1) * size // self.count)

    def of(self, whole: Tensor) -> Tensor:
        """Return this tile of a whole tensor, as a view."""
        chunk = self.run(whole.shape[self.dim])
        return whole.narrow(self.dim, chunk.start, chunk.stop - chunk.start)


def cut(size: int, count: int) -> list[slice]:
    """Cut a dim of `size` elements into `count` chunks, as Tile does. Return the chunks that are not empty."""
    return [chunk for i in range(count) if (chunk := Tile(0, i, count).run(size)).stop > chunk.start]


@dataclass(frozen=True)
class Layout:
    """How one parameter is laid out on the mesh.

    Example: `Layout((4, 6), {1: "tp"}, alike=()).region(mesh)` is (slice(0, 4), slice(3, 6)) on rank 1 of `Mesh.of(Degrees(tp=2), 1)`.

    shape: of the whole tensor. split: tensor dim -> the axis that cuts it, or several axes, coarsest first.
    view: all axes of the view (top of this file) to which the axes in `split` belong. uneven: dims whose shards may differ by one in size.
    family: a label by which gradient norms are grouped. tile: the parameter is only this tile of the shard (parallel/data/tiling.py).
    unstack: if the parameter is a stack, along dim 0, of tensors that checkpoints store separately: their names, with `{}` for the global
    index (`layers.3.experts.{}.w1`). placement: global index of each entry of the whole stack, in the order of dim 0; None: 0, 1, 2, ...
    holders: the pipeline stages that hold the parameter, if there are several (a tied embedding, Chimera's replicas).
    alike: axes along which ranks see the same tokens, so that copies have equal gradients. Axes that are not in `copies` are ignored."""

    shape: tuple[int, ...]
    split: Mapping[int, str | tuple[str, ...]] = field(default_factory=dict)
    view: tuple[str, ...] = DENSE
    family: str = "dense"
    unstack: str | None = None
    placement: tuple[int, ...] | None = None
    tile: Tile | None = None
    holders: tuple[int, ...] = ()
    alike: tuple[str, ...] = ("tp",)
    uneven: tuple[int, ...] = ()

    def without(self, dim: int) -> Layout:
        """Return the layout of a tensor that has the parameter's shape without `dim`, such as its mean over `dim`. Ranks along axes that
        cut `dim` hold copies of this tensor. A negative dim counts from the end."""
        dim %= len(self.shape)
        assert self.tile is None and (dim or self.unstack is None), "a mean over tiles or a stack"
        return replace(
            self,
            shape=(*self.shape[:dim], *self.shape[dim + 1 :]),
            split={d - (d > dim): axes for d, axes in self.split.items() if d != dim},
            uneven=tuple(d - (d > dim) for d in self.uneven if d != dim),
        )

    def cut_by(self, dim: int | None = None) -> tuple[str, ...]:
        """Return the axes that cut `dim`, coarsest first; None: the axes that cut any dim."""
        axes = self.split.values() if dim is None else [self.split.get(dim, ())]
        return tuple(axis for named in axes for axis in ((named,) if isinstance(named, str) else named))

    def copies(self) -> tuple[str, ...]:
        """Return the axes along which ranks hold the same elements. "pp" is never among them, although stages in `holders` hold copies
        too."""
        cut = self.cut_by()
        return tuple(a for a in self.view if a != "pp" and a not in cut)

    def summed_over(self) -> tuple[str, ...]:
        """Return the axes over which gradients are summed: their ranks hold the same elements (`copies`) but see different tokens (not
        `alike`). The sum over the stages in `holders` is a separate one."""
        return tuple(a for a in self.copies() if a not in self.alike)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of this rank's shard. Raise BadInput if the axes do not divide a dim."""
        return tuple(shard.stop - shard.start for shard in self.region(mesh))

    def region(self, mesh: Mesh) -> Box:
        """Return this rank's shard as a slice of each dim of the whole tensor. Raise BadInput if the axes do not divide a dim and the dim
        is not in `uneven`."""
        shard = [slice(0, size) for size in self.shape]
        for dim in self.split:
            place, ways, axes = 0, 1, self.cut_by(dim)
            for axis in map(mesh.axis, axes):
                place, ways = place * axis.size + axis.index, ways * axis.size
            if self.shape[dim] % ways and dim not in self.uneven:
                raise BadInput(
                    f"dim {dim} of a parameter",
                    got=self.shape[dim],
                    needed=f"a multiple of {' * '.join(axes)}={ways}",
                    fix=f"change degrees.{axes[0].partition('_')[0]}",
                )
            shard[dim] = Tile(dim, place, ways).run(self.shape[dim])
        if self.tile is not None:
            whole = shard[self.tile.dim]
            chunk = self.tile.run(whole.stop - whole.start)
            shard[self.tile.dim] = slice(whole.start + chunk.start, whole.start + chunk.stop)
        return tuple(shard)

    def stacked(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the global indices of a stack's entries (such as experts) that this rank holds, in the order of dim 0 of its shard."""
        places = self.region(mesh)[0]
        return tuple(range(self.shape[0]))[places] if self.placement is None else self.placement[places]

    def is_owner(self, mesh: Mesh) -> bool:
        """Return whether this rank's copy of its shard is the first of all copies. Only the first counts in norms and is saved."""
        return self.counts_on(mesh.axis("pp").index) and all(mesh.axis(a).index == 0 for a in self.copies())

    def shard_counts(self, mesh: Mesh) -> bool:
        """Return whether this rank's elements count in norms if FSDP or ZeRO divides the shard among the ranks of `summed_over`. Then
        only ranks along `alike` and stages in `holders` hold equal elements, and only the first of them counts."""
        alike = (a for a in self.copies() if a in self.alike)
        return self.counts_on(mesh.axis("pp").index) and all(mesh.axis(a).index == 0 for a in alike)

    def counts_on(self, stage: int) -> bool:
        """Return whether the copy on `stage`, which must hold the parameter, counts in norms: it does on the first of `holders`."""
        return not self.holders or self.holders[0] == stage


Layouts = dict[str, Layout]  # parameter name -> its layout


class Stored(NamedTuple):
    """A tensor of a checkpoint that contains a rank's shard of a parameter, or one entry of the shard if the parameter is a stack.
    `name`, `shape`: name and shape of the whole tensor. `region`: the slices of it that belong to the rank. `entry`: index of the entry
    along dim 0 of the shard; None if the parameter is no stack."""

    name: str
    shape: tuple[int, ...]
    region: Box
    entry: int | None


def stored(name: str, layout: Layout, mesh: Mesh, box: Box | None = None) -> Iterator[Stored]:
    """Yield the named tensors in which checkpoints store this rank's shard of the parameter `name`: one, or one for each entry of a stack.

    `box`: a part of the shard; only its tensors are yielded, and `region` and `entry` then refer to the box instead of the shard."""
    region = layout.region(mesh)
    box = box or tuple(slice(0, part.stop - part.start) for part in region)
    wanted = tuple(slice(of.start + part.start, of.start + part.stop) for of, part in zip(region, box, strict=True))
    if layout.unstack is None:
        yield Stored(name, layout.shape, wanted, None)
        return
    for entry, number in enumerate(layout.stacked(mesh)[box[0]]):
        yield Stored(layout.unstack.format(number), layout.shape[1:], wanted[1:], entry)
