"""What the sizes of a model follow from beside its recipe, for modules and for counts that run without torch."""

from __future__ import annotations

GATED = ("geglu", "swiglu")  # feed-forward networks with a third matrix, whose product is the gate (GLU variants, arXiv 2002.05202)
T5_BUCKETS = 32  # distances are sorted into so many buckets in a relative position bias
