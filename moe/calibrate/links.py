"""Measures collectives between ranks of this machine: microseconds by kind, number of ranks and bytes.

    bytes     of a rank's input of all-reduce and all-to-all, of its output of all-gather, or of a message, as in
              moe/plan/time/collective_times.py
    backend   gloo between processes on CPU cores, NCCL between GPUs

The time of a call is that of the slowest rank; the result is the median over calls. If there are more ranks than cores, times include
waiting for a core, as in training.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

SIZES = (4096, 65536, 524288, 4 * 2**20)
KINDS = ("all_reduce", "all_gather", "all_to_all", "send")
CALLS = 25
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the first name is that of newer versions of torch


def measure(rank: int, ranks: int, place: str) -> dict[str, dict[int, float]]:
    """Measure every kind of collective on these ranks. Return kind -> bytes -> median microseconds of a call. place: cpu or cuda."""
    device = torch.device(place, rank) if place == "cuda" else torch.device(place)
    group = dist.new_group(backend="nccl") if place == "cuda" else dist.group.WORLD
    found: dict[str, dict[int, float]] = {}
    for kind in KINDS:
        found[kind] = {}
        for size in SIZES:
            seconds = torch.tensor(_calls(kind, size, rank, ranks, device, group), dtype=torch.float64, device=device)
            dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
            found[kind][size] = round(1e6 * median(seconds.tolist()), 1)
        for smaller, larger in reversed(list(pairwise(SIZES))):  # fewer bytes cannot take longer: then another program was running
            found[kind][smaller] = min(found[kind][smaller], found[kind][larger])
    return found


def _calls(kind: str, size: int, rank: int, ranks: int, device: torch.device, group: Any) -> list[float]:
    """Return the seconds of each of CALLS calls on this rank, after two warm-up calls. size: bytes, as defined above."""
    whole = torch.zeros(max(ranks, size // 4 // ranks * ranks), device=device)
    part = whole[: whole.numel() // ranks].clone()
    other = torch.empty_like(whole)
    seconds: list[float] = []
    for _ in range(CALLS + 2):
        dist.barrier(group=group)
        began = time.perf_counter()
        if kind == "all_reduce":
            dist.all_reduce(whole, group=group)
        elif kind == "all_gather":
            _all_gather(other, part, group=group)
        elif kind == "all_to_all":
            dist.all_to_all_single(other, whole, group=group)
        elif rank < 2:
            (dist.send if rank == 0 else dist.recv)(whole, 1 - rank, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[2:]
