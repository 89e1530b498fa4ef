"""Values for some tensors of a rehearsal. A rehearsal runs one rank of a run with torch's fake tensors (parallel/rehearse/), which have
shape, dtype and device but no values. Outside of a rehearsal, these functions return their tensors unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


def pretended(tensor: Tensor) -> bool:
    """Return whether the tensor is a fake tensor of a rehearsal (`moe rehearse`), and so has no values."""
    return hasattr(tensor, "fake_mode")


def supposed(tensor: Tensor, values: Callable[[], Tensor]) -> Tensor:
    """Return the tensor. If it is a fake tensor, first give it the result of values(); tensors computed from it then have values too."""
    mode: Any = getattr(tensor, "fake_mode", None)
    return tensor if mode is None else mode.suppose(tensor, values)


def labelled(tensor: Tensor, label: str) -> Tensor:
    """Return the tensor. In a rehearsal (a run on fake tensors), also label the next message that sends or receives it. The rehearsal
    checks that sender and receiver give equal labels."""
    if pretended(tensor):
        tensor.label = label  # type: ignore[attr-defined]
    return tensor


def supposed_as(made: Any, twin: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return `made`, a tensor or a dataclass of tensors. In a rehearsal (a run on fake tensors), if the values of all tensors in `given`
    are known, first give `made` the values of `twin(*given, **named)`, computed on the CPU. twin: a function that computes the same as the
    code that made `made`, for example without a GPU kernel. If `made` has more rows than twin's result, the additional rows are 0."""
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
