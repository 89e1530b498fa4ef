"""Timing on a noisy machine: everything runs in turn, round by round, and ratios are taken within a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


def in_turn(work: Mapping[str, Callable[[], object]], *, rounds: int, device: torch.device, warmups: int = 2) -> dict[str, list[float]]:
    """Seconds of each piece of work in each round. Every second round runs in reverse order, so that no work always follows the same
    one.
    """
    for run in work.values():
        for _ in range(warmups):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds):
        for name in list(work)[:: 1 if number % 2 == 0 else -1]:
            seconds[name].append(once(work[name], device))
    return seconds


def once(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of one run."""
    wait(device)
    started = time.perf_counter()
    run()
    wait(device)
    return time.perf_counter() - started


def wait(device: torch.device) -> None:
    """Wait for the work on a GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratio(a: list[float], b: list[float]) -> float:
    """Median over rounds of a / b."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that torch held, minus those before the run. On a CPU, scratch memory of the matrix library is not included."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        wait(device)
        return torch.cuda.max_memory_allocated(device) - before
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    assert found.profiler is not None and found.profiler.kineto_results is not None
    events: list[Any] = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
