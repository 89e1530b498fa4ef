"""Properties of this machine for the planner: the memory that its processes may use, and the cluster file that was measured here.

    memory      installed memory, or the limit of the container (cgroup) if that is smaller
    own         memory that this process may still take under limits of the shell (`ulimit -d`, `ulimit -v`)
    measured    machine.yaml in the user's cache, written by `moe plan --calibrate`; used only for the processor or GPU that it names

Needs no torch.
"""

from __future__ import annotations

import platform
import resource
from pathlib import Path

import psutil

from moe.plan.machine.cluster import Cluster, load_cluster
from parallel.errors import BadInput
from parallel.process.extensions import cache_dir

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit_bytes() -> int:
    """Memory that all processes of this machine or container together may use, in bytes."""
    limit = int(psutil.virtual_memory().total)
    for path in _LIMITS:
        try:
            limit = min(limit, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return limit


def own_limit_bytes() -> float | None:
    """Bytes that this process may still take under RLIMIT_DATA and RLIMIT_AS; None without such limits."""
    held = psutil.Process().memory_info()
    taken = {resource.RLIMIT_DATA: getattr(held, "data", held.rss), resource.RLIMIT_AS: held.vms}
    limits = {kind: resource.getrlimit(kind)[0] for kind in taken}
    left = [max(0.0, float(limit - taken[kind])) for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=None)


def resident_bytes() -> int:
    """Resident memory of this process now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def processor() -> str:
    """Name of the processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as told:
            return next(line.partition(":")[2].strip() for line in told if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measured_file() -> Path:
    """Default path of the file that `moe plan --calibrate` writes."""
    return cache_dir() / "machine.yaml"


def measured_cluster(device: str) -> Cluster | None:
    """Cluster that was measured here; None if there is none, or if it names another device (machines may share a home folder)."""
    path = measured_file()
    try:
        found = load_cluster(str(path)) if path.is_file() else None
    except (BadInput, OSError):
        return None
    return found if found is not None and found.device.name == device else None
