"""Counts repeated steps: a resumed run repeats the steps after its checkpoint that an earlier attempt had already made.

    metrics.jsonl ... step 40 (saved), 41, 42, 43 | resumed at 40: steps 41 to 43 are made again

Each event `resumed` in metrics.jsonl has the number of repeated steps, and `so_far`: totals since the run's first start. The summary has
the last totals. Restarts by the user, `moe train --restarts`, torchrun or SLURM all count, even before the first save.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from moe.records.metrics import METRICS, first_time, latest_lines

NOTHING = {"resumes": 0, "restarts": 0, "steps": 0, "seconds": 0.0}  # totals of a run that was never resumed
_RESTART = "MOE_RESTART"  # environment variable "NUMBER SINCE WHY" that `moe train --restarts` sets for its ranks (see `Restart`)
_TORCHRUN = "TORCHELASTIC_RESTART_COUNT"


@dataclass(frozen=True)
class Restart:
    """An automatic restart. number: 1 for the first restart. why: the error that ended the previous attempt. since: Unix time at which the
    process that restarts the ranks began."""

    number: int
    why: str = ""
    since: float = 0.0

    def variables(self) -> dict[str, str]:
        """Return the environment variable from which `of` reads this restart in the ranks."""
        return {_RESTART: f"{self.number} {self.since:.2f} {self.why}"}

    @staticmethod
    def of(environment: Mapping[str, str]) -> Restart | None:
        """Read the restart from the variables of `moe train` or torchrun (which gives no reason). Return None if this is not a restart."""
        if _RESTART in environment:
            number, since, why = [*environment[_RESTART].split(" ", 2), "", ""][:3]
            return Restart(int(number), why, float(since))
        number = environment.get(_TORCHRUN, "0")
        return Restart(int(number), since=_parent_began()) if number.isdecimal() and int(number) > 0 else None

    def continues(self, out: Path) -> bool:
        """Return whether the restarted run is the run in folder `out`: True if the folder's first record was written at `since` or later;
        an older record is from another run. True also without a record, because the previous attempt may have ended before its first."""
        first = first_time(out / METRICS)
        return first is None or first >= self.since


def _parent_began() -> float:
    try:
        return psutil.Process(os.getppid()).create_time()
    except psutil.Error:  # the parent has just ended, so this process will end soon too
        return 0.0


def going_on(out: Path, step: int, restart: Restart | None) -> dict[str, Any]:
    """Return fields for the event `resumed`: number and seconds of the recorded steps after `step`, which will be repeated, and new totals.
    Call it before `cut_after`, which removes these steps. restart: None if neither `moe train --restarts` nor torchrun resumed the run."""
    lines = latest_lines(out / METRICS, step, key="so_far")
    gone = [line.get("step_seconds") or 0.0 for line in lines if line.get("kind") == "train" and line["step"] > step]
    before = sums(lines)
    more = {"resumes": 1, "restarts": int(restart is not None), "steps": len(gone), "seconds": sum(gone)}
    so_far = {name: before[name] + added for name, added in more.items()}
    about = {} if restart is None else {"restart": restart.number} | ({"why": restart.why} if restart.why else {})
    return about | {"redone_steps": len(gone), "redone_seconds": sum(gone), "so_far": so_far}


def sums(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the latest totals in `lines`: numbers of `resumes`, automatic `restarts`, repeated `steps`, and the `seconds` of these
    steps."""
    return NOTHING | next((dict(line["so_far"]) for line in reversed(list(lines)) if line.get("so_far")), {})
