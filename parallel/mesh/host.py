"""Copies small tensors between host and GPU without waiting for all work that is queued on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def read_later(*tensors: Tensor) -> Callable[[], list[Any]]:
    """Start to copy integer tensors to the host. Return a function that returns their `tolist()`. For tensors on a GPU, that function waits
    for the copy, but not for GPU work that was queued after the copy."""
    if not tensors[0].is_cuda:
        return lambda: [tensor.tolist() for tensor in tensors]
    host = torch.cat([tensor.reshape(-1) for tensor in tensors]).to("cpu", non_blocking=True)  # into pinned memory
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[Any]:
        if not copied.query():
            copied.synchronize()
        parts = host.split([tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape).tolist() for part, tensor in zip(parts, tensors, strict=True)]

    return read


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device; to a GPU from pinned memory, so that the host does not wait."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)
