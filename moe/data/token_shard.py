"""Who reads which tokens of a batch: one value, made of the mesh here and nowhere else.

    dp 2, sp 2                 tokens 0 .. 5          tokens 6 .. 11           tp, pp: every rank of theirs reads the same tokens
    sequences 0, 1             dp 0  sp 0             dp 0  sp 1               targets stand one place further right: a slice
    sequences 2, 3             dp 1  sp 0             dp 1  sp 1               is read with one token more

Data order, positions and noise, the number of tokens that a loss is divided by, sums of numbers, validation and groups of capacity
follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from parallel.errors import BadInput
from parallel.mesh import Axis, Degrees, Mesh

Batch = TypeVar("Batch", bound=Any)  # an array or a tensor


@dataclass(frozen=True)
class TokenShard:
    """Of a batch of `num_sequences` sequences of `length` tokens that are read, the part of one rank: some sequences, a run of each.

    `axes`: together their ranks read every token once, so sums over tokens (losses, counts, loads) are summed over them.
    """

    num_sequences: int
    length: int
    sequences: range
    positions: range
    axes: tuple[Axis, ...]

    @staticmethod
    def of(mesh: Mesh, *, num_sequences: int, length: int) -> TokenShard:
        """This rank's part. Raises BadInput where the batch does not divide."""
        dp, sp = mesh.axis("dp"), mesh.axis("sp")
        sequences = _run(num_sequences, dp, what="sequences", fix="change train.global_batch, train.eval_sequences or degrees.dp")
        positions = _run(length, sp, what="tokens of a sequence", fix="change model.max_length or degrees.sp")
        return TokenShard(num_sequences, length, sequences, positions, (dp, sp))

    @staticmethod
    def whole(num_sequences: int, length: int) -> TokenShard:
        """Everything, for one process."""
        return TokenShard.of(Mesh.of(Degrees()), num_sequences=num_sequences, length=length)

    @staticmethod
    def holding(mesh: Mesh, shape: Sequence[int]) -> TokenShard:
        """The same, of a rank whose part is tokens of this shape [sequences, tokens + 1], and so is every other's."""
        sequences, tokens = shape
        return TokenShard.of(mesh, num_sequences=sequences * mesh.axis("dp").size, length=(tokens - 1) * mesh.axis("sp").size)

    @property
    def num_tokens(self) -> int:
        """Of the whole batch."""
        return self.num_sequences * self.length

    @property
    def shape(self) -> tuple[int, int]:
        """Of this rank's part, with the token after the last that is read: [sequences, tokens + 1]."""
        return len(self.sequences), len(self.positions) + 1

    def of_batch(self, batch: Batch) -> Batch:
        """This rank's part of tokens [num_sequences, length + 1]."""
        return batch[self.sequences.start : self.sequences.stop, self.positions.start : self.positions.stop + 1]  # type: ignore[no-any-return]


def _run(size: int, axis: Axis, *, what: str, fix: str) -> range:
    """The equal run of 0 .. size - 1 that one rank of the axis takes."""
    if size < 1 or size % axis.size:
        raise BadInput(what, got=size, needed=f"a multiple of {axis.name}={axis.size}", fix=fix)
    each = size // axis.size
    return range(axis.index * each, (axis.index + 1) * each)
