"""Functions of the C library that Python does not offer: kill a process when its parent dies; keep or return freed memory. Needs no torch.

Linux's default for freed memory is neither fast nor small. Each tensor of 32 MiB or more gets new pages, which Linux clears. For a layer of
128 small experts, this takes a third of a training step on a CPU. Smaller tensors leave holes in the heap that no other process can use.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from sys/prctl.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGEST, _SMALL = 2**31 - 1, 2**16  # thresholds in bytes


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies. Kill it now if process id `parent` is dead already. Only on Linux."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def keep_freed_memory() -> bool:
    """Keep freed memory in this process for its next tensors, which is fast. Return False if the allocator cannot be set, as without
    glibc."""
    kept = _set(_M_TRIM_THRESHOLD, _LARGEST)
    return any(_set(_M_MMAP_THRESHOLD, size) for size in (_LARGEST, 32 * 2**20)) and kept  # older glibc refuses _LARGEST


def give_freed_memory_back() -> bool:
    """Return memory to the system when it is freed, so that the process stays small: each tensor of 64 KiB or more gets pages of its own.
    Return False if the allocator cannot be set."""
    return _set(_M_TRIM_THRESHOLD, _SMALL) and _set(_M_MMAP_THRESHOLD, _SMALL)


def _set(setting: int, value: int) -> bool:
    try:
        return sys.platform.startswith("linux") and bool(ctypes.CDLL(None).mallopt(setting, value))
    except (OSError, AttributeError):
        return False
