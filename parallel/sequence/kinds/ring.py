"""Ring attention (parallel/sequence/ring.py), the only method with a choice of orders."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parallel.sequence.kinds.kind import Attention, Cost, Held, SequenceKind
from parallel.sequence.order import Order, Places

if TYPE_CHECKING:
    from parallel.mesh.mesh import Axis
    from parallel.sequence.method import Method


def make(axis: Axis, order: Order, window: int | None) -> Method:
    from parallel.sequence.ring import Ring

    return Ring(axis, order, window)


def cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of keys and values that go around the ring, and in the backward pass also of their gradients, in fp32 or wider."""
    q, k, r = Held.of(layer, ranks)
    turns, home = ranks * (ranks - 1) * 2 * k * layer.itemsize, ranks * ranks if ranks > 1 else 0
    return Cost(turns, turns + home * 2 * k * layer.wide, (2 * q + 2 * k) * layer.itemsize + r * layer.wide)


def uneven(order: Places, ranks: int) -> float:
    """Return the busiest rank's work divided by the mean. For contiguous positions, the last rank has N - 1/2 blocks, the mean is N / 2."""
    return (2 * ranks - 1) / ranks if order == "contiguous" else 1.0


def advice(order: Places, ranks: int) -> str | None:
    waits = order == "contiguous" and ranks > 1
    return "sequence.order contiguous: under a causal mask the first ranks wait for the last; better: zigzag" if waits else None


ORDERS: tuple[Places, ...] = ("zigzag", "striped", "contiguous")
RING = SequenceKind(
    "ring", "keys go round", make, cost, orders=ORDERS, uneven=uneven, advice=advice, tried={order: {"order": order} for order in ORDERS}
)
