"""Which places of a sequence each rank holds, and which blocks two ranks' tokens make under causal attention.

    contiguous   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3      a run each: the first rank's queries see little, the last one's everything
    striped      0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3      every rank's queries see as much, to a token (Striped Attention, arXiv 2311.09431)
    zigzag       0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0      runs i and 2N - 1 - i on rank i: exactly as much (Llama 3, arXiv 2407.21783, 3.3.2)

Arithmetic only. A block is (queries, keys, triangle): which of the one rank's tokens see which of the other's; with `triangle` each
sees the keys up to its own place in the block, else all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.errors import BadInput

ORDERS = ("contiguous", "striped", "zigzag")


class Block(NamedTuple):
    queries: slice
    keys: slice
    triangle: bool


ALL = slice(None)


def cut(runs: Sequence[range], part: slice) -> tuple[range, ...]:
    """Of places that lie in runs one after another, those that a slice names, as runs again."""
    start, stop, step = part.indices(sum(map(len, runs)))
    assert step == 1
    kept = []
    for run in runs:
        kept.append(run[max(0, start) : max(0, stop)])
        start, stop = start - len(run), stop - len(run)
    return tuple(run for run in kept if len(run))


@dataclass(frozen=True)
class Order:
    """Of sequences of `length` tokens over `size` ranks. `inner`: so many neighbours share one rank's part of the order, a run each."""

    kind: str
    size: int
    length: int
    inner: int = 1

    def __post_init__(self) -> None:
        parts = self.size * self.inner * (2 if self.kind == "zigzag" and not self._alone else 1)
        if self.length % parts:
            words = "2 * degrees.sp" if self.kind == "zigzag" else "degrees.sp"
            raise BadInput(
                "model.max_length",
                got=self.length,
                needed=f"a multiple of {words} = {parts} for sequence.order={self.kind}",
                fix=f"set it to {max(1, round(self.length / parts)) * parts}",
            )

    @property
    def _alone(self) -> bool:
        """One rank has all places, of any length."""
        return self.size * self.inner == 1

    def runs(self, rank: int) -> tuple[range, ...]:
        """The places that a rank of size * inner holds, as runs in its order."""
        outer, part = divmod(rank, self.inner)
        each = self.length // self.size // self.inner
        return cut(self._outer(outer), slice(part * each, (part + 1) * each))

    def _outer(self, rank: int) -> tuple[range, ...]:
        each = self.length // self.size
        if self.kind == "contiguous" or self._alone:
            return (range(rank * each, (rank + 1) * each),)
        if self.kind == "striped":
            return (range(rank, self.length, self.size),)
        half, last = each // 2, 2 * self.size - 1 - rank
        return (range(rank * half, (rank + 1) * half), range(last * half, (last + 1) * half))

    def places(self, rank: int) -> tuple[int, ...]:
        """The same one by one, ascending."""
        return tuple(place for run in self.runs(rank) for place in run)

    def blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """What the tokens of one rank of `size` see of another's (whole parts: all of the inner ranks together)."""
        return tuple(block for block in self._blocks(query_rank, key_rank) if self._pairs(block))

    def _blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        if query_rank == key_rank:
            return (Block(ALL, ALL, True),)
        if self.kind == "contiguous":
            return (Block(ALL, ALL, False),) if key_rank < query_rank else ()
        if self.kind == "striped":
            strict = Block(slice(1, None), slice(None, -1), True)
            return (Block(ALL, ALL, True),) if key_rank < query_rank else (strict,)
        half = self.length // self.size // 2
        first, second = slice(None, half), slice(half, None)
        return (Block(ALL, first, False),) if key_rank < query_rank else (Block(second, ALL, False),)

    def seen(self, query_rank: int, key_rank: int) -> int:
        """How many pairs of a query and a key these blocks hold."""
        return sum(map(self._pairs, self.blocks(query_rank, key_rank)))

    def _pairs(self, block: Block) -> int:
        rows, columns = (len(range(self.length // self.size)[run]) for run in (block.queries, block.keys))
        return rows * (rows + 1) // 2 if block.triangle else rows * columns
