"""The mesh: every rank's place along every parallel axis, in several views of the same ranks.

    DENSE    pp x dp  x sp x tp                      (tp varies fastest: neighbours share the fastest links)
    GRID     pp x dp  x sp_ring x sp_heads x tp_depth x tp_row x tp_col      tp as a grid: 1D n x 1, 2D q x q, 2.5D d grids of q x q,
                                     3D a cube; sp as rings of ranks that share out heads among their neighbours
    HEADS    GRID with tp_row (or tp_col) cut again, into heads x copies, where that side has more ranks than there are key-value heads
    EXPERT   pp x edp x ep x etp                     (the same dp*sp*tp ranks of a stage, cut again for experts)
    NODES    pp x edp x ep_outer x ep_inner x etp            ep between nodes and within one, for exchanges in two steps

With sp = tp = etp = 1 the expert view cuts dp into edp groups of ep neighbours; with larger sp and tp the same arithmetic
lets ep fold over them. An axis is named for the number that differs along it: the ranks of one `tp_row` axis stand in
different rows, so they are one column of the grid. Axes of one view join: `mesh.axis("dp", "sp")` are the ranks over which
the gradient of a dense weight is summed.

A rank works out its own groups from its own place, and takes part in making those alone: nothing here lists the world, so
a hundred thousand ranks cost what eight do. Arithmetic only: no process group and no torch; `Mesh.connect` asks its caller.

Sources: GShard (arXiv 2006.16668) for experts inside data parallelism; MoE parallel folding (arXiv 2504.14960) for the
expert view; Optimus (arXiv 2104.05343), Tesseract (arXiv 2105.14500) and 3D (arXiv 2105.14450) for the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from parallel.communicator import Communicator
from parallel.errors import BadInput, counted

FACTORS = {
    "sp": ("sp_ring", "sp_heads"),
    "tp": ("tp_depth", "tp_row", "tp_col"),
    "ep": ("ep_outer", "ep_inner"),
    "tp_row": ("tp_row_heads", "tp_row_copies"),
    "tp_col": ("tp_col_heads", "tp_col_copies"),
}  # an axis, and those that it is the product of


def _factored(view: tuple[str, ...], *axes: str) -> tuple[str, ...]:
    return tuple(part for axis in view for part in (FACTORS[axis] if axis in axes else (axis,)))


DENSE = ("pp", "dp", "sp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
GRID, NODES = _factored(DENSE, "sp", "tp"), _factored(EXPERT, "ep")
HEADS = (_factored(GRID, "tp_row"), _factored(GRID, "tp_col"))
VIEWS = (DENSE, EXPERT, NODES, GRID, *HEADS)
AXES = tuple(dict.fromkeys(axis for view in VIEWS for axis in view))


def view_of(*axes: str) -> tuple[str, ...]:
    """The first view that has all of these axes."""
    found = next((view for view in VIEWS if set(axes) <= set(view)), None)
    assert found is not None, f"no view has the axes {axes}"
    return found


def divisors(n: int) -> list[int]:
    """Every positive divisor of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True)
class Degrees:
    """How many ways each axis splits the work; the world is dp * pp * tp * sp, and ep * etp divides dp * sp * tp.

    `ep_inner` neighbours of the ep axis share a node; it divides ep. `tp_col` and `tp_depth` make a grid of tp: 2D has tp_col = q and
    tp = q * q, 2.5D also tp_depth = d, 3D all three q; 1D has neither. `tp_row_copies` neighbours on tp_row, or `tp_col_copies` on
    tp_col, hold the same key-value head. `sp_heads` neighbours of the sp axis trade heads for tokens (Ulysses), and rings go over the
    others; it divides sp.
    """

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
                raise BadInput(f"degrees.{name}", got=value, needed="a whole number of at least 1", fix=f"set degrees.{name} to 1")
        stage = self.dp * self.sp * self.tp
        if stage % (self.ep * self.etp):
            fitting = stage % self.etp == 0
            fix = f"set degrees.ep to one of {divisors(stage // self.etp)}" if fitting else f"set degrees.etp to one of {divisors(stage)}"
            raise BadInput(
                "degrees.ep" if self.etp == 1 else "degrees.ep * degrees.etp",
                got=self.ep * self.etp,
                needed=f"a divisor of dp * sp * tp = {stage}",
                fix=fix,
            )
        if self.ep % self.ep_inner:
            raise BadInput("ep_inner", got=self.ep_inner, needed=f"a divisor of ep={self.ep}", fix=f"use one of {divisors(self.ep)}")
        if self.sp % self.sp_heads:
            raise BadInput("sequence.heads", got=self.sp_heads, needed=f"a divisor of sp={self.sp}", fix=f"use one of {divisors(self.sp)}")
        if self.tp % (self.tp_col * self.tp_depth):
            raise BadInput(
                "tp_col * tp_depth",
                got=f"{self.tp_col} * {self.tp_depth}",
                needed=f"a divisor of tp={self.tp}",
                fix=f"use one of {divisors(self.tp)}",
            )
        for side in ("tp_row", "tp_col"):
            copies, size = self.size(f"{side}_copies"), self.size(side)
            if size % copies:
                raise BadInput(f"{side}_copies", got=copies, needed=f"a divisor of {side}={size}", fix=f"use one of {divisors(size)}")

    @property
    def edp(self) -> int:
        """How many copies of each expert there are."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    @property
    def ep_outer(self) -> int:
        """Over how many nodes one set of experts lies."""
        return self.ep // self.ep_inner

    @property
    def sp_ring(self) -> int:
        """How many parts of a sequence go round a ring."""
        return self.sp // self.sp_heads

    @property
    def tp_row(self) -> int:
        """How many rows the grid of tp has."""
        return self.tp // (self.tp_col * self.tp_depth)

    @property
    def tp_row_heads(self) -> int:
        """How many ranks along tp_row hold different key-value heads."""
        return self.tp_row // self.tp_row_copies

    @property
    def tp_col_heads(self) -> int:
        """How many ranks along tp_col do."""
        return self.tp_col // self.tp_col_copies

    @property
    def world(self) -> int:
        return self.dp * self.pp * self.tp * self.sp

    def size(self, axis: str) -> int:
        return int(getattr(self, axis))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank stands on every axis of every view."""
        place: dict[str, int] = {}
        for view in VIEWS:
            rest = rank
            for axis in reversed(view):
                rest, place[axis] = divmod(rest, self.size(axis))
        return place

    def along(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one on these axes of a view alone, ascending, this one among them."""
        ranks, stride = [rank], 1
        for axis in reversed(view_of(*axes)):
            size = self.size(axis)
            if axis in axes:
                mine = rank // stride % size
                ranks = [other + (place - mine) * stride for place in range(size) for other in ranks]
            stride *= size
        return tuple(ranks)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of ranks along one axis; together they cover the world once. It lists the world: for pictures and tests."""
        return [self.along(rank, axis) for rank in range(self.world) if self.coordinates(rank)[axis] == 0]


@dataclass(frozen=True)
class Axis:
    """One rank's view of one mesh axis: its place among `ranks`, and the process group once connected.

    `group` is None on an axis of size 1 and before `Mesh.connect`; collectives over such an axis do nothing. `label` says
    on whose behalf they are called ("layers.3"): it names them where something goes wrong. `communicator`: the mesh's, which counts them.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: Any = None
    label: str = ""
    communicator: Communicator = field(default_factory=Communicator, compare=False, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """All axes as one rank sees them, and the `world` axis over every rank. `communicator`: what they all count with.

    Making a group is collective over its ranks, and torch names it by how many groups a process has: so all ranks make equally many,
    in the same order. `connect` makes those of `axes`; the first `axis` of a joint axis and `part` make one more each.
    """

    degrees: Degrees = Degrees()
    rank: int = 0
    axes: dict[str, Axis] = field(default_factory=dict)
    new_group: Callable[[tuple[int, ...]], Any] | None = None
    made: dict[tuple[int, ...], Any] = field(default_factory=dict, compare=False)  # groups so far, by their ranks
    more: dict[tuple[str, tuple[int, ...]], Axis | None] = field(default_factory=dict, compare=False)  # made by `part`
    communicator: Communicator = field(default_factory=Communicator, compare=False, repr=False)

    @staticmethod
    def of(degrees: Degrees, rank: int = 0, *, communicator: Communicator | None = None) -> Mesh:
        if not 0 <= rank < degrees.world:
            raise BadInput("rank", got=rank, needed=f"0 to {degrees.world - 1}", fix="start as many processes as the degrees multiply to")
        place, communicator = degrees.coordinates(rank), communicator or Communicator()
        axes = {name: Axis(name, degrees.along(rank, name), place[name], communicator=communicator) for name in AXES}
        axes["world"] = Axis("world", tuple(range(degrees.world)), rank, communicator=communicator)
        return Mesh(degrees, rank, axes, communicator=communicator)

    def axis(self, *names: str, label: str = "") -> Axis:
        """One axis, or several of one view as one: "dp*sp", the ranks of both. One of size 1 adds nothing, also not to the name.

        The first call for a joint axis makes its group, where no axis of the same ranks has one: collective over all ranks.
        """
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
        """The group of these ranks, this one among them; None where it is alone, and before `connect`."""
        if self.new_group is None or len(ranks) == 1:
            return None
        if ranks not in self.made:
            self.made[ranks] = self.new_group(ranks)
        return self.made[ranks]

    def alone(self) -> Any:
        """A group of this rank alone, for those who ask for a group where an axis has none. Every rank must ask."""
        if (self.rank,) not in self.made and self.new_group is not None:
            self.made[self.rank,] = self.new_group((self.rank,))
        return self.made[self.rank,]

    def connect(self, new_group: Callable[[tuple[int, ...]], Any], *, world: Any) -> Mesh:
        """The same mesh with a process group on every axis longer than 1; `world`: the group of all ranks, which is there already.

        Every rank calls `new_group` for the groups that it is in, at most one an axis, and all in the order of the axes; axes of equal
        ranks share one group.
        """
        everyone = self.axes["world"].ranks
        found = replace(self, axes={}, new_group=new_group, made={everyone: world}, more={})
        found.axes.update({name: replace(self.axes[name], group=found._group(self.axes[name].ranks)) for name in (*AXES, "world")})
        return found

    def part(self, name: str, places: tuple[int, ...], *, label: str) -> Axis | None:
        """Those places of an axis as an axis of their own, with a group of its own; None where this rank stands at none of them.

        Every rank must ask for the same parts in the same order. One that was asked for before is there already.
        """
        if (label, places) not in self.more:
            ranks = tuple(self.axes[name].ranks[place] for place in places)
            held = self.rank in ranks
            group = None
            if self.new_group is not None and len(ranks) > 1:
                group = self.new_group(ranks if held else (self.rank,))  # who is not in it makes one of its own: equally many on all ranks
            found = Axis(name, ranks, ranks.index(self.rank), group, label, self.communicator) if held else None
            self.more[label, places] = found
        return self.more[label, places]


def check_world(degrees: Degrees, world_size: int) -> None:
    """Refuse degrees that do not multiply to the number of processes that were started."""
    if degrees.world == world_size:
        return
    sizes = {name: degrees.size(name) for name in ("dp", "pp", "tp", "sp")}
    fits = {name: world_size * size // degrees.world for name, size in sizes.items() if world_size * size % degrees.world == 0}
    ways = "".join(f"{'' if at else 'set '}degrees.{name} to {size}, or " for at, (name, size) in enumerate(fits.items()))
    raise BadInput(
        "degrees",
        got=" * ".join(f"{name} {size}" for name, size in sizes.items())
        + f" = {counted(degrees.world, 'rank')} on {counted(world_size, 'process')}",
        needed="the degrees to multiply to the number of processes",
        fix=f"{ways}start {degrees.world}: --nproc {degrees.world}",
    )
