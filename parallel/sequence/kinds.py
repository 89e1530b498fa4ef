"""Facts about the methods of sequence-parallel attention, for checks, planner, model and verify. This file does not import torch.

To add a method, add its file to this folder, its SequenceKind to this file, and its name to `Named`. Costs are closed forms, which
`python -m tests.counted sequence` compares with counted bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal, NamedTuple

from parallel.sequence.order import Order, Places

if TYPE_CHECKING:
    from parallel.mesh.mesh import Axis
    from parallel.sequence.method import Method

Make = Callable[["Axis", Order, int | None], "Method"]  # (axis, order, window) -> the method
Named = Literal["ring", "lightseq", "colossal_ring", "ulysses"]  # values of sequence.kind


@dataclass(frozen=True)
class Attention:
    """The sizes of one attention layer for `batch` sequences of `length` tokens, over all ranks. itemsize: bytes of an element."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 4

    @property
    def wide(self) -> int:
        """Bytes of an element of log-sum-exps and of summed gradients, which are fp32 or wider."""
        return max(4, self.itemsize)


class Held(NamedTuple):
    """Numbers of elements on a rank. q: of the queries. k: of the keys, and of the values. r: of the log-sum-exps, one a query and head."""

    q: int
    k: int
    r: int

    @staticmethod
    def of(layer: Attention, ranks: int) -> Held:
        tokens = layer.batch * layer.length // ranks
        return Held(tokens * layer.heads * layer.head_size, tokens * layer.kv_heads * layer.head_size, tokens * layer.heads)


@dataclass(frozen=True)
class Cost:
    """Bytes of one attention layer. forward, backward: bytes that all ranks together send in the pass. kept: bytes that each rank saves."""

    forward: int
    backward: int
    kept: int


@dataclass(frozen=True)
class SequenceKind:
    """Facts about one method of sequence-parallel attention.

    about: a phrase for the help text. make: makes the method. cost: (number of ranks, layer) -> bytes.
    open_make: makes the method for attention without a causal mask; None: `make` is used for it too.
    orders: the orders of positions that the method can have (order.py), the default first.
    trades_heads: all ranks exchange heads for tokens (Ulysses). Each then has whole sequences, so `make` gets an axis of one rank.
    keeps_scores: whole rows of scores are kept for the backward pass.
    overlaps: messages are sent during computation; otherwise ranks wait for them.
    uneven: (order, number of ranks) -> work of the busiest rank divided by the mean.
    advice: (order, number of ranks in the ring) -> one line if another choice is better; else None.
    tried: variants that `moe verify` runs: name -> the recipe's section `sequence`; None: one variant, named like the method."""

    name: str
    about: str
    make: Make
    cost: Callable[[int, Attention], Cost]
    open_make: Make | None = None
    orders: tuple[Places, ...] = ("contiguous",)
    trades_heads: bool = False
    keeps_scores: bool = False
    overlaps: bool = True
    uneven: Callable[[Places, int], float] = lambda order, ranks: 1.0
    advice: Callable[[Places, int], str | None] = lambda order, ranks: None
    tried: Mapping[str, Mapping[str, str]] | None = None


def _imported(file: str, method: str) -> Make:
    """Return a function that makes the Method of this name. It imports the file when it is called, because the file needs torch."""
    return lambda axis, order, window: getattr(import_module(f"parallel.sequence.{file}"), method)(axis, order, window)


def _ring_cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of keys and values that go around the ring, and in the backward pass also of their gradients, in fp32 or wider."""
    q, k, r = Held.of(layer, ranks)
    turns, home = ranks * (ranks - 1) * 2 * k * layer.itemsize, ranks * ranks if ranks > 1 else 0
    return Cost(turns, turns + home * 2 * k * layer.wide, (2 * q + 2 * k) * layer.itemsize + r * layer.wide)


def _ring_uneven(order: Places, ranks: int) -> float:
    """Return (work of the busiest rank) / mean. With contiguous positions, the last of N ranks computes N - 1/2 of its N
    blocks of scores, and the mean is N / 2."""
    return (2 * ranks - 1) / ranks if order == "contiguous" else 1.0


def _ring_advice(order: Places, ranks: int) -> str | None:
    waits = order == "contiguous" and ranks > 1
    return "sequence.order contiguous: under a causal mask the first ranks wait for the last; better: zigzag" if waits else None


def _lightseq_cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of LightSeq. In each of `plain` pairs of ranks, one sends the other its keys and values. In each of
    `helped` pairs, one sends its queries and receives partial results."""
    (q, k, r), i, wide = Held.of(layer, ranks), layer.itemsize, layer.wide
    plain = sum(ranks - apart for apart in range(1, ranks // 2 + 1))
    helped = ranks * (ranks - 1) // 2 - plain
    forward = plain * 2 * k * i + helped * (2 * q * i + r * wide)
    backward = plain * 2 * k * (i + wide) + helped * (3 * q * i + r * wide + q * wide)
    return Cost(forward, backward, (2 * q + 2 * k) * i + r * wide)


def _colossal_cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of two rings in each pass, of two reduce-scatters in fp32 or wider, and of the rows of scores kept for backward."""
    (q, k, r), i = Held.of(layer, ranks), layer.itemsize
    turns = ranks * (ranks - 1) * 2 * k
    return Cost(turns * i, turns * (i + layer.wide), (2 * q + 2 * k + r * layer.length) * i)


def _ulysses_cost(ranks: int, layer: Attention) -> Cost:
    """Return the bytes of four all-to-alls in each pass. Key-value heads are repeated until their number is a multiple of the ranks."""
    q, k, r = Held.of(layer, ranks)
    shared = k * math.lcm(layer.kv_heads, ranks) // layer.kv_heads
    sent = (2 * q + 2 * shared) * layer.itemsize * (ranks - 1)
    return Cost(sent, sent, (2 * q + 2 * shared) * layer.itemsize + r * layer.wide)


_ORDERS: tuple[Places, ...] = ("zigzag", "striped", "contiguous")
RING = SequenceKind(
    "ring",
    "keys and values are sent around a ring of ranks",
    _imported("ring", "Ring"),
    _ring_cost,
    orders=_ORDERS,
    uneven=_ring_uneven,
    advice=_ring_advice,
    tried={order: {"order": order} for order in _ORDERS},
)
LIGHTSEQ = SequenceKind(
    "lightseq", "a ring in which idle ranks compute for others", _imported("balanced", "Balanced"), _lightseq_cost, open_make=RING.make
)
COLOSSAL_RING = SequenceKind(
    "colossal_ring",
    "a ring that stores the scores of all keys",
    _imported("colossal_ring", "ColossalRing"),
    _colossal_cost,
    keeps_scores=True,
    uneven=lambda order, ranks: 2.0 if ranks > 1 else 1.0,  # masked pairs are computed too, so each rank has twice the mean causal work
    advice=lambda order, ranks: (
        "sequence.kind colossal_ring: keeps whole rows of scores, which grow with the square of the length; better: ring"
    ),
    tried={"colossal": {}},
)
ULYSSES = SequenceKind("ulysses", "all-to-all of heads for tokens", RING.make, _ulysses_cost, trades_heads=True, overlaps=False)
SEQUENCES: dict[str, SequenceKind] = {kind.name: kind for kind in (RING, LIGHTSEQ, COLOSSAL_RING, ULYSSES)}
DEFAULT = RING.name


def described() -> str:
    """Return the help text of `sequence.kind`: a phrase about each method."""
    return "; ".join(f"{kind.name}: {kind.about}" for kind in SEQUENCES.values())
