"""Constants that, beside a recipe, determine a model's sizes; for modules, and for counts that run without torch."""

from __future__ import annotations

from typing import Any

GATED = ("geglu", "swiglu")  # feed-forward networks with a third matrix, the gate (GLU variants, arXiv 2002.05202)
T5_BUCKETS = 32  # a relative position bias sorts distances into so many buckets
START = 0  # what a decoder reads before it has written anything (T5: the id of padding)
SEPARATOR = 0  # the token that stands before each document, in every tokenizer
NORM_EPS = {"rmsnorm": 1e-6, "layernorm": 1e-5}  # added to the mean square of what is normed, where a recipe gives no other
PADDING = -100  # in place of a token: torch's own number for a target that does not count


def marked(ids: Any) -> Any:
    """Marks for ids that are read and not predicted, as those of a prompt: -101 - id. Of an array or a tensor; of marks, their ids."""
    return PADDING - 1 - ids
