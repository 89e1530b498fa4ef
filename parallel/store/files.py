"""Files that a user names: a path that makes no sense, a pipe, a device or a huge file is one line instead of a hang.

user_path("~/text")                     the path, for anything that may or may not be there
read_text(path)                         the text of a regular file of a sensible size; OSError says what it is instead
check_writable(path, what="--out")      before long work: can its results be written there
write_text(path, text, what="--out")    the text in that file; `writing` is for what writes a file itself, such as a picture
replace_file(path, content)             the content in that file, atomically
with usual_mode(path): ...              a library's own way to write a file, whose mode then follows the umask
of_contents(error)                      whether an OSError means that the file is gone or of another kind, not that it cannot be read now
step_of("step-120")                     the step of a checkpoint's folder, from its name
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from parallel.errors import BadInput, harmless

_OF_CONTENTS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENAMETOOLONG, errno.ESPIPE)
_MOST_STEPS = 2**53  # ranks tell each other steps as float64
MOST_BYTES = 64 * 2**20  # of a recipe, an order, a plan, a hostfile: the largest that anybody writes are a few megabytes


def user_path(text: str | Path, *, what: str) -> Path:
    """`~` made a home. Raises BadInput, about `what`, for a path that the system cannot even look up, or a terminal cannot show."""
    if not harmless(str(text)):
        raise BadInput(what, got=repr(str(text)), needed="a path without control characters", fix="rename it")
    try:
        path = Path(text).expanduser()
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a zero byte
        said = getattr(error, "strerror", None) or str(error).rstrip(".")
        shown = str(text) if len(str(text)) <= 80 else f"{str(text)[:60]}... of {len(str(text))} characters"
        raise BadInput(what, got=f"{shown!r}: {said}", needed="a path that can be looked up", fix="check the spelling") from None
    return path


def read_text(path: str | Path, *, most_bytes: int = MOST_BYTES, newline: str | None = None) -> str:
    """The UTF-8 text of a regular file. Raises OSError for anything else, such as a pipe, which would wait, or a device without an end."""
    with open(path, encoding="utf-8", newline=newline, opener=_opened) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(0, "not a regular file", str(path))
        if about.st_size > most_bytes:
            raise OSError(0, f"{about.st_size} bytes, more than {most_bytes}", str(path))
        return file.read()


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe without a writer opens at once, and is then seen for what it is


def check_writable(path: Path, *, what: str) -> None:
    """Refuse a place in which nothing can be written, before the work whose results it is for. Raises BadInput, about `what`."""
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
    """Around what writes a file that the user asked for: makes the folder that it is to be in. Raises BadInput if it cannot write."""
    check_writable(path, what=what)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise _not_written(path, error.strerror or str(error), what) from None


def write_text(path: Path, text: str, *, what: str) -> None:
    """Write a file that the user asked for, and the folder that it is to be in. Raises BadInput if it cannot write."""
    with writing(path, what=what):
        path.write_text(text, encoding="utf-8")


def replace_file(path: Path, content: bytes | str) -> None:
    """Replace a file's content atomically: whenever the machine stops, the file is whole, old or new. Processes may write the same file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write_synced(beside, content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


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
    """Around a library that writes a file for its owner alone, as safetensors does: it gets the mode of any new file in that folder."""
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def of_contents(error: OSError) -> bool:
    """Whether the file is gone, or is no regular file: then what was written is lost. Else it may be whole, and a later or another reader's
    attempt may succeed: no permission, a disk or server that does not answer, too many open files."""
    return not error.errno or error.errno in _OF_CONTENTS


def step_of(name: str) -> int | None:
    """None for any other name: step-0080, digits of other scripts, a number that no run reaches."""
    digits = name.removeprefix("step-")
    number = int(digits) if digits.isascii() and digits.isdecimal() else _MOST_STEPS
    return number if name == f"step-{number}" and number < _MOST_STEPS else None
