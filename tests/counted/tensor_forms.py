"""Closed forms of a dense layer with tensor parallelism: bytes of weights, kept activations and messages on each rank.

N tokens, D width, A = heads * channels of q, K = heads * channels of k (and of v), F hidden units; t ranks, a grid of side q
P: number of elements of all matrices

         weights   elements sent forward                     elements sent backward
1d       P / t     2 all-reduces: 4 (t-1)/t N D              the same
sliced   P / t     2 all-gathers, 2 reduce-scatters: as 1d   the same; reduce-scatters are in fp32
2d       P / q^2   moe/plan/time/layer_messages.py               moe/plan/time/layer_messages.py
2.5d     P / q^2   the same                                  the same
3d       P / q^3   the same                                  the same

With cross attention over S tokens of an encoder, 1d: one more all-reduce forward, N D, and two backward, N D and S D. sliced: gathers x
and the S tokens. All kinds keep the S tokens.

kept activations, in elements:
4 N D        inputs of the two norms (in fp32 in 1d and sliced), and of the products after them
2 N (A + K)  q, keys, values, attention's output; besides a statistic of its softmax
4 N F        input and output of the activation, the gate, their product (2 N F without a gate)
4 N          statistics of norms
1d divides tensors inside attention and network among ranks, grids divide all tensors, sliced all except
gathered inputs of products. In 16 bits, 1d and sliced also keep P / t weights in the compute dtype.

tensor.overlap_chunks = n makes n times as many collectives with the same bytes in all. The output projection and w2 then do not keep
weights in the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from moe.plan.time.layer_messages import WIDE, DenseLayer, sent
from parallel.mesh.grids import Grid


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank. weights: its matrices. kept: activations kept for the backward pass. forward, backward: messages sent in each
    pass. calls: number of collectives in both passes together; None on grids."""

    weights: int
    kept: int
    forward: int
    backward: int
    calls: int | None = None


def cost(grid: Grid, of: DenseLayer, *, chunks: int = 1) -> Cost:
    """Return the bytes of a layer on each rank of a grid of kind 1d, sliced, 2d, 2.5d or 3d. chunks: value of tensor.overlap_chunks."""
    kind = grid.kind
    forward, backward = _on_a_line(kind, grid.ranks, of) if kind in ("1d", "sliced") else sent(grid, of)
    calls = {"1d": (7 if of.source else 4) * chunks, "sliced": (14 if of.source else 8) * chunks}.get(kind)
    weights = _elements(of) * of.itemsize // grid.matrix
    return Cost(weights, _kept(kind, grid.ranks, grid.columns, of, chunks), forward, backward, calls)


def _elements(of: DenseLayer) -> int:
    """Number of elements of all matrices (P at the top of this file)."""
    return sum(inputs * outputs for inputs, outputs in of.products)


def _on_a_line(kind: str, ranks: int, of: DenseLayer) -> tuple[int, int]:
    own, other = (Fraction(ranks - 1, ranks) * tokens * of.width for tokens in (of.norms * of.tokens, of.source))
    if kind == "1d":
        return int(2 * own * of.itemsize), int(2 * (own + other) * of.itemsize)
    wide = max(WIDE, of.itemsize)
    return int((2 * own + other) * of.itemsize), int(own * (of.itemsize + wide) + other * wide)


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
    cast = (_elements(of) - second) * of.itemsize // ranks if line and of.itemsize < WIDE else 0
    return int(Fraction(inside, ranks) + norms + statistics + cast)
