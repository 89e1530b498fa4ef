"""Finds the processes of a launch, sends them signals, notices when they end, and kills them.

    moe train (this process) -> launcher -> (second launcher) -> ranks -> their child processes

Launchers do not forward all signals and exit codes, so `moe train` finds the ranks itself. All processes of a launch have the same value of
TOKEN in their environment, even if their parent has died. Ranks that a quick restart forks (moe/launch/ready.py) have the value of the
process that forks them. A process is a rank if it has the variable RANK and its parent does not.
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
PARENT = "MOE_LAUNCH_PARENT"  # process id of the launch's `moe train`
STDIN = "MOE_LAUNCH_STDIN"  # set if this process's stdin is a pipe from `moe train`, possibly on another machine
_NAMED = "moe rank "  # beginning of a forked rank's process name; the rank's number follows
_LAUNCHERS = (TOKEN, "TORCHELASTIC_RUN_ID", "CROSS_RANK")  # variables set by `moe train`, torchrun and DeepSpeed's launcher


def own_launch() -> str:
    """Return the token of the launch to which this process belongs; "" without a launch."""
    return os.environ.get(TOKEN, "")


def die_with_parent() -> None:
    """On Linux, arrange that this rank is killed when its launcher dies, or the `moe train` that started the launcher. Also make Ctrl-C end
    the rank without a traceback until training begins. Do nothing for a rank without a launcher: it may outlive the shell that started it
    (nohup)."""
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
    """Wait until process `pid`, the `moe train` of this launch, ends; then kill this process, a rank. Without this, launchers and
    their ranks would outlive `moe train`."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    except OSError:  # the kernel is older than 5.3 and has no pidfd
        return
    select.select([handle], [], [])
    os.kill(os.getpid(), signal.SIGKILL)


def die_with_input(end: Callable[[], None]) -> None:
    """Call `end` when stdin is closed, which means that `moe train`, at the other end of the pipe, has died or is disconnected."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 1):
                pass
            end()

    threading.Thread(target=wait, daemon=True, name="die-with-input").start()


@dataclass
class Rank:
    """The process of one rank, as `moe train` observes it.
    pid: process id; 0 if the process is on another machine, where it cannot be observed. ended_at: time (time.monotonic) at which its end
    was noticed. code: exit code (negative: a signal); None if it runs, or if its launcher had already collected the code (waitpid).
    handle: its pidfd, while it is open."""

    rank: int
    pid: int
    ended_at: float | None = None
    code: int | None = None
    handle: int | None = None

    def look(self) -> None:
        """Set `ended_at` and `code` if the process has ended."""
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
    """Wait until a rank ends, at most `wait_s` seconds, then `look` at all ranks without delay: a rank's exit code can only be read
    until its launcher, the parent process, calls waitpid."""
    for rank in ranks:
        if rank.pid and rank.handle is None and rank.ended_at is None and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):  # the rank has ended, or the kernel has no pidfd
                rank.handle = os.pidfd_open(rank.pid)
    select.select([rank.handle for rank in ranks if rank.handle is not None], [], [], wait_s)
    for rank in ranks:
        rank.look()


def find_ranks(ancestor: int) -> list[Rank]:
    """Return the ranks among the descendants of process `ancestor`, in order of rank."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return _ranks({p.pid: _environment(p) | _named(p) for p in psutil.Process(ancestor).children(recursive=True)})
    return []


def ranks_of(token: str) -> list[Rank]:
    """Return the ranks of the launch `token` on this machine, in order of rank."""
    environments = {process.pid: _environment(process) for process in psutil.process_iter()}
    return _ranks({pid: found for pid, found in environments.items() if found.get(TOKEN) == token})


def name_rank(rank: int) -> None:
    """Write a forked rank's number into the name of its process, where `find_ranks` reads it. Other processes cannot read its variable
    RANK, because /proc/PID/environ of a fork shows the parent's environment."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/comm").write_text(f"{_NAMED}{rank}")


def _named(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.Error):
        name: str = process.name()
        return {"RANK": name.removeprefix(_NAMED)} if name.startswith(_NAMED) else {}
    return {}


def _ranks(family: Mapping[int, Mapping[str, str]]) -> list[Rank]:
    """Return the ranks among the processes `family`, {pid: environment}, in order of rank. A process is a rank if it has the variable RANK
    and its parent does not."""
    found = []
    for pid, environment in family.items():
        rank = environment.get("RANK", "")
        with contextlib.suppress(psutil.Error):
            if rank.isdigit() and "RANK" not in family.get(psutil.Process(pid).ppid(), {}):
                found.append(Rank(int(rank), pid))
    return sorted(found, key=lambda r: r.rank)


def send(ranks: list[Rank], number: int) -> int:
    """Send the signal `number` to all ranks that are alive. Return the number of ranks that got it."""
    sent = 0
    for rank in ranks:
        rank.look()
        if rank.ended_at is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)
                sent += 1
    return sent


def kill_all(session: int | None, *tokens: str, spared: int | None = None) -> list[int]:
    """Kill all processes that have one of `tokens` in their environment (TOKEN), and all in the session with the id `session` (None: no
    session), except process `spared`. SIGKILL is repeated until none is alive, at most 10 seconds. Return the ids of processes that
    are still alive, because they are stuck in the kernel."""
    until = time.monotonic() + 10
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
    """Return (state in /proc, exit code) of process `pid`. "Z": it has ended, but its parent has not collected its exit code. "X": it does
    not exist. Any other state: it is alive. The exit code is None unless the state is "Z"."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError):
        return ("R" if not sys.platform.startswith("linux") and psutil.pid_exists(pid) else "X"), None
    if fields[0] != "Z":
        return fields[0], None
    return "Z", os.waitstatus_to_exitcode(int(fields[-1]))
