"""`moe train --restarts N`: if a rank dies, all ranks are ended and started again from the newest checkpoint.

A run gives up after N restarts in a row without a new checkpoint. A new checkpoint resets the count, so a long run survives any number of
faults, and a run that never saves ends soon. (torchrun counts all restarts of a run.) The first restart after a checkpoint is immediate;
further ones wait 1, 2, 4, ... seconds, at most a minute. A run is not restarted after bad input (exit code 2), a user's signal, or lack of
memory. It is not restarted either if no rank of the first attempt started, if a process cannot be killed, or if the same Python error
recurs before a new checkpoint.

With `--elastic MIN`, a run does not end after N restarts or a recurring error: it continues with fewer processes, at least MIN
(moe/launch/elastic.py), and the count restarts at 0. The GPU of the rank that died first in most attempts since the last checkpoint is then
left out.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe.launch.early import NOTHING_LOST
from moe.launch.exit_codes import FAILED, STOPPED
from moe.launch.status import TOO_EARLY
from moe.records.redone import Restart
from parallel.errors import counted
from parallel.store.files import step_of

_LONGEST_S = 60.0  # longest wait before a restart
_POLL_S = 0.1


@dataclass(frozen=True)
class End:
    """How one attempt of a run ended.
    code: exit code. lines: lines that were printed about the end. statuses: rank -> contents of its status file (moe/launch/status.py).
    began: whether any rank had started. stuck: whether a process could not be killed. first: the rank that died first, or for which the
    others waited; None if unknown."""

    code: int
    lines: Sequence[str]
    statuses: Mapping[int, Mapping[str, Any]]
    began: bool = True
    stuck: bool = False
    first: int | None = None


class Restarts:
    """Decides after each attempt of the run in folder `out` whether it is restarted, from which checkpoint, and on how many processes.
    limit: N of --restarts; 0: never. fresh, from_step: flags of the run. smaller: numbers of processes for --elastic, largest first.
    processes: number of processes of the next attempt; None: as in the first. gone: if `processes` has just changed, the rank that died
    first in most attempts, and whose GPU is no longer used; None otherwise, or if this rank is unknown."""

    def __init__(self, out: Path, *, limit: int, fresh: bool, from_step: int | None = None, smaller: Sequence[int] = ()) -> None:
        self._checkpoints, self._limit = out / "checkpoints", limit
        self._old = _inode(self._checkpoints) if fresh else None  # inode of the earlier checkpoints' folder, which --fresh renames
        self._fresh, self._from_step = fresh, from_step
        self._newest = self._first_newest = _newest(self._checkpoints)
        self._count = self._in_a_row = 0  # number of restarts: all, and since the last new checkpoint
        self._since = time.time()
        self._said: tuple[str, ...] = ()  # errors of the last attempt's ranks
        self._wait_s = 0.0
        self._why = ""
        self._smaller = list(smaller)
        self._shrunk_for: tuple[str, ...] = ()  # recurring errors after which the number of processes was reduced: once for each error
        self._first: Counter[int] = Counter()  # rank -> number of attempts in which it died first, since the last checkpoint
        self.processes: int | None = None
        self.gone: int | None = None

    def fresh(self) -> bool:
        """Return whether the next attempt gets --fresh. Once an attempt has set the earlier checkpoints aside, later attempts do not get
        it, and the run continues from its own checkpoints."""
        return self._fresh and (self._count == 0 or (self._old is not None and _inode(self._checkpoints) == self._old))

    def from_step(self) -> int | None:
        """Return --from_step for the next attempt; None if an attempt has saved, because the run then resumes from that checkpoint."""
        return self._from_step if self._count == 0 or _newest(self._checkpoints) == self._first_newest else None

    def variables(self) -> dict[str, str]:
        """Return environment variables for the next attempt's ranks: the restart's number and reason, and the time at which this launcher
        began. {} for the first attempt."""
        return Restart(self._count, self._why, self._since).variables() if self._count else {}

    def saved(self) -> bool:
        """Return whether the present attempt has saved a checkpoint."""
        newest = _newest(self._checkpoints)
        return newest is not None and newest != self._newest

    def after(self, end: End) -> int | None:
        """Decide after an attempt. Return the exit code if the run ends, None if it is restarted. With --restarts, print the decision."""
        if end.code != FAILED or not self._limit:
            return end.code
        newest, saved = _newest(self._checkpoints), self.saved()
        said = tuple(sorted({str(status.get("error")) for status in end.statuses.values() if not status.get("of_all")}))
        all_wrote = bool(end.statuses) and all("pid" in status for status in end.statuses.values())
        if saved:
            self._first.clear()
        self._first.update([] if end.first is None else [end.first])
        reason, fewer = None, False
        if not end.began and not self._count:
            reason = "no rank had started"
        elif end.stuck:
            reason = "a process of the last attempt could not be killed"
        elif any(status.get("error") == TOO_EARLY for status in end.statuses.values()):
            reason = "a signal ended a rank before training"
        elif any(status.get("repeats") for status in end.statuses.values()):
            reason = "memory would run out again"
        elif not saved and all_wrote and said and said == self._said:
            reason = f"the same error came again before a new checkpoint: {said[0]}"
            fewer, self._shrunk_for = said != self._shrunk_for, said
        elif not saved and self._in_a_row >= self._limit:
            reason = f"{counted(self._limit, 'restart')} in a row (--restarts {self._limit}) brought no new checkpoint"
            fewer = True
        self.gone = None
        if fewer and self._smaller:
            self._shrink(str(reason))
        elif reason is not None:
            _say(f"not started again: {reason}" + (", and --elastic allows no fewer processes" if fewer and self.processes else ""))
            return end.code
        self._in_a_row = 0 if saved else self._in_a_row
        self._wait_s = min(_LONGEST_S, 2.0 ** (self._in_a_row - 1)) if self._in_a_row > 0 else 0.0
        self._in_a_row, self._count = self._in_a_row + 1, self._count + 1
        self._newest, self._said, self._why = newest, said, end.lines[0] if end.lines else ""
        where = "its beginning" if newest is None or self.fresh() else newest[0]
        after = f" in {self._wait_s:g} s" if self._wait_s else ""
        row = f", {self._in_a_row} of {self._limit} in a row without a new checkpoint" if not saved and self._in_a_row else ""
        on = "" if self.processes is None else f" on {counted(self.processes, 'process')}"
        _say(f"restart {self._count}{row}: the run continues from {where}{on}{after}")
        return None

    def _shrink(self, reason: str) -> None:
        self.processes, self._in_a_row = self._smaller.pop(0), -1
        self.gone = max(self._first, key=self._first.__getitem__, default=None)
        self._first.clear()
        who = "a rank" if self.gone is None else f"rank {self.gone}"
        _say(f"{who} is no longer used: {reason}")

    def wait(self, caught: Sequence[object]) -> bool:
        """Wait before the next attempt, and return True. If a signal comes meanwhile (`caught` is not empty), print a line and return
        False."""
        until = time.monotonic() + self._wait_s
        while not caught and time.monotonic() < until:
            time.sleep(_POLL_S)
        if caught:
            _say(f"not started again: a signal came first, and {NOTHING_LOST} (exit code {STOPPED} unless it was Ctrl-C)")
        return not caught


def _newest(checkpoints: Path) -> tuple[str, int] | None:
    """Return (name, inode) of the newest complete checkpoint, or None. The inode changes if the same step is saved again."""
    try:
        found = [(step, path) for path in checkpoints.iterdir() if (step := step_of(path.name)) is not None and path.is_dir()]
        _, newest = max(found, default=(None, None))
        return None if newest is None else (newest.name, newest.stat().st_ino)
    except OSError:
        return None


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
