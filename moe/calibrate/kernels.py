"""Measures the speed of one device: matrix products by size, attention, memory bandwidth, the shortest kernel. Each is a median over calls.

On a host without accelerators, one rank on each core measures at the same time, because a core is slower while other cores are busy.
Seconds are then the CPU time of the process, so that other programs have little effect.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# (m, n, k) of matrix products: m tokens of a micro-batch; n and k are widths of small and larger models
PRODUCTS = ((256, 64, 64), (512, 128, 128), (1024, 192, 192), (1024, 512, 256), (1024, 768, 768), (2048, 2048, 1024))
LARGE_PRODUCTS = ((2048, 4096, 4096), (8192, 8192, 8192))  # for accelerators
ATTENTION = (4, 4, 256)  # sequences, heads, positions
HEADS = (32, 128)  # two head sizes, in channels
STREAM_BYTES = 64 * 2**20  # size of each tensor with which memory bandwidth is measured: larger than the caches
SECONDS = 0.15  # wall-clock seconds for which a call is repeated


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Return the median seconds of 3 to 1000 calls of call(), made for about SECONDS after two warm-up calls. On a CPU with one thread,
    these are seconds of CPU time."""
    clock = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def once() -> float:
        began = clock()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return clock() - began

    for _ in range(2):
        once()
    until, found = time.perf_counter() + SECONDS, [once(), once(), once()]
    while time.perf_counter() < until and len(found) < 1000:
        found.append(once())
    return median(found)


def products(device: torch.device, dtype: torch.dtype) -> dict[float, float]:
    """Measure matrix products. Return a dict: number of floating-point operations of a product -> TFLOP/s."""
    rates = {}
    for m, n, k in PRODUCTS + (LARGE_PRODUCTS if device.type == "cuda" else ()):
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
        out = torch.empty(m, n, device=device, dtype=dtype)
        flops = 2.0 * m * n * k
        rates[flops] = flops / timed(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device) / 1e12  # type: ignore[misc]
    return rates


def attention(device: torch.device, dtype: torch.dtype) -> list[float]:
    """Measure causal attention and fit time = a * floating-point operations + b * (query, key) pairs, in picoseconds. Return a and b of the
    forward pass, then a and b of the backward pass, as one list. Two head sizes are measured: only the first term grows with the head size,
    so a and b can be told apart.
    """
    sequences, heads, length = ATTENTION
    pairs = sequences * heads * length**2 / 2  # the causal mask leaves half of all pairs
    small, large = (_attention_seconds((*ATTENTION, channels), device, dtype) for channels in HEADS)
    found = []
    for direction, operations in enumerate((4.0, 10.0)):  # floating-point operations per pair and channel: forward, backward
        of_pair = [1e12 * seconds[direction] / pairs for seconds in (small, large)]
        slope = max(0.0, of_pair[1] - of_pair[0]) / (HEADS[1] - HEADS[0])
        slope = min(slope, of_pair[0] / HEADS[0])  # so that b is not negative
        found += [slope / operations, of_pair[0] - slope * HEADS[0]]
    return found


def _attention_seconds(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    q, k, v = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def both() -> None:
        forward().sum().backward()

    one, two = timed(forward, device), timed(both, device)
    return one, max(two - one, 0.2 * two)


def bandwidth(device: torch.device) -> float:
    """Return the memory bandwidth in GB/s, reads plus writes, of a += b with tensors larger than the caches."""
    a, b = (torch.randn(STREAM_BYTES // 4, device=device) for _ in range(2))
    return 3 * STREAM_BYTES / timed(lambda: a.add_(b), device) / 1e9


def measure(device: torch.device, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    """Measure the device. Return "rates" (name in `dtypes` -> result of `products`), "attention" (name -> result of `attention`),
    "memory_gb_s" and "launch_us" (microseconds of the shortest kernel)."""
    tiny = torch.zeros(16, device=device)

    def hundred() -> None:
        for _ in range(100):
            tiny.add_(1.0)

    return {
        "rates": {kind: products(device, dtype) for kind, dtype in dtypes.items()},
        "attention": {kind: attention(device, dtype) for kind, dtype in dtypes.items()},
        "memory_gb_s": bandwidth(device),
        "launch_us": timed(hundred, device) / 100 * 1e6,
    }
