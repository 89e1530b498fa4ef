"""Bytes that each rank sends for a dense Transformer layer with 2D, 2.5D and 3D tensor parallelism.

    N tokens, D width, A channels of all query heads, K of all key heads (and of all value heads), F hidden units; grid of side q, depth d
    matrix products (inputs I -> outputs O): D -> A, K, K (queries, keys, values), A -> D, D -> F (twice with a gate), F -> D
    wide: elements that are sent in fp32: sums of weight gradients, statistics of norms

             elements sent forward                     elements sent backward
    2d       (q-1)/q^2 (N I + I O) for each product    (q-1)/q^2 (2 N I + I O), and (q-1)/q^2 I O wide
    2.5d     as 2d with N / d                          as 2d with N / d
    3d       (q-1)/q^3 (N I + I O + N O)               (q-1)/q^3 (N O + I O + 2 N I), and (q-1)/q^3 I O wide

    Queries, keys and values are one product, and so are w1 and w3, so that x is sent once for all of them. In cross attention over the S
    tokens of an encoder, one product gives queries, and another gives keys and values of the S tokens. Norms gather 2 wide numbers per
    token forward and sum 2 backward.

Sources: see the methods' files in parallel/tensor/.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from parallel.mesh.grids import Grid


@dataclass(frozen=True)
class DenseLayer:
    """Sizes of a dense layer: attention with rotary positions, a feed-forward network, LayerNorms. itemsize: bytes of an element. source:
    number of encoder tokens if the layer also has cross attention; 0: no cross attention."""

    tokens: int
    width: int
    heads: int
    head_size: int
    kv_heads: int
    hidden: int
    gated: bool = True
    itemsize: int = 4
    source: int = 0

    @property
    def norms(self) -> int:
        return 3 if self.source else 2

    @property
    def inner(self) -> int:
        """Number of channels of all heads of queries (A at the top of this file)."""
        return self.heads * self.head_size

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each product: q, k, v, out; the same again for cross attention; w1; w3 if there is a gate; w2."""
        keys, into = self.kv_heads * self.head_size, (self.width, self.hidden)
        attention = (self.width, self.inner), (self.width, keys), (self.width, keys), (self.inner, self.width)
        return *attention * (self.norms - 1), *(into,) * (2 if self.gated else 1), (self.hidden, self.width)

    @property
    def fused_products(self) -> tuple[tuple[int, int, int], ...]:
        """(tokens, inputs, outputs) of each product, with products of the same input joined into one."""
        n, d, a, keys = self.tokens, self.width, self.inner, 2 * self.kv_heads * self.head_size
        cross = ((n, d, a), (self.source, d, keys), (n, a, d)) if self.source else ()
        return (n, d, a + keys), (n, a, d), *cross, (n, d, (1 + self.gated) * self.hidden), (n, self.hidden, d)


WIDE = 4  # bytes of an fp32 element


def sent(grid: Grid, of: DenseLayer) -> tuple[int, int]:
    """Return the bytes that each rank of a grid of kind 2d, 2.5d or 3d sends (forward, backward)."""
    kind, depth, side = grid.kind, grid.depth, grid.columns
    held = Fraction(1, 1 if kind == "3d" else depth)
    part, wide = Fraction(side - 1, side**3 if kind == "3d" else side**2), max(WIDE, of.itemsize)
    row = Fraction(of.norms * of.tokens, depth * side)  # (tokens of one grid row) x (norms of a layer)
    forward, backward = row * 2 * (side - 1) * wide, row * 2 * Fraction(2 * (side - 1), side) * wide
    for tokens, inputs, outputs in of.fused_products:
        x, w, y = held * tokens * inputs, inputs * outputs, held * tokens * outputs if kind == "3d" else 0
        forward += part * (x + w + y) * of.itemsize
        backward += part * ((2 * x + w + y) * of.itemsize + w * wide)
    return int(forward), int(backward)
