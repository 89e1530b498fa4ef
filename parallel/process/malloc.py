"""Settings of the C library for freed memory: keep it for the next tensor (fast), or return it to the system at once (small).

Linux's default is neither. A tensor of 32 MiB or more is mapped anew each time it is made, and each of its pages is cleared at its first
touch: for a layer of 128 small experts that is a third of a training step on a CPU. Smaller tensors leave holes in the heap that no
other process can use: under offload to disk, where only what is in use should be in memory, they add up to the size of the model.
"""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST, _SMALL = 2**31 - 1, 2**16


def keep_freed_memory() -> bool:
    """Keep freed memory in the process between peaks. False if the allocator cannot be set, as without glibc. May be called repeatedly."""
    kept = _set(_M_TRIM_THRESHOLD, _LARGEST)
    return any(_set(_M_MMAP_THRESHOLD, size) for size in (_LARGEST, 32 * 2**20)) and kept  # older versions refuse larger values


def give_freed_memory_back() -> bool:
    """Give each tensor of 64 KiB or more pages of its own, which are returned when it is freed. False if the allocator cannot be set."""
    return _set(_M_TRIM_THRESHOLD, _SMALL) and _set(_M_MMAP_THRESHOLD, _SMALL)


def _set(what: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).mallopt(what, value))  # of the C library that this process has: no search for its file
    except (OSError, AttributeError):
        return False
