"""Runs a step with its sums in other orders, to measure the effect of rounding.

A parallel layout computes the same sums as one process, but in another order. Under `Reordered`, each matrix product adds its terms in a
random order and as several partial sums. The results of other sums (softmax, norms, losses, attention, their gradients) are changed at
random by up to one unit roundoff of their dtype. Elementwise operations are not changed. (Monte Carlo arithmetic: Parker 1997.)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_SUMS = re.compile("sum|mean|var|norm|softmax|attention|convolution|loss|index_add|scatter_add|embedding_dense_backward|grouped_mm")
_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # operator -> position of its first factor


class Reordered(TorchDispatchMode):
    """Computes matrix products as sums of `parts` partial sums, in random order, and changes the results of other sums at random."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.draws = torch.Generator().manual_seed(parts)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func._schema.name
        if name in _PRODUCTS and func._overloadname == "default":
            return self._product(func, args, kwargs or {}, _PRODUCTS[name])
        out = func(*args, **(kwargs or {}))
        writes = any(r.alias_info is not None for r in func._schema.returns)
        return out if writes or not _SUMS.search(name) else tree_map(self._rounded, out)

    def _product(self, func: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], first: int) -> Tensor:
        """Compute a matrix product as a sum of partial sums. first: position of the product's first factor in `args`."""
        a, b = args[first : first + 2]
        order = torch.randperm(a.shape[-1], generator=self.draws).to(a.device)
        parts = [(a.index_select(-1, at), b.index_select(-2, at)) for at in order.chunk(self.parts)]
        out = func(*args[:first], *parts[0], **kwargs) if parts else func(*args, **kwargs)
        for a_part, b_part in parts[1:]:
            out = out + (a_part @ b_part) * kwargs.get("alpha", 1)
        return out

    def _rounded(self, value: Any) -> Any:
        """Return a floating-point tensor with each element changed at random by up to one unit roundoff; other values unchanged."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.numel() == 0:
            return value
        unit = torch.finfo(value.dtype).eps / 2
        noise = torch.rand(value.shape, generator=self.draws, dtype=torch.float64) * 2 - 1
        return (value.double() * (1 + unit * noise.to(value.device))).to(value.dtype)
