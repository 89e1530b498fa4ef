"""One record says how a parameter is laid out: which tensor dim is split over which mesh axis, and who holds copies.

Initialisation, gradient reduction, gradient norm, checkpoints and the memory model all read this one record,
so that "which ranks hold this element" is answered in one place.

    dense parameter    view (pp, dp, sp, tp)    split {}         copies on every dp, sp, tp rank
    expert weights     view (pp, edp, ep, etp)  split {0: "ep"}  copies on edp only (etp splits another dim)
    a tile             its rank's part, cut once more: the same ranks hold all tiles, as parameters of their own
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from parallel.errors import BadInput
from parallel.mesh import DENSE, EXPERT, Mesh

if TYPE_CHECKING:  # arithmetic alone: torch is not needed to plan
    from torch import Tensor


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

    `split` maps a tensor dim to the axis that cuts it; `view` names the axes that see the parameter; `family` is a free
    label by which norms are broken down; `unstack` is a name with `{}` where dim 0 is stored as separate tensors
    (`layers.3.experts.{}.w1`), so that a checkpoint names each by its global number. `placement`: the global number of
    each place along dim 0, where they do not stand in order. `tile`: a parameter that is one tile of the tensor (parallel/data/tiling.py).
    `holders`: the places on the pp axis that hold it, where they are several (a tied embedding, Chimera's replicas of a stage).
    """

    shape: tuple[int, ...]
    split: dict[int, str] = field(default_factory=dict)
    view: tuple[str, ...] = DENSE
    family: str = "dense"
    unstack: str | None = None
    placement: tuple[int, ...] | None = None
    tile: Tile | None = None
    holders: tuple[int, ...] = ()

    def copies(self) -> tuple[str, ...]:
        """The axes whose ranks hold the same elements: gradients are summed over them, and over `holders`."""
        return tuple(a for a in self.view if a != "pp" and a not in self.split.values())

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """What this rank holds. Raises BadInput where a dim does not divide."""
        return tuple(part.stop - part.start for part in self.region(mesh))

    def region(self, mesh: Mesh) -> tuple[slice, ...]:
        """This rank's part as slices of the full tensor. Raises BadInput where a dim does not divide."""
        parts = [slice(0, size) for size in self.shape]
        for dim, axis in self.split.items():
            size = mesh.axis(axis).size
            if self.shape[dim] % size:
                raise BadInput(
                    f"dim {dim} of a parameter", got=self.shape[dim], needed=f"a multiple of {axis}={size}", fix=f"change degrees.{axis}"
                )
            each = self.shape[dim] // size
            parts[dim] = slice(mesh.axis(axis).index * each, (mesh.axis(axis).index + 1) * each)
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
        return self.counts_on(mesh.axis("pp").index) and all(mesh.axis(a).index == 0 for a in self.copies())

    def counts_on(self, stage: int) -> bool:
        """Whether this place on the pp axis, which holds it, is the first that does."""
        return not self.holders or self.holders[0] == stage


def dense(shape: tuple[int, ...], family: str = "dense") -> Layout:
    """A parameter that every rank of a stage holds whole."""
    return Layout(shape, {}, DENSE, family)


def stacked_over(axis: str, shape: tuple[int, ...], *, unstack: str, family: str = "expert", also: dict[int, str] | None = None) -> Layout:
    """A stack of tensors cut along dim 0, in the expert view; `also`: further dims and the axes that cut them."""
    return Layout(shape, {0: axis} | (also or {}), EXPERT, family, unstack)
