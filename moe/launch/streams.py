"""Discards output that cannot be written, so that the run continues, for example after Ctrl-C has ended tee in `moe train ... | tee log`,
or a terminal was closed."""

from __future__ import annotations

import os
import sys
from typing import Any


class Lasting:
    """Wraps a text stream so that writing never fails: after the first error, its file descriptor is redirected to the null device."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
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
