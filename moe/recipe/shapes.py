"""Constants and lengths that determine a model's sizes together with a recipe. Plain numbers: no torch here.

Span corruption (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4) makes the tokens of an encoder and a decoder from a text:

    text       t tokens, of which n = round(0.15 t) are hidden, in s = round(n / 3) spans
    inputs     t - n tokens, a sentinel in the place of each span, the end          t - n + s + 1
    targets    a sentinel and the hidden tokens of each span, the end                   n + s + 1

All texts are equally long, so inputs and targets are too, and nothing is padded. One more token of text adds one token of inputs, or
none, so every length of inputs has a text; T5 takes the longest.
"""

from __future__ import annotations

from typing import Any, NamedTuple

GATED = ("geglu", "swiglu")  # feed-forward networks with a third matrix, the gate (GLU variants, arXiv 2002.05202)
T5_BUCKETS = 32  # number of buckets into which a relative position bias sorts distances
START = 0  # first token that a decoder reads (T5: the id of padding)
SEPARATOR = 0  # the token before each document, in every tokenizer
NORM_EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}  # added to the mean square in a norm, unless a recipe sets another value
PADDING = -100  # replaces a token id; torch's own number for a target that does not count
DENSITY, SPAN = 0.15, 3.0  # the share of tokens that are hidden, and the mean length of a span


def marked(ids: Any) -> Any:
    """Return -101 - id for ids, an array or a tensor, that are read but not predicted. Applied to such marks, return their ids again."""
    return PADDING - 1 - ids


class Spans(NamedTuple):
    """Numbers of span corruption for one sequence: `text` tokens, of which `hidden` are hidden in `num_spans` spans."""

    text: int
    hidden: int
    num_spans: int

    @property
    def inputs(self) -> int:
        """Tokens that the encoder reads."""
        return self.text - self.hidden + self.num_spans + 1

    @property
    def targets(self) -> int:
        """Tokens that the decoder writes."""
        return self.hidden + self.num_spans + 1


def spans_of_text(tokens: int) -> Spans:
    """Return the spans of a text of `tokens` tokens, at least 2."""
    hidden = max(1, round(tokens * DENSITY))
    return Spans(tokens, hidden, max(1, round(hidden / SPAN)))


def inputs_within(tokens: int) -> int:
    """Return the largest number of encoder tokens for which `spans_of` gives a text of at most `tokens` tokens, which are at least 2."""
    inputs = spans_of_text(tokens).inputs
    return inputs if spans_of(inputs).text <= tokens else inputs - 1  # a text of tokens + 1 may have equally many inputs


def spans_of(inputs: int) -> Spans:
    """Return the spans of the longest text with at most `inputs` encoder tokens, or of a text of 2 tokens if none is short enough."""
    tokens = max(2, int((inputs - 1) / (1 - DENSITY + DENSITY / SPAN)) - 8)  # a lower bound, to be increased one by one
    while spans_of_text(tokens + 1).inputs <= inputs:
        tokens += 1
    return spans_of_text(tokens)
