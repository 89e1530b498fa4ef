"""2.5D tensor parallelism: d grids of q x q ranks. Each grid has all weights, in blocks, and its own shard of the sequences.

    depth 0   [ x_00 x_01 ]  W_00 W_01        sequences over depth, then over rows: d q shards; channels over columns
              [ x_10 x_11 ]  W_10 W_11        weights as in 2D, equal on every depth
    depth 1   [ x_20 x_21 ]  W_00 W_01
              [ x_30 x_31 ]  W_10 W_11

Each grid multiplies separately, by SUMMA (parallel/tensor/linear_2d.py). The grids' tokens differ, so a block's gradient is summed over
depth together with the data-parallel ranks, once a step, and engines that shard over those ranks (ZeRO, FSDP) shard over depth too. The
block's layout says so: its copies over tp_depth saw other tokens. This file only computes the shape of the grid.

Cost: 1/(d q^2) of the activations and 1/q^2 of the weights a rank. On p = d q^2 ranks, a larger d makes q smaller. A product then sends
less of x, (q - 1) / (d q^2) of it, and more of W. d = 1 is 2D; d = q has the shape of a cube. Source: Tesseract (arXiv 2105.14500).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.mesh.grids import refused
from parallel.mesh.mesh import divisors


def grid_of(tp: int, depth: int | None, *, sides: Sequence[int]) -> tuple[int, int, int]:
    """Return (depth, q, q) for tp ranks. Raise BadInput if tp / depth is no square of at least 2.

    `depth` None: the smallest above 1. `sides`: values of q from which the error message suggests values of tp.
    """
    depths = [d for d in divisors(tp) if tp // d > 1 and math.isqrt(tp // d) ** 2 == tp // d]
    deeper = [d for d in depths if d > 1]
    if depth is None and not deeper:
        work = [d * q * q for q in sides for d in range(2, tp + 3)]
        raise refused("2.5d", tp, "depth * q * q, both at least 2", work)
    if depth is not None and depth not in depths:
        side = max(2, round(math.sqrt(tp / depth)))
        raise BadInput(
            "tensor.depth",
            got=f"{depth} with degrees.tp={tp}",
            needed="degrees.tp / depth to be a square, 4 at least",
            fix=Set("it", *depths) if depths else Set("degrees.tp", depth * side * side),
        )
    depth = depth or deeper[0]
    return depth, math.isqrt(tp // depth), math.isqrt(tp // depth)
