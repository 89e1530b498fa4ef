"""2.5D tensor parallelism: d grids of q x q ranks, each with all weights in blocks and with its own share of the sequences.

    depth 0   [ x_00 x_01 ]  W_00 W_01        sequences over depth, then over rows: d q parts; channels over columns
              [ x_10 x_11 ]  W_10 W_11        weights as in two dimensions, the same on every depth
    depth 1   [ x_20 x_21 ]  W_00 W_01
              [ x_30 x_31 ]  W_10 W_11

Each grid multiplies by SUMMA as if it were alone (parallel/tensor/linear_2d.py): nothing crosses depth in a product. The gradient of a
block is of its grid's tokens, so it is summed over depth with the data-parallel ranks', once a step, and engines that shard over those
(ZeRO, FSDP) shard it over depth too. That is in the layout of a block, whose copies over tp_depth have seen other tokens.
So the products are those of two dimensions; this file says what depth adds.

Cost: 1/(d q^2) of the activations, 1/q^2 of the weights a rank. On p = d q^2 ranks a larger d makes q smaller, and with it the
(q - 1) / (d q^2) of x that a product sends; it moves more of W. d = 1 is 2D, d = q has a cube's shape.
Source: Tesseract (arXiv 2105.14500).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from parallel.errors import BadInput
from parallel.grids import refused
from parallel.mesh import divisors


def grid_of(tp: int, depth: int | None, *, sides: Sequence[int]) -> tuple[int, int, int]:
    """(depth, q, q) of tp ranks; depth None: the smallest above 1. Raises BadInput with the nearest numbers that work; `sides`: for q."""
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
            fix=f"use one of {depths}" if depths else f"set degrees.tp to {depth * side * side}",
        )
    depth = depth or deeper[0]
    return depth, math.isqrt(tp // depth), math.isqrt(tp // depth)
