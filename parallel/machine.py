"""Describes this machine: its processor, and the cores and memory that a process may use.

Limits come from the process's CPU affinity, a container (cgroup) and the shell (`ulimit -d`, `ulimit -v`). Needs no torch.
"""

from __future__ import annotations

import math
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

# flag of an x86 or Arm processor in /proc/cpuinfo -> dtype of the matrix products that it accelerates
MATRIX_INSTRUCTIONS: dict[str, Literal["bf16", "fp16"]] = {
    "amx_bf16": "bf16",
    "avx512_bf16": "bf16",
    "bf16": "bf16",
    "amx_fp16": "fp16",
    "avx512_fp16": "fp16",
    "asimdhp": "fp16",
}
# files with a container's memory limit: cgroup v2 and v1
_MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def processor() -> str:
    """Return the processor's name."""
    return next(_values_of("model name"), "") or platform.processor() or platform.machine()


def matrix_instructions() -> tuple[str, ...]:
    """Return the flags of MATRIX_INSTRUCTIONS that the processor has."""
    flags = set(" ".join((*_values_of("flags"), *_values_of("Features"))).split())
    return tuple(flag for flag in MATRIX_INSTRUCTIONS if flag in flags)


def usable_cores() -> int:
    """Return the number of cores that this process may use: the cores of its CPU affinity, limited by a container's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def memory_limit_bytes() -> int:
    """Return the bytes that all processes of this machine or container together may use."""
    import psutil

    limit = int(psutil.virtual_memory().total)
    for path in _MEMORY_LIMITS:
        try:
            limit = min(limit, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max": no limit
            continue
    return limit


def own_limit_bytes() -> float | None:
    """Return the number of bytes that this process can still allocate before it reaches RLIMIT_DATA or RLIMIT_AS; None without limits."""
    import psutil

    held = psutil.Process().memory_info()
    taken = {resource.RLIMIT_DATA: getattr(held, "data", held.rss), resource.RLIMIT_AS: held.vms}
    limits = {kind: resource.getrlimit(kind)[0] for kind in taken}
    left = [max(0.0, float(limit - taken[kind])) for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=None)


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _values_of(field: str) -> Iterator[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    yield from (line.partition(":")[2].strip() for line in lines if line.startswith(field))
