"""Reads and writes files that a user names. A bad path, a pipe, a device or a huge file gives a one-line error instead of a hang.

`what`, in all functions, is the flag or key that named the file, for error messages.
"""

from __future__ import annotations

import codecs
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel.errors import BadInput, harmless

UTF_8 = "utf-8"
# errors after which no contents can be there: nothing is at the path, or no regular file; after other errors they may be intact
_OF_CONTENTS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG, errno.ESPIPE)
_MOST_STEPS = 2**53  # all steps are below this number, because ranks exchange steps as float64, which holds them exactly
MOST_BYTES = 64 * 2**20  # largest recipe, plan, order of actions or hostfile that is read; real ones have a few megabytes at most


def user_path(text: str | Path, *, what: str) -> Path:
    """Return the path with `~` replaced by the home folder. Raise BadInput for control characters, or if the path cannot
    be looked up. A missing file is no error."""
    if not harmless(str(text)):
        raise BadInput(what, got=repr(str(text)), needed="a path without control characters", fix="rename it")
    try:
        path = Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:  # such as a path that is too long, an unknown user, a zero byte
        said = reason(error).rstrip(".")
        shown = str(text) if len(str(text)) <= 80 else f"{str(text)[:60]}... of {len(str(text))} characters"
        fix = "give this user permission to look into its folder" if isinstance(error, PermissionError) else "check the spelling"
        raise BadInput(what, got=f"{shown!r}: {said}", needed="a path that can be looked up", fix=fix) from None
    return path


def named_encoding(name: str) -> str:
    """Return Python's own name of a text encoding, but "utf-8" for utf-8-sig. Raises LookupError if Python has no such encoding."""
    found = codecs.lookup(name).name
    "a".encode(found)  # raises LookupError for a codec of bytes, such as hex
    return UTF_8 if found == "utf-8-sig" else found


def reason(error: Exception) -> str:
    """Return an error's text without its number and path, which OSError puts around it."""
    return getattr(error, "strerror", None) or str(error)


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES, newline: str | None = None) -> str:
    """Return the UTF-8 text of a regular file. Raise OSError if it has more than `most_bytes` bytes, or is not a regular file: a pipe may
    block, and a device may have no end. newline: as in Python's `open`."""
    with open(path, encoding="utf-8", newline=newline, opener=_opened) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "not a regular file", str(path))
        if about.st_size > most_bytes:
            raise OSError(0, f"{about.st_size} bytes, more than {most_bytes}", str(path))
        return file.read()


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # opens a pipe without a writer immediately, so that fstat can recognize it


def check_writable(path: Path, *, what: str) -> None:
    """Raise BadInput if the file cannot be written. Called before long work whose result goes into the file."""
    folder = next(place for place in (path.absolute().parent, *path.absolute().parents) if place.exists())
    why = (
        "Is a directory" if path.is_dir()
        else f"{folder} is no folder" if not folder.is_dir()
        else "Permission denied" if not os.access(path if path.exists() else folder, os.W_OK)
        else None
    )  # fmt: skip
    if why:
        raise _not_written(path, why, what)


@contextmanager
def writing(path: Path, *, what: str) -> Iterator[None]:
    """Return a context for code that writes the file. The context makes the folder, and turns an OSError into BadInput about `what`."""
    check_writable(path, what=what)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _not_written(path, error.strerror or str(error), what) from None


def write_text(path: Path, text: str, *, what: str) -> None:
    """Write a file, and make its folder if needed. Raise BadInput if it cannot be written."""
    with writing(path, what=what):
        path.write_text(text, encoding="utf-8")


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace a file's content atomically: after a crash it has the old or the new content. Several processes may do this at once."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(temporary, content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes | str) -> None:
    """Write a file, and wait until it is on disk."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    sync(path)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _not_written(path: Path, why: str, what: str) -> BadInput:
    return BadInput(what, got=f"{path}: {why}", needed="a file that can be written", fix="choose another path")


@contextmanager
def usual_mode(path: Path) -> Iterator[None]:
    """Return a context in which a library writes `path`. At its end, the file gets the usual mode of a new file, because a file that
    safetensors writes can be read by its owner only."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def of_contents(error: OSError) -> bool:
    """Return whether an error means that a file's contents are lost: it is gone, or not a regular file. After other errors (no permission,
    a disk or server that does not answer, too many open files) the contents may be intact."""
    return not error.errno or error.errno in _OF_CONTENTS


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's folder name: 80 for step-80; None for others (step-0080, non-ASCII digits, 2^53 or more)."""
    digits = name.removeprefix("step-")
    number = int(digits) if digits.isascii() and digits.isdecimal() else _MOST_STEPS
    return number if name == f"step-{number}" and number < _MOST_STEPS else None
