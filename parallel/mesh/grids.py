"""Tensor-parallel ranks (tp) as a grid of depth x rows x columns; how many shards each kind of tensor parallelism makes of a tensor.

    1d, dtensor       one line: each rank has shards of heads, hidden units and vocabulary. `sliced` is 1d with sequence parallelism
    2d                q x q
    2.5d              d x q x q: d grids; each has all weights, cut into q x q blocks, and its own shard of the sequences
    3d                q x q x q
    copied            no tensor is cut

Arithmetic without torch, for recipes, planner and layers. docs/parallel/tensor_grids.md compares the kinds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.mesh import divisors

LINES = ("1d", "dtensor")  # kinds without a grid: each rank has shards of heads, hidden units and vocabulary
GRIDS = ("2d", "2.5d", "3d")
SMALLEST = {"2d": 4, "2.5d": 8, "3d": 8}  # smallest number of ranks of each kind


@dataclass(frozen=True)
class Grid:
    """Arrangement of the ranks of tp as depth x rows x columns. kind: value of tensor.kind, or "sliced" (top of this file). If
    the kind has no grid, `rows` is the number of ranks."""

    kind: str
    depth: int
    rows: int
    columns: int

    @property
    def ranks(self) -> int:
        return self.depth * self.rows * self.columns

    @property
    def sequences(self) -> int:
        """Number of shards into which tp cuts the sequences of a data-parallel rank: depth * rows on a grid, 1 without a grid."""
        return self.depth * self.rows if self.kind in GRIDS else 1

    @property
    def units(self) -> int:
        """Number of shards of heads, hidden units and the vocabulary."""
        return 1 if self.kind == "copied" else self.columns if self.kind in GRIDS else self.ranks

    @property
    def channels(self) -> int:
        """Number of shards of the model's channels (model.d_model)."""
        return self.columns * (self.depth if self.kind == "3d" else 1)

    @property
    def copies(self) -> int:
        """Number of ranks that hold the same shard of a weight matrix and process different tokens."""
        return self.depth if self.kind == "2.5d" else 1

    @property
    def matrix(self) -> int:
        """Number of shards of a weight matrix."""
        return 1 if self.kind == "copied" else self.ranks // self.copies

    def cuts(self, *, width: int, heads: int, groups: int, hidden: int) -> Iterator[tuple[str, int, int]]:
        """Yield (key of the recipe, its value, number of shards that must divide the value). width: d_model. heads: number of query heads.
        groups: number of key-value heads. hidden: d_ff, or 0 without dense networks.

        model.num_kv_heads is left out if it divides the number of shards: if there are fewer heads than shards, several ranks hold copies
        of a head. With DTensor the key is never left out, because DTensor does not make such copies."""
        yield "model.d_model", width, self.channels
        yield "model.num_heads", heads, self.units
        yield "model.d_ff", hidden, self.units
        if self.units % groups or self.kind == "dtensor":
            yield "model.num_kv_heads", groups, self.units

    def __str__(self) -> str:
        return " x ".join(str(side) for side in (self.depth, self.rows, self.columns) if side > 1)


@lru_cache(maxsize=1_000)
def grid(kind: str, tp: int, depth: int | None = None) -> Grid | None:
    """Return the grid of tp ranks; None if this number of ranks has no such grid. `depth`: depth of 2.5d; None: the smallest above 1."""
    if tp < 2 or kind not in GRIDS:
        return Grid(kind, 1, tp, 1)
    if kind == "2.5d":
        depth = depth or next((d for d in divisors(tp)[1:] if _root(tp // d, 2)), 0)
        side = _root(tp // depth, 2) if depth and tp % depth == 0 else 0
        return Grid(kind, depth, side, side) if side else None
    side = _root(tp, 2 if kind == "2d" else 3)
    return Grid(kind, side if kind == "3d" else 1, side, side) if side else None


def grid_of(kind: str, tp: int, depth: int | None = None, *, sides: Sequence[int]) -> Grid:
    """Return the grid of tp ranks. Raise BadInput if this number of ranks has no such grid. `sides`: sides q above 1 that the model allows;
    the error message suggests values of tp for which a grid has such sides."""
    found = grid(kind, tp, depth)
    if found is not None:
        return found
    if kind == "2.5d" and depth is not None:
        depths, side = [d for d in divisors(tp) if grid(kind, tp, d)], max(2, round(math.sqrt(tp / depth)))
        raise BadInput(
            "tensor.depth",
            got=f"{depth} with degrees.tp={tp}",
            needed="degrees.tp / depth to be a square number of at least 4",
            fix=Set("it", *depths) if depths else Set("degrees.tp", depth * side * side),
        )
    needed = {"2d": "a square: q * q", "2.5d": "depth * q * q, both at least 2", "3d": "a cube: q * q * q"}[kind]
    depths = list(range(2, tp + 3)) if kind == "2.5d" else [1]
    work = [deep * q ** (3 if kind == "3d" else 2) for q in sides for deep in depths]
    near = [max((n for n in work if n < tp), default=0), min((n for n in work if n > tp), default=0)]
    advised = Set("degrees.tp", *filter(None, near)) | Set("tensor.kind", "1d") if any(near) else Set("tensor.kind", "1d")
    raise BadInput("degrees.tp", got=f"{tp} with tensor.kind={kind}", needed=needed, fix=advised)


def _root(n: int, power: int) -> int:
    side = round(n ** (1 / power))
    return side if side > 1 and side**power == n else 0
