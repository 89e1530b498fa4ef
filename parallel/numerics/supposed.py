"""What code that reads a tensor's values says for a rehearsal, where tensors have shapes and devices but no values (parallel/rehearse/).

logits = supposed(logits, lambda: balanced(...))       training: the logits, as they are      rehearsal: taken to be these
if pretended(out): return                              values that nobody will read need not be drawn
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def pretended(tensor: Tensor) -> bool:
    """Whether a tensor is of a rehearsal: it has no values."""
    return hasattr(tensor, "fake_mode")


def supposed(tensor: Tensor, values: Callable[[], Tensor]) -> Tensor:
    """The tensor; in a rehearsal its values are taken to be `values()`, of its shape, and what follows from them is known too."""
    mode: Any = getattr(tensor, "fake_mode", None)
    return tensor if mode is None else mode.suppose(tensor, values)
