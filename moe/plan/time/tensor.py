"""What tensor parallelism costs a dense Transformer layer, by form: bytes of weights, kept and sent by a rank, as closed forms.

    N tokens, D model, A = heads * channels of q, K of keys and of values, F hidden; t ranks, q a side, d depth; products (inputs I ->
    outputs O): D -> A, K, K (queries, keys, values), A -> D, D -> F (twice with a gate), F -> D; P elements of all

             weights   sent forward                              sent backward
    1d       P / t     2 sums: 4 (t-1)/t N D                     the same
    sliced   P / t     2 gathers, 2 reduce-scatters: as 1d       the same; what is summed is wide
    2d       P / q^2   (q-1)/q^2 of N I + I O for each product   (q-1)/q^2 of 2 N I + I O, and I O wide
    2.5d     P / q^2   the same with N / d                       the same
    3d       P / q^3   (q-1)/q^3 of N I + I O + N O              (q-1)/q^3 of N O + I O + 2 N I, and I O wide
    q, k and v are one product of grids, and so are w1 and w3: their outputs together, so x travels once for all of them
    norms of grids     gathers of 2 numbers a token of a row, forward, and sums of 2 backward, wide

    kept: 4 N D, what a norm and the products after it read (the norm's wide on a line); 4 N A, q, keys and values for all heads, and what
    attention gives, with a number of its softmax; 4 N F, what goes into the activation and comes out, the gate, their product (2 without
    a gate); 4 statistics of norms. 1d cuts what is inside, grids everything, sliced everything but what it gathered for products.
    On a line products in 16 bits keep their cast weights too, P / t; those of grids cast them again.

    calls: 4 of 1d and 8 of sliced; with tensor.overlap_chunks n times as many, of the same bytes. Out and w2 then cast their weights again.

wide: fp32, in which gradients are summed. Sources: the methods' files in parallel/tensor/.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from parallel.mesh.grids import Grid


@dataclass(frozen=True)
class DenseLayer:
    """Attention with rotary positions and a network, with a gate if `gated`, LayerNorms; sizes as above, `heads` of q, `itemsize` bytes."""

    tokens: int
    width: int
    heads: int
    head_size: int
    kv_heads: int
    hidden: int
    gated: bool = True
    itemsize: int = 4

    @property
    def inner(self) -> int:
        """A above."""
        return self.heads * self.head_size

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each."""
        keys = self.kv_heads * self.head_size
        into = ((self.width, self.hidden),) * (2 if self.gated else 1)
        return (
            (self.width, self.inner),
            (self.width, keys),
            (self.width, keys),
            (self.inner, self.width),
            *into,
            (self.hidden, self.width),
        )

    @property
    def fused_products(self) -> tuple[tuple[int, int], ...]:
        """The same, those of one x together."""
        q, k, v, out, *into, down = self.products
        return (self.width, q[1] + k[1] + v[1]), out, (self.width, sum(outputs for _, outputs in into)), down

    @property
    def elements(self) -> int:
        """P above."""
        return sum(inputs * outputs for inputs, outputs in self.products)


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank: `weights` of the products in `itemsize`, `kept` from the forward to the backward pass, sent in both.

    `calls` of collectives in both, on a line.
    """

    weights: int
    kept: int
    forward: int
    backward: int
    calls: int | None = None


WIDE = 4


def cost(grid: Grid, of: DenseLayer, *, chunks: int = 1) -> Cost:
    """Return the bytes of a layer on a grid of kind 1d, sliced, 2d, 2.5d or 3d. `chunks`: n above."""
    kind = grid.kind
    forward, backward = _on_a_line(kind, grid.ranks, of) if kind in ("1d", "sliced") else _on_a_grid(kind, grid.depth, grid.columns, of)
    calls = {"1d": 4 * chunks, "sliced": 8 * chunks}.get(kind)
    weights = of.elements * of.itemsize // grid.matrix
    return Cost(weights, _kept(kind, grid.ranks, grid.columns, of, chunks), int(forward), int(backward), calls)


def _on_a_line(kind: str, ranks: int, of: DenseLayer) -> tuple[Fraction, Fraction]:
    share = Fraction(ranks - 1, ranks) * of.tokens * of.width
    one_way = 4 * share * of.itemsize
    return one_way, one_way if kind == "1d" else 2 * share * (of.itemsize + max(WIDE, of.itemsize))


def _on_a_grid(kind: str, depth: int, side: int, of: DenseLayer) -> tuple[Fraction, Fraction]:
    held = of.tokens if kind == "3d" else Fraction(of.tokens, depth)
    part, wide = Fraction(side - 1, side**3 if kind == "3d" else side**2), max(WIDE, of.itemsize)
    row = Fraction(2 * of.tokens, depth * side)  # of two norms
    forward, backward = row * 2 * (side - 1) * wide, row * 2 * Fraction(2 * (side - 1), side) * wide
    for inputs, outputs in of.fused_products:
        x, w, y = held * inputs, inputs * outputs, held * outputs if kind == "3d" else 0
        forward += part * (x + w + y) * of.itemsize
        backward += part * ((2 * x + w + y) * of.itemsize + w * wide)
    return forward, backward


def _kept(kind: str, ranks: int, side: int, of: DenseLayer, chunks: int) -> int:
    n, wide, line = of.tokens, max(WIDE, of.itemsize), kind in ("1d", "sliced")
    inside = Fraction(n, ranks) * ((4 * of.inner + (4 if of.gated else 2) * of.hidden) * of.itemsize + of.heads * wide)
    read, normed = n if kind == "1d" else Fraction(n, ranks), n if line else Fraction(n, ranks)
    norms = 2 * (read * (wide if line else of.itemsize) + normed * of.itemsize) * of.width
    statistics = 4 * (read if line else Fraction(n * side, ranks)) * wide
    second = of.width * (of.inner + of.hidden) if chunks > 1 else 0
    cast = (of.elements - second) * of.itemsize // ranks if line and of.itemsize < WIDE else 0
    return int(inside + norms + statistics + cast)
