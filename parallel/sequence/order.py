"""The positions of a sequence that each rank holds (below: the rank of each of 16 positions), and the blocks of causal attention between
two ranks. Arithmetic only.

contiguous   0 0 0 0 1 1 1 1 2 2 2 2 3 3 3 3      one chunk each: the first rank has little work, the last one much
striped      0 1 2 3 0 1 2 3 0 1 2 3 0 1 2 3      nearly equal work (Striped Attention, arXiv 2311.09431)
zigzag       0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0      chunks i and 2N - 1 - i on rank i: equal work (Llama 3, arXiv 2407.21783, 3.3.2)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from parallel.errors import BadInput
from parallel.fixes import Set

Places = Literal["contiguous", "striped", "zigzag"]
ORDERS: tuple[Places, ...] = get_args(Places)


class Block(NamedTuple):
    """Queries of one rank and keys of another, as slices of the ranks' tokens. triangle: query i sees only keys 0 to i of the block."""

    queries: slice
    keys: slice
    triangle: bool


ALL = slice(None)


def cut(runs: Sequence[range], part: slice) -> tuple[range, ...]:
    """Return the slice `part` of the joined ranges `runs`, as ranges.

    Example: cut([range(4), range(8, 12)], slice(2, 6)) is (range(2, 4), range(8, 10))."""
    start, stop, step = part.indices(sum(map(len, runs)))
    assert step == 1
    kept = []
    for run in runs:
        kept.append(run[max(0, start) : max(0, stop)])
        start, stop = start - len(run), stop - len(run)
    return tuple(run for run in kept if len(run))


@dataclass(frozen=True)
class Order:
    """Division of sequences of `length` tokens over a ring of `size` places. inner: number of ranks at each place of the ring (Ulysses);
    each of them holds one chunk of the place's positions. kind: one of ORDERS. causal: a token sees no later tokens. Raises BadInput if
    `length` cannot be divided."""

    kind: str
    size: int
    length: int
    inner: int = 1
    causal: bool = True

    def __post_init__(self) -> None:
        parts = self.size * self.inner * (2 if self.kind == "zigzag" and not self._alone else 1)
        if self.length % parts:
            words = "2 * degrees.sp" if self.kind == "zigzag" else "degrees.sp"
            raise BadInput(
                "model.max_length",
                got=self.length,
                needed=f"a multiple of {words} = {parts} for sequence.order={self.kind}",
                fix=Set("it", max(1, round(self.length / parts)) * parts),
            )

    @property
    def _alone(self) -> bool:
        """Return whether a single rank has all positions, for which any length is allowed."""
        return self.size * self.inner == 1

    def ranges(self, rank: int) -> tuple[range, ...]:
        """Return the positions of a rank's tokens, as ranges in the order in which the rank stores them. rank: 0 to size * inner - 1."""
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

    def positions(self, rank: int) -> tuple[int, ...]:
        """Return the positions of a rank's tokens, in the order in which the rank stores them. rank: 0 to size * inner - 1."""
        return tuple(position for span in self.ranges(rank) for position in span)

    def blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """Return blocks of all visible (query, key) pairs, for queries of one place of the ring and keys of another (0 to size - 1)."""
        return tuple(block for block in self._blocks(query_rank, key_rank) if self._pairs(block))

    def _blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        if not self.causal or query_rank == key_rank:
            return (Block(ALL, ALL, self.causal),)
        if self.kind == "contiguous":
            return (Block(ALL, ALL, False),) if key_rank < query_rank else ()
        if self.kind == "striped":
            strict = Block(slice(1, None), slice(None, -1), True)
            return (Block(ALL, ALL, True),) if key_rank < query_rank else (strict,)
        half = self.length // self.size // 2
        first, second = slice(None, half), slice(half, None)
        return (Block(ALL, first, False),) if key_rank < query_rank else (Block(second, ALL, False),)

    def seen(self, query_rank: int, key_rank: int) -> int:
        """Return the number of visible (query, key) pairs between the queries of one place of the ring and the keys of another."""
        return sum(map(self._pairs, self.blocks(query_rank, key_rank)))

    def _pairs(self, block: Block) -> int:
        rows, columns = (len(range(self.length // self.size)[run]) for run in (block.queries, block.keys))
        return rows * (rows + 1) // 2 if block.triangle else rows * columns
