"""DeepSpeed-Ulysses (parallel/sequence/ulysses.py)."""

from __future__ import annotations

import math

from parallel.sequence.kinds import ring
from parallel.sequence.kinds.kind import Attention, Cost, Held, SequenceKind


def cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of four all-to-alls each way; key-value heads are repeated until the ranks divide their number."""
    q, k, r = Held.of(layer, ranks)
    shared = k * math.lcm(layer.kv_heads, ranks) // layer.kv_heads
    sent = (2 * q + 2 * shared) * layer.itemsize * (ranks - 1)
    return Cost(sent, sent, (2 * q + 2 * shared) * layer.itemsize + r * layer.wide)


ULYSSES = SequenceKind("ulysses", "ranks trade heads", ring.make, cost, trades_heads=True, overlaps=False)
