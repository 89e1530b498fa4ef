"""What the C library does with freed memory: keep it for the next tensor (fast), or give it back to the system at once (small).

Linux's own choice is neither. A tensor of 32 MiB or more is mapped anew each time it is made, and every page of it is cleared at
its first touch: for a layer of 128 small experts that is a third of a training step on a CPU. Smaller ones leave holes in the
heap, which nobody else can have: under offload to a disk, where only what is used now should be here, they add up to the model.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST, _SMALL = 2**31 - 1, 2**16


def keep_freed_memory() -> bool:
    """The process does not shrink between peaks. False where the allocator cannot be told, as without glibc. Costs nothing twice."""
    kept = _set(_M_TRIM_THRESHOLD, _LARGEST)
    return any(_set(_M_MMAP_THRESHOLD, size) for size in (_LARGEST, 32 * 2**20)) and kept  # older versions refuse more


def give_freed_memory_back() -> bool:
    """Each tensor of 64 KiB or more has pages of its own, which go with it. False where the allocator cannot be told."""
    return _set(_M_TRIM_THRESHOLD, _SMALL) and _set(_M_MMAP_THRESHOLD, _SMALL)


def _set(what: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6").mallopt(what, value))
    except (OSError, AttributeError):
        return False
