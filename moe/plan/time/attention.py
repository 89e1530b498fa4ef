"""Bytes that sequence-parallel attention sends and keeps, for each method. Closed forms, which tests compare with the bytes of runs.

    N ranks; elements of a rank: q = B H (L / N) C of its queries, k = B K (L / N) C of its keys, r = B H (L / N) of one number a query

    method          sent by all ranks: forward                backward                                kept by a rank
    ring            N (N-1) 2k                                N (N-1) 2k  +  N N 2k wide              2q + 2k + r wide
    lightseq        far 2k  +  helped (2q + r wide)           far (2k + 2k wide)                      2q + 2k + r wide
                                                                + helped (3q + r wide + q wide)
    colossal_ring   N (N-1) 2k                                N (N-1) 2k  +  N (N-1) 2k wide          2q + 2k + N L / N * r
    ulysses         N (2q + 2s) (N-1) / N                     the same                                2q + 2s + r wide

far: number of pairs of ranks at most N / 2 apart; the earlier rank sends keys to the later. helped: number of pairs further apart; the
later rank sends queries to the earlier. s: as k, with heads repeated until N divides their number. wide: fp32 (fp64 if the input is
fp64); other elements have the input's dtype. Sources: see the methods' files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Attention:
    """Sizes of the attention of one layer, for `batch` sequences. itemsize: bytes of an element."""

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
    """Bytes. forward, backward: sent by all ranks together. kept: kept by each rank from its forward to its backward pass."""

    forward: int
    backward: int
    kept: int


def cost(kind: str, ranks: int, of: Attention) -> Cost:
    """Cost of attention on `ranks` ranks. kind: ring, lightseq, colossal_ring or ulysses."""
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
