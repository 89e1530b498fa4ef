"""One record says how a parameter is laid out: which mesh axes cut which tensor dim, who holds copies, whose gradients are summed.

Initialisation, gradient reduction, gradient norm, checkpoints and the memory model all read this one record, so that "which
ranks hold this element" is answered in one place. Two questions have two answers:

    copies()        who holds the same elements                   one of them counts in the norm and is saved
    summed_over()   which of those saw other tokens               their gradients are parts of one sum
    the rest        (`alike`) saw the same tokens                 their gradients are equal already: a sum would count them twice

    parameter                    view     split                            copies            alike    summed over
    dense                        DENSE    {}                               dp, sp, tp        tp       dp, sp
    norm, tokens cut over tp     DENSE    {}                               dp, sp, tp                 dp, sp, tp
    1D: columns                  DENSE    {1: "tp"}                        dp, sp                     dp, sp
    1D: few key-value heads      HEADS    {0: "tp_row_heads"}              dp, sp, tp_row_copies      dp, sp, tp_row_copies
    2D, 2.5D: a block            GRID     {0: "tp_row", 1: "tp_col"}       dp, sp, tp_depth           dp, sp, tp_depth
    2D, 2.5D: a norm             GRID     {0: "tp_col"}                    all but tp_col             all but tp_col
    2D: few key-value heads      HEADS    {0: "tp_col_heads", 1: "tp_row"} dp, sp, tp_col_copies      dp, sp, tp_col_copies
    3D: a first product's        GRID     {0: "tp_row", 1: ("tp_col", "tp_depth")}  dp, sp            dp, sp
    experts                      EXPERT   {0: "ep", 2: "etp"}              edp                        edp
    a tile                       its rank's part, cut once more: the same ranks hold all tiles, as parameters of their own

2D's gradients are whole sums over the grid when they come out of its products; 2.5D's are of one layer's tokens, and are summed
over depth. Sources: Megatron-LM (arXiv 1909.08053), its sequence parallelism (arXiv 2205.05198), and those of parallel/mesh.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from parallel.errors import BadInput
from parallel.mesh import DENSE, EXPERT, Mesh

if TYPE_CHECKING:  # arithmetic alone: torch is not needed to plan
    from torch import Tensor

Box = tuple[slice, ...]  # a part of a tensor: each dim from start to stop


@dataclass(frozen=True)
class Tile:
    """The index-th of `count` runs along a dim; where they cannot be equal, they differ by one."""

    dim: int
    index: int
    count: int

    def run(self, size: int) -> slice:
        """This tile's part of so many elements."""
        return slice(self.index * size // self.count, (self.index + 1) * size // self.count)

    def of(self, whole: Tensor) -> Tensor:
        """This tile of a whole tensor."""
        run = self.run(whole.shape[self.dim])
        return whole.narrow(self.dim, run.start, run.stop - run.start)


@dataclass(frozen=True)
class Layout:
    """How one parameter of full shape `shape` lies on the mesh.

    `split` maps a tensor dim to the axis that cuts it, or to several, each of which cuts what the one before left; `view` names
    the axes that see the parameter; `family` is a free label by which norms are broken down; `unstack` is a name with `{}` where
    dim 0 is stored as separate tensors (`layers.3.experts.{}.w1`), so that a checkpoint names each by its global number.
    `placement`: the global number of each place along dim 0, where they do not stand in order. `tile`: a parameter that is one
    tile of the tensor (parallel/data/tiling.py). `holders`: the places on the pp axis that hold it, where they are several (a tied
    embedding, Chimera's replicas of a stage). `alike`: axes whose ranks see the same tokens here, so copies on them have equal
    gradients; those of other views, and those that cut it, say nothing. `uneven`: dims whose parts may differ by one.
    """

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
        """Of a mean over a dim that every rank holds whole: the same, with one dim less. A dim below 0 is counted from the end."""
        dim %= len(self.shape)
        assert self.tile is None and (dim or self.unstack is None), "a mean over what a rank holds whole"
        return replace(
            self,
            shape=(*self.shape[:dim], *self.shape[dim + 1 :]),
            split={d - (d > dim): axes for d, axes in self.split.items() if d != dim},
            uneven=tuple(d - (d > dim) for d in self.uneven if d != dim),
        )

    def cut_by(self, dim: int | None = None) -> tuple[str, ...]:
        """The axes that cut a dim, the coarsest first; of all dims where none is named."""
        axes = self.split.values() if dim is None else [self.split.get(dim, ())]
        return tuple(axis for named in axes for axis in ((named,) if isinstance(named, str) else named))

    def copies(self) -> tuple[str, ...]:
        """The axes whose ranks hold the same elements; `holders` do too."""
        return tuple(a for a in self.view if a != "pp" and a not in self.cut_by())

    def summed_over(self) -> tuple[str, ...]:
        """The axes over which gradients are summed: those of `copies` whose ranks see other tokens. Over `holders` they are too."""
        return tuple(a for a in self.copies() if a not in self.alike)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """What this rank holds. Raises BadInput where a dim does not divide."""
        return tuple(part.stop - part.start for part in self.region(mesh))

    def region(self, mesh: Mesh) -> Box:
        """This rank's part as slices of the full tensor. Raises BadInput where a dim does not divide."""
        parts = [slice(0, size) for size in self.shape]
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
            parts[dim] = Tile(dim, place, ways).run(self.shape[dim])
        if self.tile is not None:
            whole = parts[self.tile.dim]
            run = self.tile.run(whole.stop - whole.start)
            parts[self.tile.dim] = slice(whole.start + run.start, whole.start + run.stop)
        return tuple(parts)

    def stacked(self, mesh: Mesh) -> tuple[int, ...]:
        """The global numbers of what this rank holds along dim 0, in order."""
        places = self.region(mesh)[0]
        return tuple(range(self.shape[0]))[places] if self.placement is None else self.placement[places]

    def is_owner(self, mesh: Mesh) -> bool:
        """True on exactly one rank per element: the first of its copies, the one that counts it in a norm and saves it."""
        return self.shard_counts(mesh) and all(mesh.axis(a).index == 0 for a in self.summed_over())

    def shard_counts(self, mesh: Mesh) -> bool:
        """Where the ranks of `summed_over` hold a shard each (ZeRO, FSDP): whether this rank's counts, or another holds its copy."""
        alike = (a for a in self.copies() if a in self.alike)
        return self.counts_on(mesh.axis("pp").index) and all(mesh.axis(a).index == 0 for a in alike)

    def counts_on(self, stage: int) -> bool:
        """Whether this place on the pp axis, which holds it, is the first that does."""
        return not self.holders or self.holders[0] == stage


def dense(shape: tuple[int, ...], family: str = "dense", *, alike: tuple[str, ...] = ("tp",), holders: tuple[int, ...] = ()) -> Layout:
    """A parameter that every rank of a stage holds whole; `alike`: the axes whose ranks see the same tokens."""
    return Layout(shape, {}, DENSE, family, holders=holders, alike=alike)


def stacked_over(
    axis: str, shape: tuple[int, ...], *, unstack: str, family: str = "expert", also: Mapping[int, str | tuple[str, ...]] | None = None
) -> Layout:
    """A stack of tensors cut along dim 0, in the expert view; `also`: further dims and the axes that cut them."""
    return Layout(shape, {0: axis, **(also or {})}, EXPERT, family, unstack)
