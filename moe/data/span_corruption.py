"""Span corruption (T5: Raffel et al. 2020, arXiv 1910.10683, section 3.1.4): inputs of an encoder and targets of a decoder, from a text.

    text       a b c d e f g h i j          the hidden tokens c d and h form two spans
    inputs     a b X e f g Y i j .          each span is one sentinel, X the first; the end (.) is the tokenizer's separator
    targets    X c d Y h .                  each sentinel, and the tokens it hides
    a row      inputs | START | targets     the encoder reads inputs, the decoder START and the targets but the last; it writes the targets

The number of spans and the lengths of inputs and targets follow from the text's length alone (moe/recipe/spans.py). The spans' places are
drawn anew for every sequence read. Hidden tokens are cut into spans, and visible tokens into runs before and between them; every way of
cutting is equally likely. The draw is a function of the seed and of the sequence's place in the order, so a resumed run and any number of
ranks see the same. Sentinels are the vocabulary's last ids, the last one first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from moe.data.mixture import MixedTrain, MixedValidation
from moe.data.order import Held, TrainSet, ValidationSet, Windows, permutation
from moe.data.token_shard import TokenShard
from moe.recipe.shapes import START
from moe.recipe.spans import Spans

Ints = npt.NDArray[np.int64]
_TRAIN, _VALIDATION = 0, 1


@dataclass(frozen=True)
class SpanCorruption:
    """Objective of span corruption. `end`: the id that ends inputs and targets. `vocab_size`: of the model, including sentinels."""

    spans: Spans
    vocab_size: int
    end: int
    seed: int

    def rows(self, texts: Ints, places: npt.ArrayLike, *, side: int = _TRAIN) -> Ints:
        """Convert texts [n, text] at these places of the order to rows [n, inputs + 1 + targets] int64."""
        hidden = [self._row(text, int(place), side) for text, place in zip(texts, np.array(places).reshape(-1), strict=True)]
        return np.array(hidden, dtype=np.int64).reshape(len(texts), self.spans.inputs + 1 + self.spans.targets)

    def _row(self, text: Ints, place: int, side: int) -> Ints:
        s = self.spans
        kept = self._cut(s.text - s.hidden, place, 2 * side)
        hidden = self._cut(s.hidden, place, 2 * side + 1)
        inputs, targets, at = [], [], 0
        for number, (before, span) in enumerate(zip(kept, hidden, strict=True)):
            sentinel = np.array([self.vocab_size - 1 - number])
            inputs += [text[at : at + before], sentinel]
            targets += [sentinel, text[at + before : at + before + span]]
            at += before + span
        end = np.array([self.end])
        return np.concatenate([*inputs, end, np.array([START]), *targets, end])

    def _cut(self, tokens: int, place: int, what: int) -> list[int]:
        """Cut `tokens` into as many parts as there are spans, and return their lengths, each at least 1."""
        count = self.spans.num_spans
        if count == 1:
            return [tokens]
        drawn = permutation(np.arange(count - 1), size=tokens - 1, seed=self.seed, epoch=4 * place + what, of="spans")
        return [int(n) for n in np.diff([0, *(np.sort(drawn) + 1), tokens])]


@dataclass(frozen=True)
class CorruptedTrain:
    """Training sequences of `inner`, with other spans hidden each time a sequence recurs."""

    inner: TrainSet | MixedTrain
    objective: SpanCorruption

    def batch(self, step: int, shard: TokenShard) -> Ints:
        """Return one rank's part of step `step` (the first is 0), int64 of the shard's shape."""
        places = step * shard.num_sequences + np.arange(shard.sequences.start, shard.sequences.stop, dtype=np.int64)
        texts = self.inner.sequences(places)[:, :-1]  # the window's last token is the next one's first
        return self.objective.rows(texts, places)


@dataclass(frozen=True)
class CorruptedValidation:
    """Held-out sequences of `inner`, with the same spans hidden in every evaluation."""

    inner: ValidationSet | MixedValidation
    objective: SpanCorruption

    @property
    def windows(self) -> Windows:
        """Windows of a single source."""
        assert isinstance(self.inner, ValidationSet)
        return self.inner.windows

    def held(self, shard: TokenShard) -> Held:
        """Return one rank's part. Its bytes per token are the mean bytes of hidden text over all target tokens, including sentinels."""
        s = self.objective.spans
        read = self.inner.held(replace(shard, length=s.text, positions=tuple(range(s.text)), source=0))
        rows = self.objective.rows(read.sequences[:, :-1], shard.sequences, side=_VALIDATION)
        return Held(rows, read.bytes_per_token * s.hidden / s.targets)
