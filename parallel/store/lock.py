"""Locks a folder for one run at a time, by locks of open files (flock), which the system releases when their owner dies.

    the folder itself   locked against processes of this machine; the lock survives renames and removed files
    <folder>/.lock      names the process that holds the lock; locked too, because NFS and Lustre pass locks of files to other machines,
                        but not locks of folders

A launcher holds the lock for its ranks, and names the folder in the environment variable MOE_LOCKED_FOLDER. Without such a
launcher, a single process or rank 0 holds the lock itself. If the disk has no locks, nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from parallel.errors import BadInput

NAME = ".lock"
HELD = "MOE_LOCKED_FOLDER"
_SIGNED = "process "  # first word of a lock file
_TRIES, _POLL_S = 50, 0.01  # tries, and seconds between them, while another process makes or removes the folder
_GONE = (errno.ENOENT, errno.ESTALE)
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK  # flags to open a lock file, which may be any file of a user: follow no link, wait for no pipe


@contextlib.contextmanager
def alone_in(folder: Path, *, what: str = "--out") -> Iterator[None]:
    """Return a context that makes and locks the folder, unless the launcher holds its lock already. Raises BadInput if another process
    holds the lock. what: the flag that the message names."""
    held = None if is_held(folder) else _hold(folder, what)
    try:
        yield
    finally:
        if held is not None:
            held.leave()


def is_held(folder: Path) -> bool:
    """Return whether this process's launcher holds the folder's lock."""
    return os.environ.get(HELD) == str(folder.resolve())


@dataclass
class _Held:
    """A locked folder. place, file: open file descriptors of the folder and of its lock file. made: folders made for this run, deepest
    first. signed: the lock file names this process. process: id of the process that locked the folder."""

    folder: Path
    made: list[Path]
    place: int | None = None
    file: int | None = None
    signed: bool = False
    process: int = field(default_factory=os.getpid)

    def is_there(self) -> bool:
        """Return whether the path still leads to the locked folder."""
        try:
            return self.place is not None and os.path.samestat(os.fstat(self.place), os.stat(self.folder))
        except OSError:
            return False

    def leave(self) -> None:
        """Release the lock, and remove the lock file and empty folders made for this run. In a forked child, only close descriptors."""
        if self.place is None or os.getpid() != self.process:
            return self.close()
        if self.file is not None:
            with contextlib.suppress(OSError):
                named = os.stat(NAME, dir_fd=self.place, follow_symlinks=False)
                if self.signed and os.path.samestat(os.fstat(self.file), named):
                    os.unlink(NAME, dir_fd=self.place)  # still locked: another process that has opened the file will see that it is removed
            os.close(self.file)  # before the folder is removed: NFS keeps a removed file in the folder until it is closed
            self.file = None
        with contextlib.suppress(OSError):
            # if the run's folder was renamed, ranks may have made a folder at the old path to report their end: remove it if it is empty
            for folder in self.made if self.is_there() else [self.folder]:
                folder.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(self.place, fcntl.LOCK_UN)  # explicitly, because a forked child may still have the descriptor open
        self.close()

    def close(self) -> None:
        for handle in (self.file, self.place):
            if handle is not None:
                os.close(handle)


def _hold(folder: Path, what: str) -> _Held:
    """Make and lock the folder. Raise BadInput if another process holds it. A folder that cannot be made or opened is returned unlocked:
    the first write to it will raise the error."""
    made: list[Path] = []
    owner = ""
    for _ in range(_TRIES):
        made = [each for each in (folder, *folder.parents) if each in made or not each.exists()]
        held = _Held(folder, made)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            locked = _locked(held.place)
            if held.is_there():
                if locked and _sign(held):
                    return held
                owner = _owner(held.place)
        except OSError as error:
            if error.errno not in _GONE:
                held.close()
                return _Held(folder, made)
        held.close()
        if owner:
            break
        time.sleep(_POLL_S)
    else:
        if not folder.exists():
            return _Held(folder, made)
    got = f"{folder}, in which {owner or 'another process'} trains"
    raise BadInput(what, got=got, needed="a folder for each run", fix=f"choose another {what}, or wait")


def _locked(handle: int) -> bool:
    """Lock the open file or folder `handle`. Return False if another process holds it; True if locked, or if the disk has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _sign(held: _Held) -> bool:
    """Lock the lock file too, after the folder itself, and write this process's name into the file. Return False if a process of another
    machine holds the file, or if the file has just been removed. Raise OSError if the folder is gone."""
    try:
        held.file = os.open(NAME, os.O_RDWR | os.O_CREAT | _PLAIN, 0o666, dir_fd=held.place)
    except OSError as error:
        if error.errno in _GONE:
            raise
        return True  # a full disk, or another user's file: the folder itself is locked, which is enough
    if not _locked(held.file) or not os.fstat(held.file).st_nlink:
        return False
    with contextlib.suppress(OSError):
        text = f"{_SIGNED}{os.getpid()} on {os.uname().nodename}\n".encode()
        held.signed = os.pread(held.file, len(_SIGNED), 0) in (b"", _SIGNED.encode())  # a file with other text belongs to the user
        if held.signed:
            os.pwrite(held.file, text, 0)
            os.ftruncate(held.file, len(text))
            os.fsync(held.file)  # so that other machines can read it
    return True


def _owner(place: int) -> str:
    """Return the name of the process that holds the folder, from its lock file; "" if the file has no name (yet), or is gone."""
    try:
        file = os.open(NAME, os.O_RDONLY | _PLAIN, dir_fd=place)
    except OSError:
        return ""
    try:
        said = os.read(file, 200).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(file)
    return said if said.startswith(_SIGNED) else ""
