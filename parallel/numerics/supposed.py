"""Values for some tensors of a rehearsal (parallel/rehearse/), in which all other tensors have only shape, dtype and device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def pretended(tensor: Tensor) -> bool:
    """Return whether the tensor belongs to a rehearsal, and so has no values."""
    return hasattr(tensor, "fake_mode")


def supposed(tensor: Tensor, values: Callable[[], Tensor]) -> Tensor:
    """Return the tensor, unchanged in training. In a rehearsal it gets the values values(), and so do tensors computed from it."""
    mode: Any = getattr(tensor, "fake_mode", None)
    return tensor if mode is None else mode.suppose(tensor, values)


def labelled(tensor: Tensor, label: str) -> Tensor:
    """Return the tensor, unchanged in training. In a rehearsal, the next message that contains it has this label, which sender and receiver
    compare."""
    if pretended(tensor):
        tensor.label = label  # type: ignore[attr-defined]
    return tensor


def supposed_as(made: Any, twin: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return `made`, a tensor or a dataclass of tensors, unchanged in training. In a rehearsal its tensors get values: `twin`, a function
    with the same result, computes them on the CPU from the values of the arguments, if these are known. Missing rows are 0."""
    mode: Any = getattr(given[0], "fake_mode", None)
    known = None if mode is None else mode.computed(twin, given, named)
    if known is not None:
        for tensor, values in zip(_tensors(made), _tensors(known), strict=True):
            mode.suppose(tensor, partial(_longer, values, len(tensor)))
    return made


def _tensors(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(vars(made).values())


def _longer(values: Tensor, rows: int) -> Tensor:
    return torch.cat((values, values.new_zeros(rows - len(values), *values.shape[1:])))
