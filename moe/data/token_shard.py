"""Assigns a batch's tokens to ranks. Other modules use a TokenShard instead of computing a rank's tokens from the mesh.

    dp 2, sp 2                 tokens 0 .. 5          tokens 6 .. 11           a token's target is the next token, so a shard
    sequences 0, 1             dp 0  sp 0             dp 0  sp 1               is stored with one more token
    sequences 2, 3             dp 1  sp 0             dp 1  sp 1

Ranks that differ only in pp or tp read the same shard, except that rows of a tensor-parallel grid (2D, 2.5D, 3D) read different sequences.
Sequence parallelism can distribute positions in several orders (parallel/sequence/order.py); the drawing has contiguous positions.

A TokenShard determines: the sequences and positions that a rank reads, its random noise, the number of tokens by which a loss is divided,
the axes over which ranks sum, the validation sequences, and the groups of tokens that share a capacity.
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
    """One rank's shard of a batch of `num_sequences` sequences of `length` tokens. `sequences`: indices of the rank's sequences.
    `positions`: the positions in each sequence that the rank reads.

    A shard is stored as [sequences, columns]. `columns`, ascending, are the rank's positions and, for the targets, the position after each.
    In an encoder-decoder, the first `source` of `positions` are the encoder's input and have no targets. `axes`: mesh axes whose ranks
    together read every token once, so losses, counts and the experts' loads are summed over these.
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
        """Return this rank's shard. `order`: a kind in parallel/sequence/order.py. `over`: axes along which ranks have different sequences.
        `source`: number of tokens of a sequence that an encoder reads. Raises BadInput if the axes do not divide the batch."""
        dp, sp = mesh.axis(*over), mesh.axis("sp")
        sequences = _run(num_sequences, dp, what="sequences", fix="change train.global_batch, train.eval_sequences or degrees.dp")
        *encoder, decoder = (half.positions(sp.index) for half in orders_of(mesh, order, length, source=source))
        read = tuple(place for half in encoder for place in half)
        return TokenShard(num_sequences, length, sequences, (*read, *(source + place for place in decoder)), (dp, sp), len(read))

    @staticmethod
    def whole(num_sequences: int, length: int, *, source: int = 0) -> TokenShard:
        """Return the shard of a single process: the entire batch. `source`: number of a sequence's tokens that an encoder reads."""
        return TokenShard.of(Mesh.of(Degrees()), num_sequences=num_sequences, length=length, source=source)

    @staticmethod
    def holding(mesh: Mesh, shape: Sequence[int]) -> TokenShard:
        """Return this rank's shard, given its `shape` [sequences, tokens + 1]. Assumes that all ranks have shards of this shape, and that
        each sp rank has contiguous positions."""
        sequences, tokens = shape
        return TokenShard.of(mesh, num_sequences=sequences * mesh.axis("dp").size, length=(tokens - 1) * mesh.axis("sp").size)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in the batch of all ranks."""
        return self.num_sequences * self.length

    def places(self, step: int) -> Ints:
        """Return the indices of the sequences that this rank reads in step `step`: [n]. They count from the first sequence of step 0."""
        return step * self.num_sequences + np.arange(self.sequences.start, self.sequences.stop, dtype=np.int64)

    def spread(self, count: int) -> Ints:
        """Return the indices of `num_sequences` sequences, evenly spaced among `count`, equal on every rank. They repeat if `count` is
        below num_sequences."""
        return np.arange(self.num_sequences, dtype=np.int64) * count // self.num_sequences

    @cached_property
    def position_array(self) -> Ints:
        """`positions` as an array. Cached, because every step uses it as an index."""
        return np.array(self.positions, dtype=np.int64)

    @cached_property
    def columns(self) -> Ints:
        """The columns of the batch that this rank reads as inputs or targets."""
        return np.union1d(self.position_array, self.position_array + 1)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of this rank's shard: [sequences, columns]."""
        return len(self.sequences), len(self.columns)

    def of_batch(self, batch: Batch) -> Batch:
        """Return this rank's shard of `batch` [num_sequences, length + 1]; a view if the rank's columns are contiguous."""
        rows, columns = batch[self.sequences.start : self.sequences.stop], self.columns
        return rows[:, slice(columns[0], columns[-1] + 1) if self._is_contiguous else columns]  # type: ignore[no-any-return]

    def inputs(self, part: Batch) -> Batch:
        """Return the tokens that the model reads, [n, positions]. `part`: this rank's shard, or n sequences of it."""
        return self._at(part, 0)

    def targets(self, part: Batch) -> Batch:
        """Return the token after each token that the model reads, [n, positions]; in an encoder-decoder, after each that the decoder
        reads."""
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
        """Two arrays of indices into `columns`: of the rank's positions, and of the position after each."""
        return [np.searchsorted(self.columns, self.position_array + further) for further in (0, 1)]


def orders_of(mesh: Mesh, kind: str, length: int, *, source: int = 0) -> tuple[Order, ...]:
    """Return the Orders that assign positions in sequences of `length` tokens to sp ranks: one, of this `kind`. In an encoder-decoder,
    whose encoder reads the first `source` tokens, return two: the encoder's and the decoder's. Raises BadInput if a length
    cannot be divided evenly among the sp ranks."""
    of = partial(Order, size=mesh.axis("sp_ring").size, inner=mesh.axis("sp_heads").size)
    encoder = (of("contiguous", length=source, causal=False),) if source else ()
    return (*encoder, of(kind, length=length - source))


def _run(size: int, axis: Axis, *, what: str, fix: str) -> range:
    """Cut 0 .. size - 1 into equal ranges along `axis`, and return this rank's range. Raises BadInput, about the value `what` and with this
    `fix`, if `axis` does not divide `size`."""
    if size < 1 or size % axis.size:
        raise BadInput(what, got=size, needed=f"a multiple of {axis.name}={axis.size}", fix=fix)
    each = size // axis.size
    return range(axis.index * each, (axis.index + 1) * each)
