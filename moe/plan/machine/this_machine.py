"""This machine as a planner sees it: the memory that its processes may take, and the cluster file that was measured here.

    memory      the least of what is installed and what the container's group may take (cgroup v2)
    own         what one process may still take where the user's shell limits it (`ulimit -d`, `ulimit -v`)
    measured    the user's cache, machine.yaml: written by `moe plan --calibrate`, and of this processor or GPU, or it does not count

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
    """What all processes here together may take."""
    limit = int(psutil.virtual_memory().total)
    for path in _LIMITS:
        try:
            limit = min(limit, int(Path(path).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return limit


def own_limit_bytes() -> float | None:
    """What this process may still take of data (RLIMIT_DATA) or of addresses (RLIMIT_AS), the less of both; None without limits."""
    held = psutil.Process().memory_info()
    taken = {resource.RLIMIT_DATA: getattr(held, "data", held.rss), resource.RLIMIT_AS: held.vms}
    limits = {kind: resource.getrlimit(kind)[0] for kind in taken}
    left = [max(0.0, float(limit - taken[kind])) for kind, limit in limits.items() if limit != resource.RLIM_INFINITY]
    return min(left, default=None)


def resident_bytes() -> int:
    """Of this process, now."""
    return int(psutil.Process().memory_info().rss)


def processor() -> str:
    """The processor's name."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as told:
            return next(line.partition(":")[2].strip() for line in told if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measured_file() -> Path:
    """Where `moe plan --calibrate` writes, unless told otherwise."""
    return cache_dir() / "machine.yaml"


def measured_cluster(device: str) -> Cluster | None:
    """The cluster file that was measured here; None without one, and for one of another device: a home folder may be many machines'."""
    path = measured_file()
    try:
        found = load_cluster(str(path)) if path.is_file() else None
    except (BadInput, OSError):
        return None
    return found if found is not None and found.device.name == device else None
