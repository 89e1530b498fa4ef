"""Facts about a method of sequence-parallel attention for checks, planner, model and verify: one SequenceKind each, listed in catalog.py.

Costs are closed forms, which `moe bench comm --kinds sequence` compares with counted bytes. `make` imports the method's file when it is
called, so that checks and planner need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from parallel.errors import BadInput
from parallel.sequence.order import Order, Places

if TYPE_CHECKING:
    from parallel.mesh.mesh import Axis
    from parallel.sequence.method import Method


@dataclass(frozen=True)
class Attention:
    """The sizes of one attention layer for `batch` sequences. itemsize: bytes of an element."""

    batch: int
    length: int
    heads: int
    kv_heads: int
    head_size: int
    itemsize: int = 4

    @property
    def wide(self) -> int:
        return max(4, self.itemsize)


class Held(NamedTuple):
    """Numbers of elements on a rank. q: queries. k: keys; also values. r: one for each query and head, such as a log-sum-exp."""

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


class SequenceSizes(NamedTuple):
    """Sizes and features of a model, by which a method of sequence parallelism accepts or refuses it.

    ranks: number of sequence-parallel ranks. heads, kv_heads: on one tensor-parallel rank. length: tokens of a sequence. bias: attention
    logits have T5's bias by distance. sinks: softmax has attention sinks. windows: some layers attend to a sliding window."""

    ranks: int
    heads: int
    kv_heads: int
    length: int
    bias: bool
    sinks: bool
    windows: bool


@dataclass(frozen=True)
class SequenceKind:
    """Facts about one method of sequence-parallel attention.

    about: a phrase for the help text. make: (axis, order, window) -> the method. cost: (number of ranks, layer) -> bytes.
    orders: the orders of positions that the method can have (order.py), the default first.
    trades_heads: all ranks exchange heads for tokens, so `make` gets an axis of one rank.
    keeps_scores: whole rows of scores are kept for the backward pass.
    overlaps: messages are sent during computation; otherwise ranks wait for them.
    uneven: (order, number of ranks) -> work of the busiest rank divided by the mean.
    refuses: model -> the reason why the method cannot train it; None if it can.
    advice: (order, number of ranks in the ring) -> a line if another choice is better; else None.
    tried: name -> keys of the recipe's section `sequence`, for each variant that `moe verify` runs; None: one, named like the method."""

    name: str
    about: str
    make: Callable[[Axis, Order, int | None], Method]
    cost: Callable[[int, Attention], Cost]
    orders: tuple[Places, ...] = ("contiguous",)
    trades_heads: bool = False
    keeps_scores: bool = False
    overlaps: bool = True
    uneven: Callable[[Places, int], float] = lambda order, ranks: 1.0
    refuses: Callable[[SequenceSizes], BadInput | None] = lambda sizes: None
    advice: Callable[[Places, int], str | None] = lambda order, ranks: None
    tried: Mapping[str, Mapping[str, str]] | None = None
