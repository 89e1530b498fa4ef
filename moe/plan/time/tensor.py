"""Bytes of a dense Transformer layer on a rank under each kind of tensor parallelism: weights, kept activations, sent bytes.

    N tokens, D width, A = heads * channels of q, K = heads * channels of k (and of v), F hidden units; t ranks, a grid of side q, depth d
    products (inputs I -> outputs O): D -> A, K, K (queries, keys, values), A -> D, D -> F (twice with a gate), F -> D
    P: number of elements of all matrices; wide: in fp32, in which gradients are summed

             weights   elements sent forward                     elements sent backward
    1d       P / t     2 all-reduces: 4 (t-1)/t N D              the same
    sliced   P / t     2 all-gathers, 2 reduce-scatters: as 1d   the same; reduce-scatters are wide
    2d       P / q^2   (q-1)/q^2 (N I + I O) for each product    (q-1)/q^2 (2 N I + I O), and (q-1)/q^2 I O wide
    2.5d     P / q^2   as 2d with N / d                          as 2d with N / d
    3d       P / q^3   (q-1)/q^3 (N I + I O + N O)               (q-1)/q^3 (N O + I O + 2 N I), and (q-1)/q^3 I O wide

    Cross attention over S tokens of an encoder is like attention, but one product gives q, and another gives k and v of the S tokens.
    1d: one more all-reduce forward, N D, and two backward, N D and S D. sliced: gathers x and the S tokens. All kinds keep the S tokens.

    On a grid, q, k and v are one product, and so are w1 and w3, so that x is sent once for all of them. Norms on a grid gather 2 wide
    numbers per token forward and sum 2 backward.

    kept activations, in elements:
    4 N D        inputs of the two norms (wide in 1d and sliced), and of the products after them
    2 N (A + K)  q, keys, values, attention's output; besides a statistic of its softmax
    4 N F        input and output of the activation, the gate, their product (2 N F without a gate)
    4 N          statistics of norms
    1d divides tensors inside attention and network among ranks, grids divide all tensors, sliced all except
    gathered inputs of products. In 16 bits, 1d and sliced also keep P / t weights in the compute dtype.

    tensor.overlap_chunks = n makes n times as many collectives with the same bytes in all. The output projection and w2 then do not keep
    weights in the compute dtype.

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
        """(tokens, inputs, outputs) of each product if products of the same input are one product."""
        n, d, a, keys = self.tokens, self.width, self.inner, 2 * self.kv_heads * self.head_size
        cross = ((n, d, a), (self.source, d, keys), (n, a, d)) if self.source else ()
        return (n, d, a + keys), (n, a, d), *cross, (n, d, (1 + self.gated) * self.hidden), (n, self.hidden, d)

    @property
    def elements(self) -> int:
        """Number of elements of all matrices (P at the top of this file)."""
        return sum(inputs * outputs for inputs, outputs in self.products)


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank. weights: its matrices. kept: activations kept for the backward pass. forward, backward: messages sent in each
    pass. calls: number of collectives in both passes together; None on grids."""

    weights: int
    kept: int
    forward: int
    backward: int
    calls: int | None = None


WIDE = 4  # bytes of an fp32 element


def cost(grid: Grid, of: DenseLayer, *, chunks: int = 1) -> Cost:
    """Return the bytes of a layer on each rank of a grid of kind 1d, sliced, 2d, 2.5d or 3d. chunks: value of tensor.overlap_chunks."""
    kind = grid.kind
    forward, backward = _on_a_line(kind, grid.ranks, of) if kind in ("1d", "sliced") else _on_a_grid(kind, grid.depth, grid.columns, of)
    calls = {"1d": (7 if of.source else 4) * chunks, "sliced": (14 if of.source else 8) * chunks}.get(kind)
    weights = of.elements * of.itemsize // grid.matrix
    return Cost(weights, _kept(kind, grid.ranks, grid.columns, of, chunks), int(forward), int(backward), calls)


def _on_a_line(kind: str, ranks: int, of: DenseLayer) -> tuple[Fraction, Fraction]:
    own, other = (Fraction(ranks - 1, ranks) * tokens * of.width for tokens in (of.norms * of.tokens, of.source))
    if kind == "1d":
        return 2 * own * of.itemsize, 2 * (own + other) * of.itemsize
    wide = max(WIDE, of.itemsize)
    return (2 * own + other) * of.itemsize, own * (of.itemsize + wide) + other * wide


def _on_a_grid(kind: str, depth: int, side: int, of: DenseLayer) -> tuple[Fraction, Fraction]:
    held = Fraction(1, 1 if kind == "3d" else depth)
    part, wide = Fraction(side - 1, side**3 if kind == "3d" else side**2), max(WIDE, of.itemsize)
    row = Fraction(of.norms * of.tokens, depth * side)  # tokens that a row of ranks normalises, in each norm
    forward, backward = row * 2 * (side - 1) * wide, row * 2 * Fraction(2 * (side - 1), side) * wide
    for tokens, inputs, outputs in of.fused_products:
        x, w, y = held * tokens * inputs, inputs * outputs, held * tokens * outputs if kind == "3d" else 0
        forward += part * (x + w + y) * of.itemsize
        backward += part * ((2 * x + w + y) * of.itemsize + w * wide)
    return forward, backward


def _kept(kind: str, ranks: int, side: int, of: DenseLayer, chunks: int) -> int:
    n, wide, line = of.tokens, max(WIDE, of.itemsize), kind in ("1d", "sliced")
    keys, layers = of.kv_heads * of.head_size, of.norms - 1
    inside = n * ((2 * layers * of.inner + 2 * keys + (4 if of.gated else 2) * of.hidden) * of.itemsize + layers * of.heads * wide)
    inside += of.source * 2 * keys * of.itemsize
    read, normed = n if kind == "1d" else Fraction(n, ranks), n if line else Fraction(n, ranks)
    norms = of.norms * (read * (wide if line else of.itemsize) + normed * of.itemsize) * of.width
    norms += Fraction(of.source, 1 if line else ranks) * of.itemsize * of.width
    statistics = 2 * of.norms * (read if line else Fraction(n * side, ranks)) * wide
    second = of.width * (layers * of.inner + of.hidden) if chunks > 1 else 0
    cast = (of.elements - second) * of.itemsize // ranks if line and of.itemsize < WIDE else 0
    return int(Fraction(inside, ranks) + norms + statistics + cast)
