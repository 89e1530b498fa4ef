"""Span corruption (T5: Raffel et al. 2020, arXiv 1910.10683, section 3.1.4): makes encoder inputs and decoder targets from a text.

    text       a b c d e f g h i j          the hidden tokens c d and h form two spans
    inputs     a b X e f g Y i j .          a sentinel (X, Y) replaces each span; the end (.) is the tokenizer's separator
    targets    X c d Y h .                  each sentinel, then the tokens that it replaces
    a row      inputs | START | targets     the encoder reads inputs; the decoder reads START and targets, and predicts the targets

The number of spans and the lengths of inputs and targets depend only on the text's length (moe/recipe/shapes.py). The boundaries of spans
are drawn anew for every sequence: all ways to cut the hidden tokens into spans, and the visible tokens into the parts before them, are
equally likely. The draw depends only on the seed and the sequence's global index. So a resumed run and any number of ranks get the same
spans. Sentinels are the last ids of the vocabulary; the first sentinel is the last id. In text they are written as T5's tokenizer
does: "def <extra_id_0>(self):" becomes the ids of "def ", the first sentinel, and the ids of "(self):".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from moe.data.mixture import MixedTrain, MixedValidation
from moe.data.order import Held, Sequences, TrainSet, ValidationSet, permutations
from moe.data.token_shard import Ints, TokenShard
from moe.data.tokenizer import Tokenizer
from moe.recipe.shapes import START, Spans

_TRAIN, _VALIDATION = 0, 1
_SPELLED = re.compile(r"<extra_id_([0-9]{1,9})>")


@dataclass(frozen=True)
class SpanCorruption:
    """Converts texts to inputs and targets, both of which end with the id `end`. `vocab_size`: the model's, including sentinels."""

    spans: Spans
    vocab_size: int
    end: int
    seed: int

    def rows(self, texts: Ints, places: npt.ArrayLike, *, side: int = _TRAIN) -> Ints:
        """Convert texts [n, spans.text] to rows [n, spans.inputs + 1 + spans.targets] int64. `places`: the texts' global indices. They seed
        the random spans, together with `side`, so that training and validation differ."""
        s, draws = self.spans, [4 * int(place) + 2 * side for place in np.array(places).reshape(-1)]
        kept_NS = self._cuts(s.text - s.hidden, draws)
        hidden_NS = self._cuts(s.hidden, [draw + 1 for draw in draws])
        sentinel_NS = np.broadcast_to(self.vocab_size - 1 - np.arange(s.num_spans), kept_NS.shape)
        one_NS, hides = np.ones_like(kept_NS), _marks(kept_NS, hidden_NS, s.text)
        inputs = _interleaved(_marks(kept_NS, one_NS, s.inputs - 1), sentinel_NS, texts[~hides])
        targets = _interleaved(~_marks(one_NS, hidden_NS, s.targets - 1), sentinel_NS, texts[hides])
        end, start = (np.full((len(texts), 1), token) for token in (self.end, START))
        return np.concatenate([inputs, end, start, targets, end], axis=1).astype(np.int64)

    def _cuts(self, tokens: int, draws: list[int]) -> Ints:
        """For each draw, cut a run of `tokens` tokens into one part for each span, at random. Return the parts' lengths int64
        [len(draws), spans], each at least 1. `draws`: numbers; each number gives other cuts."""
        inner = permutations(np.arange(self.spans.num_spans - 1), size=max(1, tokens - 1), seed=self.seed, epochs=draws, of="spans") + 1
        inner.sort(axis=1)
        ends = np.pad(inner, ((0, 0), (1, 1)))
        ends[:, -1] = tokens
        return np.diff(ends)


def _marks(first_NS: Ints, then_NS: Ints, length: int) -> npt.NDArray[np.bool_]:
    """Return bool [N, length] for rows of parts: first_NS[n, 0] elements, then then_NS[n, 0] elements, first_NS[n, 1], and so on. True for
    the elements of `then_NS`."""
    marks = np.tile([False, True], first_NS.size)
    return marks.repeat(np.stack([first_NS, then_NS], 2).reshape(-1)).reshape(len(first_NS), length)


def _interleaved(marks_NL: npt.NDArray[np.bool_], marked: Ints, others: Ints) -> Ints:
    """Return [N, L] with the elements of `marked` at marked places and `others` elsewhere, row by row, both in their order."""
    row_NL = np.empty(marks_NL.shape, dtype=np.int64)
    row_NL[marks_NL], row_NL[~marks_NL] = marked.reshape(-1), others
    return row_NL


@dataclass(frozen=True)
class CorruptedTrain:
    """Training sequences of `inner` with hidden spans, which differ each time a sequence recurs."""

    inner: TrainSet | MixedTrain
    objective: SpanCorruption

    def batch(self, step: int, shard: TokenShard) -> Ints:
        """Return one rank's part of the batch of step `step`, int64 of shape `shard.shape`. The first step is 0."""
        places = shard.places(step)
        texts = self.inner.sequences(places)[:, :-1]  # without the last token, which is the first of the next window
        return self.objective.rows(texts, places)[:, shard.columns]


@dataclass(frozen=True)
class CorruptedValidation:
    """Held-out sequences of `inner` with hidden spans, which are the same in every evaluation."""

    inner: ValidationSet | MixedValidation
    objective: SpanCorruption

    @property
    def windows(self) -> Sequences:
        """The sequences of a single source, before spans are hidden."""
        assert isinstance(self.inner, ValidationSet)
        return self.inner.windows

    def held(self, shard: TokenShard) -> Held:
        """Return one rank's rows, and the mean number of bytes of hidden text per target token (sentinels are target tokens too)."""
        s = self.objective.spans
        read = self.inner.held(replace(shard, length=s.text, positions=tuple(range(s.text)), source=0))
        rows = self.objective.rows(read.sequences[:, :-1], shard.sequences, side=_VALIDATION)
        return Held(rows[:, shard.columns], read.bytes_per_token * s.hidden / s.targets)


def strange(texts: Sequence[str], num_sentinels: int) -> str | None:
    """Return the first sentinel in these texts that a model with `num_sentinels` sentinels does not have, or None."""
    return next((found[0] for text in texts for found in _SPELLED.finditer(text) if int(found[1]) >= num_sentinels), None)


@final
class WithSentinels(Tokenizer):
    """The tokenizer `inner` with sentinels, which are the last `num_sentinels` of `vocab_size` ids; sentinel 0 is the last id."""

    def __init__(self, inner: Tokenizer, *, vocab_size: int, num_sentinels: int) -> None:
        unused = vocab_size - num_sentinels - inner.vocab_size
        spelled = [f"<extra_id_{n}>".encode() for n in reversed(range(num_sentinels))]
        super().__init__([*inner.token_bytes, *[b""] * unused, *spelled])
        self.inner, self.num_sentinels = inner, num_sentinels
        self.separator = max(inner.separator, START)

    def encode_pieces(self, parts: Sequence[str]) -> list[Ints]:
        """Return the ids of each piece. A sentinel that the model does not have is read as plain text."""
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
