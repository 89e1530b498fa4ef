"""What sequence-parallel attention costs: bytes sent and kept, by method, as closed forms that are counted against runs.

    q = B H (L / N) C elements of a rank's queries, k = B K (L / N) C of its keys, r = B H (L / N) of a number for each query; N ranks

    method          sent by all ranks: forward                backward                                kept by a rank
    ring            N (N-1) 2k                                N (N-1) 2k  +  N N 2k wide              2q + 2k + r wide
    lightseq        far 2k  +  helped (2q + r wide)           far (2k + 2k wide)                      2q + 2k + r wide
                                                                + helped (3q + r wide + q wide)
    colossal_ring   N (N-1) 2k                                N (N-1) 2k  +  N (N-1) 2k wide          2q + 2k + N L / N * r
    ulysses         N (2q + 2s) (N-1) / N                     the same                                2q + 2s + r wide

far: pairs of ranks at most N / 2 apart, of which the later one is sent keys; helped: those further apart, of which the earlier one is
sent queries. s: k with heads repeated until N shares them out. wide: fp32, or fp64 where the input is. Sources: the methods' files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """One layer's, of `batch` sequences; `itemsize`: bytes of an element."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 4

    @property
    def wide(self) -> int:
        return max(4, self.itemsize)


@dataclass(frozen=True)
class Cost:
    """Bytes: sent by all ranks together, and kept by each from its forward to its backward pass."""

    forward: int
    backward: int
    kept: int


def cost(kind: str, ranks: int, of: Attention) -> Cost:
    """Of ring, lightseq, colossal_ring or ulysses on so many ranks."""
    held = of.batch * of.length // ranks
    q, k, r = held * of.heads * of.head_size, held * of.kv_heads * of.head_size, held * of.heads
    i, wide, turns = of.itemsize, of.wide, ranks * (ranks - 1)
    kept = (2 * q + 2 * k) * i + r * wide
    if kind == "ring":
        home = ranks * ranks if ranks > 1 else 0
        return Cost(turns * 2 * k * i, turns * 2 * k * i + home * 2 * k * wide, kept)
    if kind == "colossal_ring":
        return Cost(turns * 2 * k * i, turns * 2 * k * (i + wide), (2 * q + 2 * k + r * of.length) * i)
    if kind == "ulysses":
        shared = k * math.lcm(of.kv_heads, ranks) // of.kv_heads
        sent = (2 * q + 2 * shared) * i * (ranks - 1)
        return Cost(sent, sent, (2 * q + 2 * shared) * i + r * wide)
    assert kind == "lightseq", kind
    far = sum(ranks - apart for apart in range(1, ranks // 2 + 1))
    helped = ranks * (ranks - 1) // 2 - far
    forward = far * 2 * k * i + helped * (2 * q * i + r * wide)
    return Cost(forward, far * 2 * k * (i + wide) + helped * (3 * q * i + r * wide + q * wide), kept)
