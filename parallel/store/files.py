"""Reads and writes files that a user names, and reads YAML from any source. A bad path, a pipe, a device or a huge file gives a one-line
error instead of a hang.

`what`, in all functions, is the flag or key that named the file, for error messages.

YAML may have only plain values, up to limits of their number and depth:

    text -> events, counted -> values      {a: &x [1, 1], b: [*x, *x]}     counts as 13 values, with keys, lists and written-out aliases

A few aliases can mean more values than fit into memory, and deeply nested brackets overflow the parser's stack. Both are found in the
parser's events, before any value is made. Repeated keys are refused too (PyYAML would keep the last).
"""

from __future__ import annotations

import codecs
import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

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


MOST_VALUES, DEEPEST = 300_000, 64
NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)  # ValueError: dates such as 2024-13-45
_NOT_DECIMAL = re.compile(r"[-+]?(0[0-7_]+$|.*:)")  # YAML reads 0755 as octal 493, and 1:30 in base 60 as 90


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # libyaml's loader is ten times as fast
    """PyYAML's safe loader, which makes only plain values. This subclass also refuses repeated keys, and numbers that YAML reads as octal
    or in base 60."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else repr(key.value)
            if name in seen:
                raise _refused(f"{name} twice", key.start_mark)
            seen.add(name)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made

    def construct_number(self, node: yaml.ScalarNode) -> float:
        if _NOT_DECIMAL.match(node.value):
            raise _refused(f"{node.value}, which YAML reads as another number", node.start_mark)
        made: float = self.construct_yaml_int(node) if node.tag.endswith("int") else self.construct_yaml_float(node)
        return made


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def load(text: str) -> Any:
    """Return the data of a YAML text. Raise one of NOT_YAML if the text is no YAML, has more than MOST_VALUES values, or is
    nested more than DEEPEST deep."""
    _check_size(text)
    return yaml.load(text, _Loader)


def _check_size(text: str) -> None:
    """Raise an error for recursive aliases, too many values or too deep nesting."""
    whole = 0
    sizes: dict[str, int] = {}  # anchor -> number of its values, with aliases written out
    open_: list[tuple[str | None, int]] = []  # for each unclosed collection: (anchor, number of values before it)
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in [anchor for anchor, _ in open_]:
                raise _refused(f"*{event.anchor} inside of its own value", event.start_mark)
            whole += sizes.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            whole += 1
            if event.anchor is not None:
                sizes[event.anchor] = 1
        elif isinstance(event, yaml.CollectionStartEvent):
            open_.append((event.anchor, whole))
            whole += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
            if anchor is not None:
                sizes[anchor] = whole - before
        if whole > MOST_VALUES:
            raise _refused(f"more than {MOST_VALUES:,} values, with aliases written out", event.start_mark)
        if len(open_) > DEEPEST:
            raise _refused(f"values nested more than {DEEPEST} deep", event.start_mark)


def _refused(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
