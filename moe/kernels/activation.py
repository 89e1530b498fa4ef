"""The activations a feed-forward network may have: relu, gelu, or gated (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

GATED = ("geglu", "swiglu")


def activate(hidden: Tensor, gate: Tensor | None, ffn: str) -> Tensor:
    """relu(h), gelu(h), gelu(h) * g or silu(h) * g; gelu in the tanh form, as T5 and GLaM use."""
    if ffn == "relu":
        return F.relu(hidden)
    activated = F.silu(hidden) if ffn == "swiglu" else F.gelu(hidden, approximate="tanh")
    return activated if gate is None else activated * gate
