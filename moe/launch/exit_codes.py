"""What the command and its ranks end with: every exit code of the project, here and nowhere else.

A shell gives 128 + n for a signal n; `STOPPED` is sysexits' EX_TEMPFAIL, which batch systems take for "try again".
"""

from __future__ import annotations

DONE = 0
FAILED = 1  # an error, a layout or a measurement that is not what it should be
BAD_INPUT = 2  # one line said what to change
STOPPED = 75  # a signal came, and the checkpoint is saved: start it again and it goes on
INTERRUPTED = 130  # Ctrl-C where nothing is saved
TERMINATED = 143  # SIGTERM, likewise


def of(passed: bool) -> int:
    """For a verb that checks something."""
    return DONE if passed else FAILED
