"""Settings of the C library for freed memory: keep it for the next tensor (fast), or return it to the system immediately (small).

Linux's default does neither. Each tensor of 32 MiB or more gets new pages, and Linux clears each page when it is first written: for a
layer of 128 small experts, this takes a third of a training step on a CPU. Smaller tensors leave holes in the heap that no other process
can use. If states are offloaded to a disk, these holes add up to the size of the model.
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
        return bool(ctypes.CDLL(None).mallopt(what, value))  # CDLL(None): the C library that this process has loaded
    except (OSError, AttributeError):
        return False
