"""Freed memory stays with the process: on Linux's C library, large tensors otherwise go back to the system at once.

A tensor of 32 MiB or more is mapped anew each time it is made, and every page of it is cleared at its first touch: for a
layer of 128 small experts that is a third of a training step on a CPU. Kept memory is reused as it is; the process does not
shrink between peaks.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_LARGEST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Tell the allocator of this process to keep what is freed; False where it cannot, as without glibc. Costs nothing twice."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(ctypes.util.find_library("c") or "libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    kept = bool(mallopt(_M_TRIM_THRESHOLD, _LARGEST))
    return any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_LARGEST, 32 * 2**20)) and kept  # older versions refuse more
