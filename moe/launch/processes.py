"""The processes of one launch: found, signalled, watched as they die, and ended to the last one.

    moe train (this process) -> launcher -> (second launcher) -> ranks -> whatever they start

Launchers lose signals and exit codes, so ranks are looked up directly. Every process of a launch carries the same TOKEN in
its environment, which it keeps when its parent dies or when it leaves the session; a rank is the topmost one with a RANK.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

TOKEN = "MOE_LAUNCH"
PARENT = "MOE_LAUNCH_PARENT"
_LAUNCHERS = (TOKEN, "TORCHELASTIC_RUN_ID", "CROSS_RANK")  # what only our parent, torchrun or DeepSpeed's launcher set
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """In a rank: be killed when the launcher that started this process dies, or `moe train` above it (Linux).

    An early Ctrl-C also ends it, without a traceback, until training catches signals. Does nothing in a process that no
    launcher started: there the parent is a shell, and a run may outlive it (nohup).
    """
    if not any(name in os.environ for name in _LAUNCHERS):
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    ancestor = os.environ.get(PARENT, "")
    if ancestor.isdigit():
        threading.Thread(target=_die_with, args=(int(ancestor),), daemon=True, name="die-with-parent").start()


def _die_with(pid: int) -> None:
    """Wait in the kernel until `pid` has ended, then end this process: launchers between the two do not pass a death on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # an older kernel
        return
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Rank:
    """One rank as its ancestor sees it. `code` is its exit code (negative: a signal) where it could be read before it was reaped."""

    rank: int
    pid: int
    ended_at: float | None = None
    code: int | None = None
    handle: int | None = None

    def look(self) -> None:
        """Note the end of this process, and its exit code while it waits to be reaped."""
        if self.ended_at is not None:
            return
        state, code = _state(self.pid)
        if state in "ZX":
            self.ended_at = time.monotonic()
            self.code = code
            if self.handle is not None:
                os.close(self.handle)
                self.handle = None


def wait(ranks: list[Rank], wait_s: float) -> None:
    """Sleep, but wake as soon as a rank ends: its exit code can be read only until its launcher has asked for it."""
    for rank in ranks:
        if rank.handle is None and rank.ended_at is None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # it has ended, or an older kernel
                rank.handle = os.pidfd_open(rank.pid)
    select.select([rank.handle for rank in ranks if rank.handle is not None], [], [], wait_s)
    for rank in ranks:
        rank.look()


def find_ranks(ancestor: int) -> list[Rank]:
    """The ranks among the descendants of a launcher, by rank."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = {p.pid: _environment(p) for p in psutil.Process(ancestor).children(recursive=True)}
        for pid, environment in family.items():
            rank = environment.get("RANK", "")
            with contextlib.suppress(psutil.Error):
                if rank.isdigit() and "RANK" not in family.get(psutil.Process(pid).ppid(), {}):
                    found.append(Rank(int(rank), pid))
    return sorted(found, key=lambda r: r.rank)


def send(ranks: list[Rank], number: int) -> int:
    """The signal to every living rank at once; how many got it."""
    sent = 0
    for rank in ranks:
        rank.look()
        if rank.ended_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
                sent += 1
    return sent


def kill_all(session: int, token: str, *, wait_s: float = 10.0) -> list[int]:
    """SIGKILL every process of a launch, until none is left; the ids of those that outlived `wait_s` (stuck in the kernel)."""
    until = time.monotonic() + wait_s
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)
        left = _members(session, token)
        if not left or time.monotonic() > until:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _members(session: int, token: str) -> list[int]:
    """Living processes in the launcher's session or with the launch's token."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            mine = os.getsid(process.pid) == session or _environment(process).get(TOKEN) == token
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        variables: dict[str, str] = process.environ()
        return variables
    except (psutil.Error, OSError):
        return {}


def _state(pid: int) -> tuple[str, int | None]:
    """('R', None) of a living process, ('Z', exit code) of one that waits to be reaped, ('X', None) of one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return ("R" if not sys.platform.startswith("linux") and psutil.pid_exists(pid) else "X"), None
    if fields[0] != "Z":
        return fields[0], None
    return "Z", os.waitstatus_to_exitcode(int(fields[-1]))
