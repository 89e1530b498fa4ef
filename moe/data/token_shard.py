"""Who reads which tokens of a batch: one value, made of the mesh here and nowhere else.

    dp 2, sp 2                 tokens 0 .. 5          tokens 6 .. 11           pp, and tp but for its grids' rows: all read the same
    sequences 0, 1             dp 0  sp 0             dp 0  sp 1               targets stand one place further right: a slice
    sequences 2, 3             dp 1  sp 0             dp 1  sp 1               is read with one token more

Which places of a sequence sp gives to whom is one of several orders (parallel/sequence/order.py); here they are contiguous.

Data order, positions and noise, the number of tokens that a loss is divided by, sums of numbers, validation and groups of capacity
follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from parallel.errors import BadInput
from parallel.mesh import Axis, Degrees, Mesh
from parallel.sequence.order import Order

Batch = TypeVar("Batch", bound=Any)  # an array or a tensor


@dataclass(frozen=True)
class TokenShard:
    """Of a batch of `num_sequences` sequences of `length` tokens that are read, the part of one rank: some sequences, some places of each.

    A part is stored as the batch's `columns` that it needs, ascending: its places and those one further, [sequences, columns].
    Of an encoder-decoder the first `source` places are what the encoder reads: they are no targets.
    `axes`: together their ranks read every token once, so sums over tokens (losses, counts, loads) are summed over them.
    """

    num_sequences: int
    length: int
    sequences: range
    positions: tuple[int, ...]
    axes: tuple[Axis, ...]
    source: int = 0

    @staticmethod
    def of(
        mesh: Mesh, *, num_sequences: int, length: int, order: str = "contiguous", over: tuple[str, ...] = ("dp",), source: int = 0
    ) -> TokenShard:
        """This rank's part; `over`: the axes whose ranks have other sequences. Raises BadInput where the batch does not divide."""
        dp, sp = mesh.axis(*over), mesh.axis("sp")
        sequences = _run(num_sequences, dp, what="sequences", fix="change train.global_batch, train.eval_sequences or degrees.dp")
        positions = order_of(mesh, order, length).places(sp.index)
        return TokenShard(num_sequences, length, sequences, positions, (dp, sp), source)

    @staticmethod
    def whole(num_sequences: int, length: int, *, source: int = 0) -> TokenShard:
        """Everything, for one process."""
        return TokenShard.of(Mesh.of(Degrees()), num_sequences=num_sequences, length=length, source=source)

    @staticmethod
    def holding(mesh: Mesh, shape: Sequence[int]) -> TokenShard:
        """The same, of a rank whose part is contiguous tokens of this shape [sequences, tokens + 1], and so is every other's."""
        sequences, tokens = shape
        return TokenShard.of(mesh, num_sequences=sequences * mesh.axis("dp").size, length=(tokens - 1) * mesh.axis("sp").size)

    @property
    def num_tokens(self) -> int:
        """Of the whole batch."""
        return self.num_sequences * self.length

    @cached_property
    def places(self) -> npt.NDArray[np.int64]:
        """The positions, as every step indexes with them."""
        return np.array(self.positions, dtype=np.int64)

    @cached_property
    def columns(self) -> npt.NDArray[np.int64]:
        """Of the batch, those that this rank reads as inputs or targets."""
        return np.union1d(self.places, self.places + 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Of this rank's part: [sequences, columns]."""
        return len(self.sequences), len(self.columns)

    def of_batch(self, batch: Batch) -> Batch:
        """This rank's part of tokens [num_sequences, length + 1]; a view of it where its columns are one run."""
        rows, columns = batch[self.sequences.start : self.sequences.stop], self.columns
        return rows[:, slice(columns[0], columns[-1] + 1) if self._is_run else columns]  # type: ignore[no-any-return]

    def inputs(self, part: Batch) -> Batch:
        """Of a part, or of some of its sequences, the tokens that are read [sequences, places]."""
        return self._at(part, 0)

    def targets(self, part: Batch) -> Batch:
        """The tokens after them; of an encoder-decoder, after those that the decoder reads."""
        return self._at(part, 1)[:, self.source :]  # type: ignore[no-any-return]

    def _at(self, part: Batch, further: int) -> Batch:
        if self._is_run:
            return part[:, further : further + len(self.positions)]  # type: ignore[no-any-return]
        return part[:, self._where[further]]  # type: ignore[no-any-return]

    @property
    def _is_run(self) -> bool:
        return len(self.columns) == len(self.positions) + 1

    @cached_property
    def _where(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Among the columns, the places and those one further."""
        at, after = (np.searchsorted(self.columns, self.places + further) for further in (0, 1))
        return at, after


def order_of(mesh: Mesh, kind: str, length: int) -> Order:
    """Which places of sequences of `length` tokens each rank of the sp axis holds. Raises BadInput where the length does not divide."""
    return Order(kind, mesh.axis("sp_ring").size, length, inner=mesh.axis("sp_heads").size)


def _run(size: int, axis: Axis, *, what: str, fix: str) -> range:
    """The equal run of 0 .. size - 1 that one rank of the axis takes."""
    if size < 1 or size % axis.size:
        raise BadInput(what, got=size, needed=f"a multiple of {axis.name}={axis.size}", fix=fix)
    each = size // axis.size
    return range(axis.index * each, (axis.index + 1) * each)
