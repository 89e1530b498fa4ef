"""The exit codes of `moe` and its ranks.

A shell reports 128 + n for signal n. `STOPPED` is sysexits' EX_TEMPFAIL, which batch systems understand as "try again".
"""

from __future__ import annotations

DONE = 0
FAILED = 1  # an error, or a layout or measurement that failed its check
BAD_INPUT = 2  # wrong input; an error message of one line says what to change
STOPPED = 75  # stopped by a signal; a checkpoint is saved, so the same command resumes
INTERRUPTED = 130  # Ctrl-C before anything was saved
TERMINATED = 143  # SIGTERM to a command that has nothing to save


def of(passed: bool) -> int:
    """Return the exit code of a command that checks something: DONE if the check passed, otherwise FAILED."""
    return DONE if passed else FAILED
