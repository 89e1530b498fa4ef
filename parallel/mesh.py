"""The mesh: every rank's place along every parallel axis, in two views of the same ranks.

    dense view   pp x dp  x sp x tp      (tp varies fastest: neighbours share the fastest links)
    expert view  pp x edp x ep x etp     (the same dp*sp*tp ranks of a stage, cut again for experts)
                            ep = ep_outer x ep_inner   (between nodes and within one, for exchanges in two steps)

With sp = tp = etp = 1 the expert view cuts dp into edp groups of ep neighbours; with larger sp and tp
the same arithmetic lets ep fold over them. This file is arithmetic only: it needs no process group
and no torch; `Mesh.connect` asks its caller for the groups.

Source: GShard (arXiv 2006.16668) for experts inside data parallelism; MoE parallel folding
(arXiv 2504.14960) for the second view.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from parallel.errors import BadInput

DENSE = ("pp", "dp", "sp", "tp")
EXPERT = ("pp", "edp", "ep", "etp")
NODES = ("pp", "edp", "ep_outer", "ep_inner", "etp")  # the expert view with ep cut in two
VIEWS = (DENSE, EXPERT, NODES)
AXES = tuple(dict.fromkeys(DENSE + EXPERT + NODES))


def divisors(n: int) -> list[int]:
    """Every positive divisor of n, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@dataclass(frozen=True)
class Degrees:
    """How many ways each axis splits the work; the world is dp * pp * tp * sp, and ep * etp divides dp * sp * tp.

    `ep_inner` neighbours of the ep axis share a node; it divides ep.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    sp: int = 1
    ep: int = 1
    etp: int = 1
    ep_inner: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "pp", "tp", "sp", "ep", "etp", "ep_inner"):
            value = getattr(self, name)
            if value < 1:
                raise BadInput(f"degrees.{name}", got=value, needed="a whole number of at least 1", fix=f"set degrees.{name} to 1")
        stage = self.dp * self.sp * self.tp
        if stage % (self.ep * self.etp):
            raise BadInput(
                "degrees.ep" if self.etp == 1 else "degrees.ep * degrees.etp",
                got=self.ep * self.etp,
                needed=f"a divisor of dp * sp * tp = {stage}",
                fix=f"set degrees.ep to one of {divisors(stage)}",
            )
        if self.ep % self.ep_inner:
            raise BadInput("ep_inner", got=self.ep_inner, needed=f"a divisor of ep={self.ep}", fix=f"use one of {divisors(self.ep)}")

    @property
    def edp(self) -> int:
        """How many copies of each expert there are."""
        return self.dp * self.sp * self.tp // (self.ep * self.etp)

    @property
    def ep_outer(self) -> int:
        """Over how many nodes one set of experts lies."""
        return self.ep // self.ep_inner

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

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of ranks along one axis, each ordered by the ranks' place on it; together they cover the world once."""
        view = next(view for view in VIEWS if axis in view)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank)
            found.setdefault(tuple(place[a] for a in view if a != axis), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]


@dataclass(frozen=True)
class Axis:
    """One rank's view of one mesh axis: its place among `ranks`, and the process group once connected.

    `group` is None on an axis of size 1 and before `Mesh.connect`; collectives over such an axis do nothing. `label` says
    on whose behalf they are called ("layers.3"): it names them where something goes wrong.
    """

    name: str
    ranks: tuple[int, ...] = (0,)
    index: int = 0
    group: Any = None
    label: str = ""

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True)
class Mesh:
    """All axes as one rank sees them, and the `world` axis over every rank."""

    degrees: Degrees = Degrees()
    rank: int = 0
    axes: dict[str, Axis] = field(default_factory=dict)
    new_group: Callable[[tuple[int, ...]], Any] | None = None
    more: dict[tuple[str, tuple[int, ...]], Axis | None] = field(default_factory=dict, compare=False)  # made by `part`

    @staticmethod
    def of(degrees: Degrees, rank: int = 0) -> Mesh:
        if not 0 <= rank < degrees.world:
            raise BadInput("rank", got=rank, needed=f"0 to {degrees.world - 1}", fix="start as many processes as the degrees multiply to")
        axes = {}
        for name in AXES:
            ranks = next(g for g in degrees.groups(name) if rank in g)
            axes[name] = Axis(name, ranks, ranks.index(rank))
        axes["world"] = Axis("world", tuple(range(degrees.world)), rank)
        return Mesh(degrees, rank, axes)

    def axis(self, name: str, *, label: str = "") -> Axis:
        return replace(self.axes[name], label=label) if label else self.axes[name]

    def connect(self, new_group: Callable[[tuple[int, ...]], Any]) -> Mesh:
        """The same mesh with a process group on every axis longer than 1.

        Every rank calls `new_group` for every group of every axis in the same order, as process groups ask for; equal
        sets of ranks share one group.
        """
        made: dict[tuple[int, ...], Any] = {}
        lists = [self.degrees.groups(name) for name in AXES]
        for ranks in [g for groups in lists for g in groups] + [self.axes["world"].ranks]:
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = new_group(ranks)
        axes = {name: replace(axis, group=made.get(axis.ranks)) for name, axis in self.axes.items()}
        return replace(self, axes=axes, new_group=new_group)

    def part(self, name: str, places: tuple[int, ...], *, label: str) -> Axis | None:
        """Those places of an axis as an axis of their own, with a group of its own; None where this rank stands at none of them.

        Every rank must ask for the same parts in the same order. One that was asked for before is there already.
        """
        if (label, places) not in self.more:
            self.more[label, places] = None
            for group in self.degrees.groups(name):
                ranks = tuple(group[place] for place in places)
                made = self.new_group(ranks) if self.new_group is not None and len(ranks) > 1 else None
                if self.rank in ranks:
                    self.more[label, places] = Axis(name, ranks, ranks.index(self.rank), made, label)
        return self.more[label, places]


def check_world(degrees: Degrees, world_size: int) -> None:
    """Refuse degrees that do not multiply to the number of processes that were started."""
    if degrees.world != world_size:
        rest = degrees.pp * degrees.tp * degrees.sp
        fix = f"set degrees.dp to {world_size // rest}" if world_size % rest == 0 else f"start a multiple of {rest} processes"
        raise BadInput(
            "degrees",
            got=f"dp {degrees.dp} * pp {degrees.pp} * tp {degrees.tp} * sp {degrees.sp} = {degrees.world} ranks on {world_size} processes",
            needed="the degrees to multiply to the number of processes",
            fix=f"{fix}, or start {degrees.world}: --nproc {degrees.world}",
        )
