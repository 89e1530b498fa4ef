"""Constants of models, and the lengths of encoder and decoder sequences.

Span corruption (Raffel et al. 2020, arXiv 1910.10683, section 3.1.4) makes the tokens of an encoder and a decoder from a text:

    text       t tokens, of which n = round(0.15 t) are hidden, in s = round(n / 3) spans
    inputs     t - n tokens, a sentinel in place of each span, an end token         t - n + s + 1
    targets    a sentinel and the hidden tokens of each span, an end token              n + s + 1

All texts have the same length, so inputs and targets have fixed lengths and no padding. One more token of text adds at most one token of
inputs, so every length of inputs belongs to one or more lengths of text; the longest of these is used, as in T5.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

GATED = ("geglu", "swiglu")  # feed-forward networks with a third matrix, the gate (GLU variants, arXiv 2002.05202)
T5_BUCKETS = 32  # number of buckets into which a relative position bias sorts distances
START = 0  # id of the first token that the decoder of an encoder-decoder reads (T5: the id of padding)
SEPARATOR = 0  # id of the token before each document, in the tokenizers bytes and bpe
NORM_EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}  # added to the mean square or variance in a norm, unless a recipe sets another value
PADDING = -100  # stands in place of a token id: torch's default ignore_index, a target that a loss ignores
_BEGIN = 2**32  # larger than any id; subtracted from the mark (`marked`) of a chat's first token, to tell it from marks of later tokens
MXFP4_BLOCK = 32  # number of elements that share a scale
FP8_BLOCK = 128  # in published fp8 checkpoints, each square of 128 x 128 elements of a matrix shares a scale
BLOCK_BYTES = {"mxfp4": 1 / 2 + 1 / MXFP4_BLOCK, "fp8": 1 + 4 / FP8_BLOCK**2}  # bytes of an element, with its share of a block's scale


class Decoding(NamedTuple):
    """Cost of dequantizing a frozen matrix (moe/nn/blocks.py). temporary: peak bytes of temporary tensors per element. moved: bytes that
    GPU kernels read and write per element. kernels: number of these kernels."""

    temporary: float
    moved: float
    kernels: int

    @property
    def transposed(self) -> Decoding:
        """Cost of dequantizing an expert's matrix: one more kernel transposes the result."""
        return self._replace(moved=self.moved + 4, kernels=self.kernels + 1)


# format of a frozen matrix -> cost of dequantizing it
DECODING = {"mxfp4": Decoding(12, 31.5, 9), "fp8": Decoding(6, 19, 4)}
DENSITY, SPAN = 0.15, 3.0  # share of the text's tokens that are hidden, and mean number of tokens in a hidden span


def marked(ids: Any) -> Any:
    """Return -101 - id for an array or tensor of token ids: marks of tokens that are read but not predicted. The function is its own
    inverse."""
    return PADDING - 1 - ids


def beginning(ids: Any) -> Any:
    """Return the marks of tokens that begin a packed chat. Such a token is not predicted, and attention does not reach before it."""
    return marked(ids) - _BEGIN


def begins(tokens: Any) -> Any:
    """Return whether each token of an array or tensor is a mark of `beginning`: bool of the same shape."""
    return tokens < -_BEGIN


def unmarked(tokens: Any) -> Any:
    """Return the ids of tokens that are marks (of `marked` or `beginning`). For other tokens, the result has no meaning."""
    return marked(tokens) % _BEGIN


class Spans(NamedTuple):
    """Numbers of tokens and spans in span corruption of one text: `text` tokens, of which `hidden` are hidden, in `num_spans` spans."""

    text: int
    hidden: int
    num_spans: int

    @property
    def inputs(self) -> int:
        """Number of tokens that the encoder reads."""
        return self.text - self.hidden + self.num_spans + 1

    @property
    def targets(self) -> int:
        """Number of tokens that the decoder predicts."""
        return self.hidden + self.num_spans + 1


def spans_of_text(tokens: int) -> Spans:
    """Return the numbers of hidden tokens and spans for a text of `tokens` (at least 2) tokens."""
    hidden = max(1, round(tokens * DENSITY))
    return Spans(tokens, hidden, max(1, round(hidden / SPAN)))


def inputs_within(tokens: int) -> int:
    """Return the longest encoder input, in tokens, that `spans_of` makes from a text of at most `tokens` (at least 2) tokens."""
    inputs = spans_of_text(tokens).inputs
    # a longer text may give the same number of inputs, and then `spans_of(inputs)` is for that text, which exceeds `tokens`
    return inputs if spans_of(inputs).text <= tokens else inputs - 1


def divisible_inputs(near: int, *, read: int, written: int) -> list[int]:
    """Return at most two lengths of encoder inputs, the nearest to `near` first. Each is a multiple of `read`, and the length of its
    targets is a multiple of `written`."""
    multiples = (read * (near // read + step) for apart in range(1000) for step in {apart, -apart})
    fits = (n for n in multiples if n > 3 and spans_of(n).inputs == n and spans_of(n).targets % written == 0)
    return sorted(islice(fits, 4), key=lambda n: abs(n - near))[:2]


def spans_of(inputs: int) -> Spans:
    """Return the spans of the longest text with at most `inputs` encoder tokens; at least 2 tokens of text are used."""
    tokens = max(2, int((inputs - 1) / (1 - DENSITY + DENSITY / SPAN)) - 8)  # a lower bound on the text's length
    while spans_of_text(tokens + 1).inputs <= inputs:
        tokens += 1
    return spans_of_text(tokens)
