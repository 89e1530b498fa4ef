"""Writes the JSON of `--json FILE` for all verbs; describes this machine, and measures its speed of matrix products."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe.records.metrics import finite
from parallel.errors import counted
from parallel.machine import processor
from parallel.store.files import write_text

if TYPE_CHECKING:
    import torch


def write_json(path: str | Path, *, verb: str, rows: Sequence[dict[str, Any]], **more: Any) -> None:
    """Write {"verb", "commit", "hardware", "rows", "passed", "failed", **more} as JSON, with NaN and infinity as null. rows: one dict a
    result. failed: number of rows with "passed": False; passed: number of the other rows. Raises BadInput if the file cannot be written."""
    from parallel.process.process import World

    failed = sum(row.get("passed") is False for row in rows)
    value: dict[str, Any] = {"verb": verb, "commit": source_commit(), "hardware": hardware(World().device)}
    value |= {"rows": [finite(row) for row in rows], "passed": len(rows) - failed, "failed": failed, **more}
    write_text(Path(path), json.dumps(value, indent=1) + "\n", what="--json")


def matmul_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Measure this rank's FLOP/s in products of large square matrices, with the run's number of threads. Return the best of several
    measurements within 0.3 seconds."""
    import torch

    n = 4096 if device.type == "cuda" else 1024 if dtype == torch.float32 else 512  # many CPUs multiply 16-bit numbers slowly
    a = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(a)
    best, until = float("inf"), time.perf_counter() + 0.3
    while time.perf_counter() < until:
        started = time.perf_counter()
        torch.mm(a, a, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return 2.0 * n**3 / best


def hardware(device: torch.device) -> str:
    """Return the GPU's name; for a CPU, the processor's name and torch's number of threads per rank."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {counted(torch.get_num_threads(), 'thread')} a rank"


def source_commit() -> str | None:
    """Return the git commit of this code, with "+" at its end if files were changed; None outside a git checkout."""
    here = Path(__file__).resolve().parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=True).stdout

    try:
        commit, changed = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "-uno")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit.strip() + ("+" if changed.strip() else "")
