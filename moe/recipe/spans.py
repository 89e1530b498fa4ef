"""Span corruption in numbers (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4): the number of hidden tokens and spans in a text.

    text       t tokens, of which n = round(0.15 t) are hidden, in s = round(n / 3) spans
    inputs     t - n tokens, a sentinel in the place of each span, the end          t - n + s + 1
    targets    a sentinel and the hidden tokens of each span, the end                   n + s + 1

All texts are equally long, so inputs and targets are too, and nothing is padded. One more token of text adds one token of inputs, or
none, so every length of inputs has a text; T5 takes the longest. Plain numbers: this file needs no torch.
"""

from __future__ import annotations

from typing import NamedTuple

DENSITY, SPAN = 0.15, 3.0  # the share of tokens that are hidden, and the mean length of a span


class Spans(NamedTuple):
    """Numbers of one sequence: `text` tokens, of which `hidden` are hidden in `num_spans` spans."""

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
    """Return the largest number of encoder tokens with a text of at most `tokens` tokens, at least 2."""
    inputs = spans_of_text(tokens).inputs
    return inputs if spans_of(inputs).text <= tokens else inputs - 1  # a longer text may make as many inputs


def spans_of(inputs: int) -> Spans:
    """Return the spans of the longest text with at most `inputs` encoder tokens; if that is too short for a text, of a text of 2 tokens."""
    tokens = max(2, int((inputs - 1) / (1 - DENSITY + DENSITY / SPAN)) - 8)  # a few below, then step by step
    while spans_of_text(tokens + 1).inputs <= inputs:
        tokens += 1
    return spans_of_text(tokens)
