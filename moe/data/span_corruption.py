"""Span corruption (T5: Raffel et al. 2020, arXiv 1910.10683, section 3.1.4): inputs of an encoder and targets of a decoder, from a text.

    text       a b c d e f g h i j          the hidden tokens c d and h form two spans
    inputs     a b X e f g Y i j .          each span is one sentinel, X the first; the end (.) is the tokenizer's separator
    targets    X c d Y h .                  each sentinel, and the tokens it hides
    a row      inputs | START | targets     the encoder reads inputs, the decoder START and the targets but the last; it writes the targets

The number of spans and the lengths of inputs and targets follow from the text's length alone (moe/recipe/shapes.py). Where spans begin is
drawn anew for every sequence: all ways to cut the hidden tokens into spans, and the visible tokens into the stretches before them, are
equally likely. The draw is a function of the seed and of the sequence's index in the order, so a resumed run and any number of ranks see
the same. Sentinels are the vocabulary's last ids, the last one first. As text they are spelled as T5's tokenizer spells them:
"def <extra_id_0>(self):" is the ids of "def ", the first sentinel, and the ids of "(self):".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from moe.data.mixture import MixedTrain, MixedValidation
from moe.data.order import Held, Sequences, TrainSet, ValidationSet, permutation
from moe.data.token_shard import Ints, TokenShard
from moe.data.tokenizer import Tokenizer
from moe.recipe.shapes import START, Spans

_TRAIN, _VALIDATION = 0, 1
_SPELLED = re.compile(r"<extra_id_([0-9]{1,9})>")


@dataclass(frozen=True)
class SpanCorruption:
    """Converts texts to inputs and targets, both of which end with the id `end`. `vocab_size`: of the model, including sentinels."""

    spans: Spans
    vocab_size: int
    end: int
    seed: int

    def rows(self, texts: Ints, places: npt.ArrayLike, *, side: int = _TRAIN) -> Ints:
        """Convert texts [n, text] to rows [n, inputs + 1 + targets] int64. `places`: global indices, which seed the random spans."""
        hidden = [self._row(text, int(place), side) for text, place in zip(texts, np.array(places).reshape(-1), strict=True)]
        return np.array(hidden, dtype=np.int64).reshape(len(texts), self.spans.inputs + 1 + self.spans.targets)

    def _row(self, text: Ints, place: int, side: int) -> Ints:
        s = self.spans
        kept = self._cut(s.text - s.hidden, 4 * place + 2 * side)
        hidden = self._cut(s.hidden, 4 * place + 2 * side + 1)
        inputs, targets, at = [], [], 0
        for number, (before, span) in enumerate(zip(kept, hidden, strict=True)):
            sentinel = np.array([self.vocab_size - 1 - number])
            inputs += [text[at : at + before], sentinel]
            targets += [sentinel, text[at + before : at + before + span]]
            at += before + span
        end = np.array([self.end])
        return np.concatenate([*inputs, end, np.array([START]), *targets, end])

    def _cut(self, tokens: int, draw: int) -> list[int]:
        """Cut `tokens` into as many parts as there are spans, and return their lengths, each at least 1. `draw` keys the random cuts."""
        count = self.spans.num_spans
        if count == 1:
            return [tokens]
        drawn = permutation(np.arange(count - 1), size=tokens - 1, seed=self.seed, epoch=draw, of="spans")
        return [int(n) for n in np.diff([0, *sorted(drawn + 1), tokens])]


@dataclass(frozen=True)
class CorruptedTrain:
    """Training sequences of `inner`, with other spans hidden each time a sequence recurs."""

    inner: TrainSet | MixedTrain
    objective: SpanCorruption

    def batch(self, step: int, shard: TokenShard) -> Ints:
        """Return one rank's part of step `step`, int64 rows [sequences, inputs + 1 + targets]. The first step is 0."""
        places = shard.places(step)
        texts = self.inner.sequences(places)[:, :-1]  # without the last token, which is the first of the next window
        return self.objective.rows(texts, places)[:, shard.columns]


@dataclass(frozen=True)
class CorruptedValidation:
    """Held-out sequences of `inner`, with the same spans hidden in every evaluation."""

    inner: ValidationSet | MixedValidation
    objective: SpanCorruption

    @property
    def windows(self) -> Sequences:
        """Return the sequences of a single source before spans are hidden."""
        assert isinstance(self.inner, ValidationSet)
        return self.inner.windows

    def held(self, shard: TokenShard) -> Held:
        """Return one rank's rows, and the bytes of hidden text per target token, sentinels included."""
        s = self.objective.spans
        read = self.inner.held(replace(shard, length=s.text, positions=tuple(range(s.text)), source=0))
        rows = self.objective.rows(read.sequences[:, :-1], shard.sequences, side=_VALIDATION)
        return Held(rows[:, shard.columns], read.bytes_per_token * s.hidden / s.targets)


def strange(texts: Sequence[str], num_sentinels: int) -> str | None:
    """Return the first sentinel of these texts that a model with `num_sentinels` lacks, or None."""
    return next((found[0] for text in texts for found in _SPELLED.finditer(text) if int(found[1]) >= num_sentinels), None)


@final
class WithSentinels(Tokenizer):
    """The tokenizer `inner` with sentinels, which are the last `num_sentinels` of `vocab_size` ids, the last id first."""

    def __init__(self, inner: Tokenizer, *, vocab_size: int, num_sentinels: int) -> None:
        unused = vocab_size - num_sentinels - inner.vocab_size
        spelled = [f"<extra_id_{n}>".encode() for n in reversed(range(num_sentinels))]
        super().__init__([*inner.token_bytes, *[b""] * unused, *spelled])
        self.inner, self.num_sentinels = inner, num_sentinels
        self.separator = max(inner.separator, START)

    def encode_pieces(self, parts: Sequence[str]) -> list[Ints]:
        """Return the ids of each piece. The spelling of an unknown sentinel is plain text."""
        return [np.concatenate([np.zeros(0, np.int64), *map(self._encode, self._cut(part))]) for part in parts]

    def _cut(self, part: str) -> list[str | int]:
        """Split a piece at its sentinels: return its texts (str) and the sentinels' numbers (int), in order."""
        found: list[str | int] = []
        at = 0
        for spelled in _SPELLED.finditer(part):
            if int(spelled[1]) < self.num_sentinels:
                found += [part[at : spelled.start()], int(spelled[1])]
                at = spelled.end()
        return [piece for piece in (*found, part[at:]) if piece != ""]

    def _encode(self, piece: str | int) -> Ints:
        return np.array([self.vocab_size - 1 - piece]) if isinstance(piece, int) else self.inner.encode(piece)

    def beginning(self, prompt: str) -> list[int]:
        """Return the encoder's input for a prompt: its ids, then the id that ends inputs."""
        return [*self.encode(prompt).tolist(), self.separator]

    def describe(self) -> dict[str, Any]:
        return self.inner.describe()
