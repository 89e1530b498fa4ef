"""Copies a rank's output to the rank's log. Output that cannot be written is discarded, so that the run continues, for example after a
terminal was closed, or after Ctrl-C has ended tee in `moe train ... | tee log`.

    <run folder>/logs/rank-<n>.log     what rank n printed each time it was started, and the stack of a crash (faulthandler)
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parallel.errors import BadInput

_BEGIN = "--- process "  # prefix of the first line that each attempt (start of the rank's process) writes into the log
FOLDER = "logs"  # in the run's folder
_END_BYTES, _END_LETTERS = 64 << 10, 300  # bytes that `last_line` reads at a log's end, and most letters that it returns


class Lasting:
    """Wraps a text stream so that writing never fails: the first error redirects the stream's file descriptor to the null device."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.log: int | None = None  # file descriptor of the log to which the text is copied

    def write(self, text: str) -> int:
        if self.log is not None:
            with contextlib.suppress(OSError):  # the disk is full: the run continues without a log
                os.write(self.log, text.encode(errors="backslashreplace"))
        try:
            return int(self._stream.write(text))
        except OSError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._give_up()

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def _give_up(self) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def outlive_readers() -> None:
    """Wrap this process's stdout and stderr in `Lasting`, if they are not wrapped yet."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, Lasting):
            setattr(sys, name, Lasting(stream))


def log_of(out: Path, rank: int) -> Path:
    """Return the path of a rank's log. out: the run's folder."""
    return out / FOLDER / f"rank-{rank}.log"


@dataclass
class Log:
    """A rank's log of one attempt (start of its process). kept: whether the attempt's lines stay in the file after its end."""

    kept: bool = True


@contextlib.contextmanager
def logged(path: Path) -> Iterator[Log]:
    """Within the context, append to the file `path`: a line that names this process, the process's output, an exception that ends the
    process, and Python's stack at a crash. A terminal's stdout is left out, because the live display repaints it. If the file cannot be
    opened, nothing is logged. After BadInput, and if `Log.kept` is False at the end, the appended text is removed, because nothing was
    trained."""
    outlive_readers()
    log = Log()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError:
        yield log
        return
    streams: list[Any] = [sys.stderr] if sys.stdout.isatty() else [sys.stdout, sys.stderr]
    crashes, before = not faulthandler.is_enabled(), os.fstat(file).st_size
    with contextlib.suppress(OSError):
        os.write(file, f"{_BEGIN}{os.getpid()} on {platform.node()}, {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
    for stream in streams:
        stream.log = file
    if crashes:
        faulthandler.enable(file)
    try:
        yield log
    except BadInput:
        log.kept = False
        raise
    except BaseException:
        with contextlib.suppress(OSError):
            os.write(file, traceback.format_exc().encode(errors="backslashreplace"))
        raise
    finally:
        if not log.kept:
            with contextlib.suppress(OSError):
                os.ftruncate(file, before)
                if not before:
                    path.unlink()
                    path.parent.rmdir()
        for stream in streams:
            stream.log = None
        if crashes:
            faulthandler.disable()
        os.close(file)


def last_line(path: Path) -> str:
    """Return the last non-empty line of a log, without control characters and cut after _END_LETTERS letters. Return "" if the last attempt
    wrote no line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _END_BYTES))
            lines = file.read(_END_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return ""
    last = next(("".join(filter(str.isprintable, line)).strip() for line in reversed(lines) if line.strip()), "")
    if last.startswith(_BEGIN):
        return ""
    return last if len(last) <= _END_LETTERS else last[:_END_LETTERS] + " ..."
