"""One run at a time in a folder: a lock that the system gives back when its owner dies, however it dies.

The parent of several processes holds it for all of them, and says so in their environment (HELD); a process that is alone, and rank 0
of ranks that another launcher started, holds it itself. A disk without locks is used without one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from parallel.errors import BadInput

NAME = ".lock"
HELD = "MOE_LOCKED_FOLDER"


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, unless an ancestor holds it. Raises BadInput where another run has it, with that one's process."""
    handle = None if os.environ.get(HELD) == str(folder.resolve()) else _hold(folder)
    try:
        yield
    finally:
        if handle is not None:
            with contextlib.suppress(OSError):
                os.unlink(folder / NAME)  # while it is held: who opened it before sees that it is gone, and opens another
            os.close(handle)


def _hold(folder: Path) -> int | None:
    """A descriptor that holds the lock; None where there can be none."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError:  # a folder that cannot be written is refused by who writes there
            return None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_nlink:
                break
        except BlockingIOError:
            owner = os.read(handle, 64).decode(errors="replace").strip() or "another process"
            os.close(handle)
            fix = "choose another --out, or wait"
            raise BadInput("--out", got=f"{folder}, in which {owner} trains", needed="a folder for each run", fix=fix) from None
        except OSError:
            return handle
        os.close(handle)
    with contextlib.suppress(OSError):  # a full disk
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)
    return handle
