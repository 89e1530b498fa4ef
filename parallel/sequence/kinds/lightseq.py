"""LightSeq (parallel/sequence/balanced.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.sequence.kinds.kind import Attention, Cost, Held, SequenceKind

if TYPE_CHECKING:
    from parallel.mesh.mesh import Axis
    from parallel.sequence.method import Method
    from parallel.sequence.order import Order


def make(axis: Axis, order: Order, window: int | None) -> Method:
    from parallel.sequence.balanced import Balanced

    return Balanced(axis, order, window)


def cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes for all pairs of ranks: in `far` pairs, one rank sends its keys and values; in `helped` pairs, its queries."""
    (q, k, r), i, wide = Held.of(layer, ranks), layer.itemsize, layer.wide
    far = sum(ranks - apart for apart in range(1, ranks // 2 + 1))
    helped = ranks * (ranks - 1) // 2 - far
    forward = far * 2 * k * i + helped * (2 * q * i + r * wide)
    backward = far * 2 * k * (i + wide) + helped * (3 * q * i + r * wide + q * wide)
    return Cost(forward, backward, (2 * q + 2 * k) * i + r * wide)


LIGHTSEQ = SequenceKind("lightseq", "idle ranks help", make, cost)
