"""Assignment of a batch's tokens to ranks. Only this module derives it from the mesh.

    dp 2, sp 2                 tokens 0 .. 5          tokens 6 .. 11           targets are one place further right, so a shard
    sequences 0, 1             dp 0  sp 0             dp 0  sp 1               is read with one token more
    sequences 2, 3             dp 1  sp 0             dp 1  sp 1

Ranks that differ only in pp or tp read the same shard, except for the rows of a grid of tensor parallelism, which have different sequences.
Sequence parallelism can distribute positions in several orders (parallel/sequence/order.py); here they are contiguous.

Other modules derive from a shard: the order of the data, positions, noise, the number of tokens by which a loss is divided, sums over
ranks, validation, and the groups of tokens that share a capacity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from parallel.errors import BadInput
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.sequence.order import Order

Batch = TypeVar("Batch", bound=Any)  # an array or a tensor
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenShard:
    """One rank's part of a batch of `num_sequences` sequences of `length` tokens: the indices of `sequences` and the `positions` in them.

    A part is stored as [sequences, columns]: `columns`, ascending, are the rank's positions and for each the next position, its target. In
    an encoder-decoder the first `source` of them are the encoder's input and have no targets. `axes`: the ranks along these axes together
    read every token once, so losses, counts and loads are summed over them.
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
        """Return this rank's part. `order`: a kind of parallel/sequence/order.py. `over`: axes along which ranks have different sequences.
        `source`: tokens of a whole sequence that an encoder reads. Raises BadInput if the axes do not divide the batch."""
        dp, sp = mesh.axis(*over), mesh.axis("sp")
        sequences = _run(num_sequences, dp, what="sequences", fix="change train.global_batch, train.eval_sequences or degrees.dp")
        *encoder, decoder = (half.positions(sp.index) for half in orders_of(mesh, order, length, source=source))
        read = tuple(place for half in encoder for place in half)
        return TokenShard(num_sequences, length, sequences, (*read, *(source + place for place in decoder)), (dp, sp), len(read))

    @staticmethod
    def whole(num_sequences: int, length: int, *, source: int = 0) -> TokenShard:
        """Return the whole batch, for one process."""
        return TokenShard.of(Mesh.of(Degrees()), num_sequences=num_sequences, length=length, source=source)

    @staticmethod
    def holding(mesh: Mesh, shape: Sequence[int]) -> TokenShard:
        """Return this rank's shard of a batch, from the `shape` [sequences, tokens + 1] of one rank's contiguous tokens."""
        sequences, tokens = shape
        return TokenShard.of(mesh, num_sequences=sequences * mesh.axis("dp").size, length=(tokens - 1) * mesh.axis("sp").size)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole batch."""
        return self.num_sequences * self.length

    def places(self, step: int) -> Ints:
        """Return the global indices, in the data's order, of this rank's sequences in step `step`: [sequences]. The first step is 0."""
        return step * self.num_sequences + np.arange(self.sequences.start, self.sequences.stop, dtype=np.int64)

    def spread(self, count: int) -> Ints:
        """Return `num_sequences` evenly spaced indices below `count`, equal on every rank. Indices repeat if `count` is smaller."""
        return np.arange(self.num_sequences, dtype=np.int64) * count // self.num_sequences

    @cached_property
    def position_array(self) -> Ints:
        """Return `positions` as an array. Cached, because every step uses it as an index."""
        return np.array(self.positions, dtype=np.int64)

    @cached_property
    def columns(self) -> Ints:
        """Return the columns of the batch that this rank reads as inputs or targets."""
        return np.union1d(self.position_array, self.position_array + 1)

    @property
    def shape(self) -> tuple[int, int]:
        """Return the shape of this rank's part: [sequences, columns]."""
        return len(self.sequences), len(self.columns)

    def of_batch(self, batch: Batch) -> Batch:
        """Return this rank's part of tokens [num_sequences, length + 1]; a view if its columns are contiguous."""
        rows, columns = batch[self.sequences.start : self.sequences.stop], self.columns
        return rows[:, slice(columns[0], columns[-1] + 1) if self._is_contiguous else columns]  # type: ignore[no-any-return]

    def inputs(self, part: Batch) -> Batch:
        """Return the tokens that the model reads, [sequences, positions]. `part`: this rank's part, or some of its sequences."""
        return self._at(part, 0)

    def targets(self, part: Batch) -> Batch:
        """Return each read token's next token, [sequences, positions]; in an encoder-decoder, only for tokens that the decoder reads."""
        return self._at(part, 1)[:, self.source :]  # type: ignore[no-any-return]

    def _at(self, part: Batch, further: int) -> Batch:
        if self._is_contiguous:
            return part[:, further : further + len(self.positions)]  # type: ignore[no-any-return]
        return part[:, self._indices[further]]  # type: ignore[no-any-return]

    @property
    def _is_contiguous(self) -> bool:
        return len(self.columns) == len(self.positions) + 1

    @cached_property
    def _indices(self) -> list[Ints]:
        """Return two arrays of indices into `columns`: of the rank's positions, and of the positions after them."""
        return [np.searchsorted(self.columns, self.position_array + further) for further in (0, 1)]


def orders_of(mesh: Mesh, kind: str, length: int, *, source: int = 0) -> tuple[Order, ...]:
    """Return the Order of this `kind`, which gives each sp rank its positions in sequences of `length` tokens. In an encoder-decoder, which
    reads `source` of them first: the encoder's order, and the decoder's of this `kind`. Raises BadInput if ranks do not divide a length."""
    of = partial(Order, size=mesh.axis("sp_ring").size, inner=mesh.axis("sp_heads").size)
    encoder = (of("contiguous", length=source, causal=False),) if source else ()
    return (*encoder, of(kind, length=length - source))


def _run(size: int, axis: Axis, *, what: str, fix: str) -> range:
    """Return this rank's range of 0 .. size - 1, which is cut into equal ranges along `axis`. Raises BadInput if it does not divide."""
    if size < 1 or size % axis.size:
        raise BadInput(what, got=size, needed=f"a multiple of {axis.name}={axis.size}", fix=fix)
    each = size // axis.size
    return range(axis.index * each, (axis.index + 1) * each)
