"""The mesh: the index of a rank on every parallel axis. Several views arrange the same ranks in different axes.

    DENSE    pp x dp  x sp x tp                      (tp varies fastest: neighbors share the fastest links)
    GRID     pp x dp  x sp_ring x sp_heads x tp_depth x tp_row x tp_col      tp as a grid: 1D n x 1, 2D q x q, 2.5D d grids of q x q,
                                     3D a cube; sp as rings of sp_ring ranks, and sp_heads neighbors that split heads
    HEADS    GRID with tp_row (or tp_col) cut into heads x copies, if that side has more ranks than key-value heads
    EXPERT   pp x edp x ep x etp                     (the dp*sp*tp ranks of a stage, arranged for experts: MoE parallel folding)
    NODES    pp x edp x ep_outer x ep_inner x etp            ep between nodes and within a node, for exchanges in two steps

An axis has the name of the coordinate in which its ranks differ. For example, the ranks of one `tp_row` axis have different rows, so they
form one column of the grid. Axes of one view can be joined: `mesh.axis("dp", "sp")` has the ranks over which dense gradients are summed.

A rank makes only the process groups of which it is a member, and training never lists all groups, so 100,000 ranks start as fast as eight.
This file needs no torch: the caller of `Mesh.connect` passes a group maker. Sources: GShard (arXiv 2006.16668), folding (2504.14960).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from parallel.errors import BadInput, counted
from parallel.fixes import Nproc, Set, any_of
from parallel.mesh.debug_collectives import Call
from parallel.mesh.traffic import Communicator, leaving

if TYPE_CHECKING:
    from torch import Tensor

# axis -> the axes into which another view divides it
FACTORS = {
    "sp": ("sp_ring", "sp_heads"),
    "tp": ("tp_depth", "tp_row", "tp_col"),
    "ep": ("ep_outer", "ep_inner"),
    "tp_row": ("tp_row_heads", "tp_row_copies"),
    "tp_col": ("tp_col_heads", "tp_col_copies"),
}


def _factored(view: tuple[str, ...], *axes: str) -> tuple[str, ...]:
    return tuple(part for axis in view for part in (FACTORS[axis] if axis in axes else (axis,)))


DENSE = ("pp", "dp", "sp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
GRID, NODES = _factored(DENSE, "sp", "tp"), _factored(EXPERT, "ep")
HEADS = (_factored(GRID, "tp_row"), _factored(GRID, "tp_col"))
VIEWS = (DENSE, EXPERT, NODES, GRID, *HEADS)
AXES = tuple(dict.fromkeys(axis for view in VIEWS for axis in view))


def view_of(*axes: str) -> tuple[str, ...]:
    """Return the first of the mesh's views (arrangements of the ranks in axes, top of this file) that has all of these axes."""
    found = next((view for view in VIEWS if set(axes) <= set(view)), None)
    assert found is not None, f"no view has the axes {axes}"
    return found


def divisors(n: int) -> list[int]:
    """Return every positive divisor of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True)
class Degrees:
    """Sizes of the parallel axes. The world has dp * pp * tp * sp ranks. ep * etp must divide dp * sp * tp. Raises BadInput if
    sizes do not fit together.

    `dp`: data, `pp`: pipeline, `tp`: tensor, `sp`: sequence (context) and `ep`: expert parallelism; `etp`: tensor parallelism of an expert.
    `ep_inner` (a divisor of ep): ranks of the ep axis on one node. `tp_col` and `tp_depth` make tp a grid: 2D has tp_col = q and
    tp = q * q, 2.5D also tp_depth = d (tp = d * q * q), 3D has tp_col = tp_depth = q (tp = q * q * q). `tp_row_copies` neighbors on
    tp_row, or `tp_col_copies` on tp_col, hold the same key-value head. `sp_heads` (a divisor of sp): neighbors that exchange heads for
    tokens (Ulysses); rings of sp / sp_heads ranks connect the groups of such neighbors."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1
    ep: int = 1
    etp: int = 1
    ep_inner: int = 1
    tp_col: int = 1
    tp_depth: int = 1
    sp_heads: int = 1
    tp_row_copies: int = 1
    tp_col_copies: int = 1

    def __post_init__(self) -> None:
        for name in (degree.name for degree in fields(self)):
            value = getattr(self, name)
            if value < 1:
                raise BadInput(f"degrees.{name}", got=value, needed="a whole number of at least 1", fix=Set(f"degrees.{name}", 1))
        stage = self.dp * self.sp * self.tp
        if stage % (self.ep * self.etp):
            fitting = stage % self.etp == 0
            fix = Set("degrees.ep", *divisors(stage // self.etp)) if fitting else Set("degrees.etp", *divisors(stage))
            raise BadInput(
                "degrees.ep" if self.etp == 1 else "degrees.ep * degrees.etp",
                got=self.ep * self.etp,
                needed=f"a divisor of dp * sp * tp = {stage}",
                fix=fix,
            )
        if self.sp % self.sp_heads:
            raise BadInput("sequence.heads", got=self.sp_heads, needed=f"a divisor of sp={self.sp}", fix=Set("it", *divisors(self.sp)))
        for whole, *parts in (("ep", "ep_inner"), ("tp", "tp_col", "tp_depth"), ("tp_row", "tp_row_copies"), ("tp_col", "tp_col_copies")):
            size, sizes = self.size(whole), [self.size(part) for part in parts]
            if size % math.prod(sizes):
                got, needed = " * ".join(map(str, sizes)), f"a divisor of {whole}={size}"
                raise BadInput(" * ".join(parts), got=got, needed=needed, fix=f"use one of {divisors(size)}")

    @property
    def edp(self) -> int:
        """Number of copies of each expert (expert data parallelism)."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    @property
    def ep_outer(self) -> int:
        """Number of nodes over which one set of experts is spread."""
        return self.ep // self.ep_inner

    @property
    def sp_ring(self) -> int:
        """Number of ranks in a ring of sequence parallelism."""
        return self.sp // self.sp_heads

    @property
    def tp_row(self) -> int:
        """Number of rows of the tp grid."""
        return self.tp // (self.tp_col * self.tp_depth)

    @property
    def tp_row_heads(self) -> int:
        """Number of ranks along tp_row with different key-value heads."""
        return self.tp_row // self.tp_row_copies

    @property
    def tp_col_heads(self) -> int:
        """Number of ranks along tp_col with different key-value heads."""
        return self.tp_col // self.tp_col_copies

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp * self.sp

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index on every axis of every view."""
        place: dict[str, int] = {}
        for view in VIEWS:
            rest = rank
            for axis in reversed(view):
                rest, place[axis] = divmod(rest, self.size(axis))
        return place

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return `rank` and all ranks that differ from it only on these axes, ascending. One view must have all these axes."""
        ranks, stride = [rank], 1
        for axis in reversed(view_of(*axes)):
            size = self.size(axis)
            if axis in axes:
                mine = rank // stride % size
                ranks = [other + (place - mine) * stride for place in range(size) for other in ranks]
            stride *= size
        return tuple(ranks)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the ranks of every group along one axis. It lists the whole world, so use it only for pictures and tests."""
        return [self.along(rank, axis) for rank in range(self.world) if self.coordinates(rank)[axis] == 0]


@dataclass(frozen=True)
class Axis:
    """One mesh axis as one rank sees it: the axis's `ranks`, this rank's `index` among them, and the process group.

    `group` is None on an axis of size 1 and before `Mesh.connect`. Collectives over an axis of size 1 do nothing. `label`: the caller
    of a collective ("layers.3"), shown in error messages. `communicator`: the mesh's Communicator, which counts collectives."""

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: Any = None
    label: str = ""
    communicator: Communicator = field(default_factory=Communicator, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    def backward(self) -> Axis:
        """Return this axis with a label that marks collectives of the backward pass in error messages."""
        return replace(self, label=f"{self.label} backward".lstrip())

    def count(self, name: str, tensor: Tensor, *, send: list[int] | None = None, receive: list[int] | None = None) -> None:
        """Count one call of the collective `name`, and write it into the record that the watchdog reads. To be called before the collective
        starts, also if torch or an engine starts it.

        In debug mode, first compare the call with the other ranks' calls, and raise Disagreement if they differ. `send[i]`, `receive[i]`:
        rows to and from the axis's i-th rank; None if all ranks pass tensors of the same shape. The name "send" is a message between two
        ranks, which is counted, but neither compared nor recorded here."""
        agreement, record = (None, None) if name == "send" else (self.communicator.agreement, self.communicator.record)
        if agreement is not None:
            dtype = str(tensor.dtype).removeprefix("torch.")
            agreement.check(self.ranks, Call(name, self.name, self.label, list(tensor.shape), dtype, send, receive))
        if record is not None:
            record.announce(self.name, self.ranks, self.index, name=name, label=self.label, tensor=tensor, send=send, receive=receive)
        sent = leaving(name, tensor.nbytes, self.size)
        if send is not None:
            sent = (sum(send) - send[self.index]) * (tensor.nbytes // len(tensor) if len(tensor) else 0)
        self.communicator.add(self.name, name, handed=tensor.nbytes, sent=sent)


@dataclass(frozen=True)
class Mesh:
    """All axes as one rank sees them, and the `world` axis over every rank. Example: Mesh.of(Degrees(dp=2, tp=4), 5).axis("tp").index is 1.

    `new_group(ranks)` makes the process group of these ranks; None before `connect`. All ranks must make the same number of process groups
    in the same order, because torch numbers a process's groups and uses the number in the group's name. `connect` makes the groups of
    `axes`. The methods `part`, and `axis` for several axes, may make one more at their first call. `more`: arguments of `part`
    (label, places) -> the axis that it made; None: this rank is not in it."""

    degrees: Degrees = Degrees()
    rank: int = 0
    axes: dict[str, Axis] = field(default_factory=dict)
    new_group: Callable[[tuple[int, ...]], Any] | None = None
    made: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False)  # process groups, by their ranks
    more: dict[tuple[str, tuple[int, ...]], Axis | None] = field(default_factory=dict, compare=False)
    communicator: Communicator = field(default_factory=Communicator, compare=False, repr=False)

    @staticmethod
    def of(degrees: Degrees, rank: int = 0, *, communicator: Communicator | None = None) -> Mesh:
        """Make the mesh of one rank, without process groups. Raise BadInput for a rank outside the world."""
        if not 0 <= rank < degrees.world:
            raise BadInput("rank", got=rank, needed=f"0 to {degrees.world - 1}", fix="start as many processes as the degrees multiply to")
        place, communicator = degrees.coordinates(rank), communicator or Communicator()
        axes = {name: Axis(name, degrees.along(rank, name), place[name], communicator=communicator) for name in AXES}
        axes["world"] = Axis("world", tuple(range(degrees.world)), rank, communicator=communicator)
        return Mesh(degrees, rank, axes, communicator=communicator)

    def axis(self, *names: str, label: str = "") -> Axis:
        """Return an axis, or the joint axis of several axes of one view, named "dp*sp" (without axes of size 1). The first call for a joint
        axis is collective over all ranks, because it may make a process group."""
        name = names[0] if len(names) == 1 else self._joined(names)
        return replace(self.axes[name], label=label) if label else self.axes[name]

    def _joined(self, names: tuple[str, ...]) -> str:
        long = [axis for axis in view_of(*names) if axis in names and self.degrees.size(axis) > 1] or names[:1]
        name = "*".join(long)
        if name not in self.axes:
            ranks = self.degrees.along(self.rank, *long)
            self.axes[name] = Axis(name, ranks, ranks.index(self.rank), self._group(ranks), communicator=self.communicator)
        return name

    def _group(self, ranks: tuple[int, ...]) -> Any:
        """Return the group of these ranks, which include this one; None for a single rank and before `connect`."""
        if self.new_group is None or len(ranks) == 1:
            return None
        if ranks not in self.made:
            self.made[ranks] = self.new_group(ranks)
        return self.made[ranks]

    def alone(self) -> Any:
        """Return a process group of this rank only, for libraries that need one for an axis of size 1. Every rank must call this."""
        if (self.rank,) not in self.made and self.new_group is not None:
            self.made[self.rank,] = self.new_group((self.rank,))
        return self.made[self.rank,]

    def connect(self, new_group: Callable[[tuple[int, ...]], Any], *, world: Any) -> Mesh:
        """Return the mesh with a process group on every axis longer than 1; axes with the same ranks share a group. world: the existing
        group of all ranks. Every rank calls `new_group` for its own groups, in the order of the axes."""
        all_ranks = self.axes["world"].ranks
        found = replace(self, axes={}, new_group=new_group, made={all_ranks: world}, more={})
        found.axes.update({name: replace(self.axes[name], group=found._group(self.axes[name].ranks)) for name in (*AXES, "world")})
        return found

    def part(self, name: str, places: tuple[int, ...], *, label: str) -> Axis | None:
        """Return an axis over only the indices `places` of the axis `name`, with a process group; None if this rank is not in it.
        Collective over all ranks at the first call with this label and these indices; later calls return the same axis."""
        if (label, places) not in self.more:
            ranks = tuple(self.axes[name].ranks[place] for place in places)
            held = self.rank in ranks
            group = None
            if self.new_group is not None and len(ranks) > 1:
                # a rank outside of `ranks` makes a group of itself alone, so that all ranks make the same number of groups
                group = self.new_group(ranks if held else (self.rank,))
            found = Axis(name, ranks, ranks.index(self.rank), group, label, self.communicator) if held else None
            self.more[label, places] = found
        return self.more[label, places]


def check_world(degrees: Degrees, world_size: int) -> None:
    """Raise BadInput if the degrees do not multiply to the number of started processes."""
    if degrees.world == world_size:
        return
    sizes = {name: degrees.size(name) for name in ("dp", "pp", "tp", "sp")}
    fits = [
        Set(f"degrees.{name}", world_size * size // degrees.world) for name, size in sizes.items() if world_size * size % degrees.world == 0
    ]
    raise BadInput(
        "degrees",
        got=" * ".join(f"{name} {size}" for name, size in sizes.items())
        + f" = {counted(degrees.world, 'rank')} on {counted(world_size, 'process')}",
        needed="the degrees to multiply to the number of processes",
        fix=any_of([*fits, Nproc(degrees.world)]),
    )
