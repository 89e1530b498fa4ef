"""This machine's name and its matrix-product speed, so that a run's speed can be given as a share of it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import torch

from parallel.errors import counted
from parallel.machine import processor


def matmul_flops(dtype: torch.dtype, device: torch.device, *, seconds: float = 0.3) -> float:
    """Return FLOP/s of one rank on large square products, with the threads that the run has: the best of several measurements."""
    n = 4096 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    best, until = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2.0 * n**3 / best


def hardware(device: torch.device) -> str:
    """Return a short name for the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {counted(torch.get_num_threads(), 'thread')} a rank"


def source_commit() -> str | None:
    """Return the commit of the checkout that this code runs from, with + if files were changed; None outside a checkout."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
