"""Kinds of tensor parallelism by the shape of their grid of ranks: (depth, rows, columns).

Arithmetic without torch, for recipes, planner and layers.

2d   q x q                 3d   q x q x q                 2.5d   d grids of q x q: parallel/tensor/linear_2p5d.py
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.errors import BadInput
from parallel.fixes import Set

LINES = ("1d", "dtensor")  # ranks in one line, each with shards of heads, hidden units and vocabulary
GRIDS = ("2d", "2.5d", "3d")


def grid_of(kind: str, tp: int, *, sides: Sequence[int]) -> tuple[int, int, int]:
    """Return (depth, rows, columns) of kind 2d or 3d. Raise BadInput if `tp` is no square or cube.

    `sides`: sides above 1 that the model allows, from which the error message suggests values of tp.
    """
    power, needed = (2, "a square: q * q") if kind == "2d" else (3, "a cube: q * q * q")
    side = round(tp ** (1 / power))
    if side**power != tp or side < 2:
        raise refused(kind, tp, needed, [q**power for q in sides])
    return (1 if kind == "2d" else side), side, side


def refused(kind: str, tp: int, needed: str, work: list[int]) -> BadInput:
    """Return the error for a `tp` that does not fit. It suggests the nearest numbers of ranks in `work`."""
    near = [max((n for n in work if n < tp), default=0), min((n for n in work if n > tp), default=0)]
    fix = Set("degrees.tp", *filter(None, near)) | Set("tensor.kind", "1d") if any(near) else Set("tensor.kind", "1d")
    return BadInput("degrees.tp", got=f"{tp} with tensor.kind={kind}", needed=needed, fix=fix)
