"""Repeated work of a run: a resume discards the steps made after the checkpoint, and they are made again.

    metrics.jsonl ... step 40 (saved), 41, 42, 43 | resumed at 40: steps 41 to 43 are made again

Each event `resumed` records the repeated steps, and the sums so far; the summary has the sums of the last one. Every restart counts: by the
user, `moe train --restarts`, torchrun or SLURM.

A run that restarts before its first save continues its own records, and makes all their steps again. Records that are older than the
process that starts the ranks belong to an earlier run in the folder. They are kept as that run's, because this run's earlier attempts wrote
none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moe.records.metrics import METRICS, first_time, latest_lines

NOTHING = {"resumes": 0, "restarts": 0, "steps": 0, "seconds": 0.0}
_RESTART = "MOE_RESTART"  # "NUMBER SINCE WHY", from `moe train --restarts` to its ranks
_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Restart:
    """A restart without the user. `number`: counted from 1. `why`: the error that ended the last attempt. `since`: start time of the
    process that starts the ranks, in Unix seconds."""

    number: int
    why: str = ""
    since: float = 0.0

    def variables(self) -> dict[str, str]:
        """Return the environment variables that tell ranks of the restart."""
        return {_RESTART: f"{self.number} {self.since:.2f} {self.why}"}

    @staticmethod
    def of(environment: Mapping[str, str]) -> Restart | None:
        """Read the restart from this project's parent, or from torchrun, which gives no reason; None in a run's first start."""
        if _RESTART in environment:
            number, since, why = [*environment[_RESTART].split(" ", 2), "", ""][:3]
            return Restart(int(number), why, float(since))
        number = environment.get(_TORCHRUN, "0")
        return Restart(int(number), since=_parent_began()) if number.isdecimal() and int(number) > 0 else None

    def has_records(self, out: Path) -> bool:
        """Return whether the records in `out` are from this run's earlier attempts, or do not exist."""
        first = first_time(out / METRICS)
        return first is None or first >= self.since


def _parent_began() -> float:
    try:
        return psutil.Process(os.getppid()).create_time()
    except psutil.Error:  # the parent has just ended, and this process will end soon
        return 0.0


def going_on(out: Path, step: int, restart: Restart | None) -> dict[str, Any]:
    """Return the fields of the event `resumed` for a run resumed at `step`. Call it before the lines after that step are removed."""
    lines = latest_lines(out / METRICS, step, key="so_far")
    gone = [line.get("step_seconds") or 0.0 for line in lines if line.get("kind") == "train" and line["step"] > step]
    before = sums(lines)
    so_far = {
        "resumes": before["resumes"] + 1,
        "restarts": before["restarts"] + (restart is not None),
        "steps": before["steps"] + len(gone),
        "seconds": before["seconds"] + sum(gone),
    }
    about = {} if restart is None else {"restart": restart.number} | ({"why": restart.why} if restart.why else {})
    return about | {"redone_steps": len(gone), "redone_seconds": sum(gone), "so_far": so_far}


def sums(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the last event's sums: `resumes`, `restarts` (resumes without the user), `steps` made again and their `seconds`."""
    return NOTHING | next((dict(line["so_far"]) for line in reversed(list(lines)) if line.get("so_far")), {})
