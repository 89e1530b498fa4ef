"""The processes of one launch: find them, signal them, notice their deaths, and end every one of them.

    moe train (this process) -> launcher -> (second launcher) -> ranks -> their child processes

Launchers lose signals and exit codes, so ranks are looked up directly. Every process of a launch carries the same TOKEN in its environment,
and keeps it when its parent dies or when it leaves the session. A rank is the topmost process with a RANK.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from parallel.process.libc import die_with

TOKEN = "MOE_LAUNCH"
PARENT = "MOE_LAUNCH_PARENT"
STDIN = "MOE_LAUNCH_STDIN"  # set if this process's input ends with `moe train`, on any machine
_NAMED = "moe rank "
_LAUNCHERS = (TOKEN, "TORCHELASTIC_RUN_ID", "CROSS_RANK")  # set only by our parent, torchrun or DeepSpeed's launcher


def own_launch() -> str:
    """Return the token of this process's launch; empty if there is none."""
    return os.environ.get(TOKEN, "")


def die_with_parent() -> None:
    """Have this rank killed when its launcher dies, or the `moe train` process above it (Linux).

    An early Ctrl-C also ends it, without a traceback, until training catches signals. Does nothing in a process without a launcher: its
    parent is a shell, and the run may outlive that (nohup).
    """
    if not any(name in os.environ for name in _LAUNCHERS):
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    if not sys.platform.startswith("linux"):
        return
    die_with(os.getppid())
    if STDIN in os.environ:
        die_with_input(lambda: os.kill(os.getpid(), signal.SIGKILL))
    ancestor = os.environ.get(PARENT, "")
    if ancestor.isdigit():
        threading.Thread(target=_die_with, args=(int(ancestor),), daemon=True, name="die-with-parent").start()


def _die_with(pid: int) -> None:
    """Wait in the kernel until `pid` has ended, then end this process. Launchers between the two do not pass a death on."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # an older kernel without pidfd
        return
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_input(end: Callable[[], None]) -> None:
    """Call `end` at end of file on this process's input: `moe train`, or the connection to it, is gone. No process writes to that input."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
            end()

    threading.Thread(target=wait, daemon=True, name="die-with-input").start()


@dataclass
class Rank:
    """One rank as seen by its ancestor. `code`: its exit code (negative: a signal), if it was read before the process was reaped.

    `pid` is 0 for a rank on another machine, which cannot be observed here.
    """

    rank: int
    pid: int
    ended_at: float | None = None
    code: int | None = None
    handle: int | None = None

    def look(self) -> None:
        """Notice the end of this process, and read its exit code while it waits to be reaped."""
        if self.ended_at is not None or not self.pid:
            return
        state, code = _state(self.pid)
        if state in "ZX":
            self.ended_at = time.monotonic()
            self.code = code
            if self.handle is not None:
                os.close(self.handle)
                self.handle = None


def wait(ranks: list[Rank], wait_s: float) -> None:
    """Sleep, but wake when a rank ends: its exit code can be read only until its launcher reaps it."""
    for rank in ranks:
        if rank.pid and rank.handle is None and rank.ended_at is None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # the rank has ended, or the kernel is older
                rank.handle = os.pidfd_open(rank.pid)
    select.select([rank.handle for rank in ranks if rank.handle is not None], [], [], wait_s)
    for rank in ranks:
        rank.look()


def find_ranks(ancestor: int) -> list[Rank]:
    """Return the ranks among the descendants of a launcher, in order of rank."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return _ranks({p.pid: _environment(p) | _named(p) for p in psutil.Process(ancestor).children(recursive=True)})
    return []


def ranks_of(token: str) -> list[Rank]:
    """Return the ranks of a launch on this machine, in order of rank."""
    environments = {process.pid: _environment(process) for process in psutil.process_iter()}
    return _ranks({pid: found for pid, found in environments.items() if found.get(TOKEN) == token})


def name_rank(rank: int) -> None:
    """Name the process of a forked rank. The system still shows its environment as its parent's."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/comm").write_text(f"{_NAMED}{rank}")


def _named(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        name: str = process.name()
        return {"RANK": name.removeprefix(_NAMED)} if name.startswith(_NAMED) else {}
    return {}


def _ranks(family: Mapping[int, Mapping[str, str]]) -> list[Rank]:
    """Return the ranks: processes with a RANK and parents without one."""
    found = []
    for pid, environment in family.items():
        rank = environment.get("RANK", "")
        with contextlib.suppress(psutil.Error):
            if rank.isdigit() and "RANK" not in family.get(psutil.Process(pid).ppid(), {}):
                found.append(Rank(int(rank), pid))
    return sorted(found, key=lambda r: r.rank)


def send(ranks: list[Rank], number: int) -> int:
    """Send the signal to all living ranks. Returns the number that got it."""
    sent = 0
    for rank in ranks:
        rank.look()
        if rank.ended_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
                sent += 1
    return sent


def kill_all(session: int | None, *tokens: str, spared: int | None = None, wait_s: float = 10.0) -> list[int]:
    """SIGKILL every process of a launch until none is left. Returns the ids still alive after `wait_s` (stuck in the kernel).

    `session`: the launcher's session, if it runs on this machine. `spared`: a process that stays.
    """
    until = time.monotonic() + wait_s
    while True:
        if session is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(session, signal.SIGKILL)
        left = _members(session, tokens, spared)
        if not left or time.monotonic() > until:
            return left
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _members(session: int | None, tokens: Collection[str], spared: int | None) -> list[int]:
    """Return living processes in the launcher's session, or with one of the launch's tokens."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            mine = os.getsid(process.pid) == session or _environment(process).get(TOKEN) in tokens
            if mine and process.pid != spared and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        variables: dict[str, str] = process.environ()
        return variables
    except (psutil.Error, OSError):
        return {}


def _state(pid: int) -> tuple[str, int | None]:
    """Return ('R', None) for a living process, ('Z', exit code) for one that waits to be reaped, ('X', None) for one that is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return ("R" if not sys.platform.startswith("linux") and psutil.pid_exists(pid) else "X"), None
    if fields[0] != "Z":
        return fields[0], None
    return "Z", os.waitstatus_to_exitcode(int(fields[-1]))
