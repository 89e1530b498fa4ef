"""Constants that determine a model's sizes together with a recipe; for modules, and for counts that run without torch."""

from __future__ import annotations

from typing import Any

GATED = ("geglu", "swiglu")  # feed-forward networks with a third matrix, the gate (GLU variants, arXiv 2002.05202)
T5_BUCKETS = 32  # number of buckets into which a relative position bias sorts distances
START = 0  # first token that a decoder reads (T5: the id of padding)
SEPARATOR = 0  # the token before each document, in every tokenizer
NORM_EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}  # added to the mean square in a norm, unless a recipe sets another value
PADDING = -100  # replaces a token id; torch's own number for a target that does not count


def marked(ids: Any) -> Any:
    """Mark ids that are read but not predicted, such as a prompt's: -101 - id, for an array or a tensor. Marks give their ids back."""
    return PADDING - 1 - ids
