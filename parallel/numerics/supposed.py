"""Gives values to tensors in a rehearsal, where tensors have shapes and devices but no values (parallel/rehearse/).

logits = supposed(logits, lambda: balanced(...))       training: unchanged      rehearsal: the logits get the given values
if pretended(out): return                              in a rehearsal, skip drawing values that are never read
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def pretended(tensor: Tensor) -> bool:
    """True if the tensor belongs to a rehearsal, and so has no values."""
    return hasattr(tensor, "fake_mode")


def supposed(tensor: Tensor, values: Callable[[], Tensor]) -> Tensor:
    """Return the tensor. In a rehearsal, it gets the values `values()`, of its shape; tensors computed from it then have values too."""
    mode: Any = getattr(tensor, "fake_mode", None)
    return tensor if mode is None else mode.suppose(tensor, values)
