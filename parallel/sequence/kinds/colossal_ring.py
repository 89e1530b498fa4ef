"""Colossal-AI's ring self-attention (parallel/sequence/colossal_ring.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.sequence.kinds.kind import Attention, Cost, Held, SequenceKind

if TYPE_CHECKING:
    from parallel.mesh.mesh import Axis
    from parallel.sequence.method import Method
    from parallel.sequence.order import Order


def make(axis: Axis, order: Order, window: int | None) -> Method:
    from parallel.sequence.colossal_ring import ColossalRing

    return ColossalRing(axis, order, window)


def cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of two rings in each pass, of two reduce-scatters in fp32 or wider, and of the rows of scores kept for backward."""
    (q, k, r), i = Held.of(layer, ranks), layer.itemsize
    turns = ranks * (ranks - 1) * 2 * k
    return Cost(turns * i, turns * (i + layer.wide), (2 * q + 2 * k + r * layer.length) * i)


COLOSSAL_RING = SequenceKind(
    "colossal_ring",
    "whole scores",
    make,
    cost,
    keeps_scores=True,
    uneven=lambda order, ranks: 2.0 if ranks > 1 else 1.0,  # twice the causal work: masked pairs are computed too
    advice=lambda order, ranks: (
        "sequence.kind colossal_ring: keeps whole rows of scores, which grow with the square of the length; better: ring"
    ),
    tried={"colossal": {}},
)
