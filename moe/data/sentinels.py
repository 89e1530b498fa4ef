"""Tokenizer of an encoder-decoder: another tokenizer's ids, and span corruption's sentinels as text.

"def <extra_id_0>(self):"    ids of "def ", the first sentinel, ids of "(self):"        spelled as T5's tokenizer spells them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from moe.data.tokenizer import Tokenizer
from moe.recipe.shapes import START

_SPELLED = re.compile(r"<extra_id_([0-9]{1,9})>")


def strange(texts: Sequence[str], num_sentinels: int) -> str | None:
    """Return the first sentinel of these texts that a model with `num_sentinels` lacks, or None."""
    return next((found[0] for text in texts for found in _SPELLED.finditer(text) if int(found[1]) >= num_sentinels), None)


@final
class WithSentinels(Tokenizer):
    """Tokenizer `inner`, plus sentinels: the last `num_sentinels` of `vocab_size` ids, the last one first (moe/data/span_corruption.py)."""

    def __init__(self, inner: Tokenizer, *, vocab_size: int, num_sentinels: int) -> None:
        between = vocab_size - num_sentinels - inner.vocab_size  # unused ids
        spelled = [f"<extra_id_{n}>".encode() for n in reversed(range(num_sentinels))]
        super().__init__([*inner.token_bytes, *[b""] * between, *spelled])
        self.inner, self.num_sentinels = inner, num_sentinels
        self.separator = max(inner.separator, START)

    def encode_pieces(self, parts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Return the ids of each piece. The spelling of an unknown sentinel is plain text."""
        return [np.concatenate([np.zeros(0, np.int64), *map(self._encode, self._cut(part))]) for part in parts]

    def _cut(self, part: str) -> list[str | int]:
        """Split a piece into texts and the numbers of sentinels between them."""
        found: list[str | int] = []
        at = 0
        for spelled in _SPELLED.finditer(part):
            if int(spelled[1]) < self.num_sentinels:
                found += [part[at : spelled.start()], int(spelled[1])]
                at = spelled.end()
        return [piece for piece in (*found, part[at:]) if piece != ""]

    def _encode(self, piece: str | int) -> npt.NDArray[np.int64]:
        return np.array([self.vocab_size - 1 - piece]) if isinstance(piece, int) else self.inner.encode(piece)

    def beginning(self, prompt: str) -> list[int]:
        """Return the encoder's input for a prompt: its ids, and the end."""
        return [*self.encode(prompt).tolist(), self.separator]

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()
