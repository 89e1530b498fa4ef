"""One run at a time in a folder: locks of open files, which the system gives back when their owner dies, however it dies.

    the folder itself   held under whatever name, and whatever is removed in it: between the processes of one machine
    <folder>/.lock      names the process that holds the folder; locked as well, because NFS and Lustre pass on locks of files to other
                        machines, and no locks of folders

Only the holder removes anything: its file, and the folders that were made for it if nothing was put into them. The parent of several
processes holds the lock for all of them, and says so in their environment (HELD); a process that is alone, and rank 0 of ranks that
another launcher started, holds it itself. A disk without locks is used without them.
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
_SIGNED = "process "  # begins the file's text
_TRIES, _POLL_S = 50, 0.01  # while another start makes the folder, removes it, or has not signed yet
_GONE = (errno.ENOENT, errno.ESTALE)
_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK  # no link to a file elsewhere, and no pipe


@contextlib.contextmanager
def alone_in(folder: Path, *, what: str = "--out") -> Iterator[None]:
    """Make the folder and hold its lock, unless an ancestor holds it. Raises BadInput, about `what`, with the process that holds it."""
    held = None if is_held(folder) else _hold(folder, what)
    try:
        yield
    finally:
        if held is not None:
            held.leave()


def is_held(folder: Path) -> bool:
    """Whether an ancestor of this process holds the folder's lock for it."""
    return os.environ.get(HELD) == str(folder.resolve())


@dataclass
class _Held:
    """A folder by an open descriptor, and its file by another (None: it has none). `made`: folders made for it, the deepest first."""

    folder: Path
    made: list[Path]
    place: int | None = None
    file: int | None = None
    signed: bool = False
    process: int = field(default_factory=os.getpid)

    def is_there(self) -> bool:
        """Whether the folder still has its name."""
        try:
            return self.place is not None and os.path.samestat(os.fstat(self.place), os.stat(self.folder))
        except OSError:
            return False

    def leave(self) -> None:
        """Remove what was made for the lock alone, and give it back. A process that was forked meanwhile has no part in it."""
        if self.place is None or os.getpid() != self.process:
            return self.close()
        if self.file is not None:
            with contextlib.suppress(OSError):
                named = os.stat(NAME, dir_fd=self.place, follow_symlinks=False)
                if self.signed and os.path.samestat(os.fstat(self.file), named):
                    os.unlink(NAME, dir_fd=self.place)  # while it is held: a start that has it open sees that it is gone
            os.close(self.file)  # before its folder goes: NFS keeps a removed file in the folder until it is closed
            self.file = None
        with contextlib.suppress(OSError):
            # a folder that was renamed may have been made again, for ranks to note how they ended
            for folder in self.made if self.is_there() else [self.folder]:
                folder.rmdir()
        with contextlib.suppress(OSError):
            fcntl.flock(self.place, fcntl.LOCK_UN)  # a process that was forked meanwhile may have the descriptor still
        self.close()

    def close(self) -> None:
        for handle in (self.file, self.place):
            if handle is not None:
                os.close(handle)


def _hold(folder: Path, what: str) -> _Held:
    """Hold the folder. Raises BadInput if another process does. Nothing is held in a folder that cannot be made or opened: the first
    that writes there refuses it."""
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
    """Lock it; False if another process has. A disk that has no locks refuses nothing."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _sign(held: _Held) -> bool:
    """Lock the file in a folder that is held on this machine, and write this process into it. False if another machine holds it.

    Raises OSError if the folder is gone.
    """
    try:
        held.file = os.open(NAME, os.O_RDWR | os.O_CREAT | _PLAIN, 0o666, dir_fd=held.place)
    except OSError as error:
        if error.errno in _GONE:
            raise
        return True  # a full disk, or another user's file: the folder's own lock is held
    if not _locked(held.file) or not os.fstat(held.file).st_nlink:
        return False
    with contextlib.suppress(OSError):
        text = f"{_SIGNED}{os.getpid()} on {os.uname().nodename}\n".encode()
        held.signed = os.pread(held.file, len(_SIGNED), 0) in (b"", _SIGNED.encode())  # else it is a file of the user's
        if held.signed:
            os.pwrite(held.file, text, 0)
            os.ftruncate(held.file, len(text))
            os.fsync(held.file)  # for starts on other machines
    return True


def _owner(place: int) -> str:
    """The process that holds the folder, as its file says; nothing while it has not said so yet, or has just left."""
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
