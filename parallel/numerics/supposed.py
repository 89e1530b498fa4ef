"""Gives values to some tensors of a rehearsal, whose tensors have shapes and devices, but no values (parallel/rehearse/)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def pretended(tensor: Tensor) -> bool:
    """Return whether the tensor belongs to a rehearsal, and so has no values."""
    return hasattr(tensor, "fake_mode")


def supposed(tensor: Tensor, values: Callable[[], Tensor]) -> Tensor:
    """Return the tensor, unchanged in training. In a rehearsal it gets the values values(), and so do tensors computed from it."""
    mode: Any = getattr(tensor, "fake_mode", None)
    return tensor if mode is None else mode.suppose(tensor, values)
