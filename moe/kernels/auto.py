"""Kernels chosen for each call by the device of the call's first tensor: `triton` on a GPU that Triton supports, else `cpu` (torch
operations, for any device)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe.kernels import cpu
from parallel.numerics.supposed import supposed_as

__all__ = ["by_bin", "combine", "grouped_ffn", "kept", "permute", "plan", "reorder", "routed_ffn", "top_k"]

# their results decide to which experts tokens go, so a rehearsal (a run on fake tensors, parallel/rehearse) needs these results' values
_DECISIONS = ("by_bin", "kept", "plan", "top_k")


def _for_gpu(device: torch.device) -> ModuleType:
    """Return `triton` if it is installed and the GPU has tensor cores (compute capability 7.0 or later), else `cpu`."""
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < (7, 0):
        return cpu
    from moe.kernels import triton

    return triton


def kernels_of(tensor: Tensor) -> ModuleType:
    """Return the kernels for this tensor: always `cpu` for float64, which only checks use."""
    return _for_gpu(tensor.device) if tensor.is_cuda and tensor.dtype != torch.float64 else cpu


def _by_device(name: str) -> Callable[..., Any]:
    def call(first: Tensor, *rest: Any, **named: Any) -> Any:
        kernels = kernels_of(first)
        made = getattr(kernels, name)(first, *rest, **named)
        # Triton computes no values for fake tensors. In a rehearsal, `cpu` computes the results of _DECISIONS from known inputs
        return made if kernels is cpu or name not in _DECISIONS else supposed_as(made, getattr(cpu, name), first, *rest, **named)

    return call


by_bin, combine, grouped_ffn, kept, permute, plan, reorder, routed_ffn, top_k = map(_by_device, __all__)
