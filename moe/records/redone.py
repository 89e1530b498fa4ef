"""What a run had to do again: going on from a checkpoint throws away the steps that were made after it.

    metrics.jsonl ... step 40 (saved), 41, 42, 43 | resumed at 40: steps 41 to 43 are made again

Each event `resumed` says how much, and carries the sums so far; the last one's are the summary's. Whoever started the run again counts:
its user, `moe train --restarts`, torchrun or SLURM.

A run that is started again before anything was saved goes on from its own records, with all their steps made again. Records that are older
than whatever starts the ranks are those of an earlier run in the folder, and are kept as such: the lives before have not come to theirs.
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
    """That a run was started again without its user: the how manyeth time (from 1), and what ended it before. `since`: when what starts
    the ranks began, in Unix seconds."""

    number: int
    why: str = ""
    since: float = 0.0

    def variables(self) -> dict[str, str]:
        """The environment by which ranks learn of it."""
        return {_RESTART: f"{self.number} {self.since:.2f} {self.why}"}

    @staticmethod
    def of(environment: Mapping[str, str]) -> Restart | None:
        """From this project's parent, or from torchrun, which does not say why; None in a run's first start."""
        if _RESTART in environment:
            number, since, why = [*environment[_RESTART].split(" ", 2), "", ""][:3]
            return Restart(int(number), why, float(since))
        number = environment.get(_TORCHRUN, "0")
        return Restart(int(number), since=_parent_began()) if number.isdecimal() and int(number) > 0 else None

    def has_records(self, out: Path) -> bool:
        """Whether the records in `out` are of this run's earlier lives, or there are none."""
        first = first_time(out / METRICS)
        return first is None or first >= self.since


def _parent_began() -> float:
    try:
        return psutil.Process(os.getppid()).create_time()
    except psutil.Error:  # it has just ended, and this process will
        return 0.0


def going_on(out: Path, step: int, restart: Restart | None) -> dict[str, Any]:
    """The fields of the event `resumed` for a run that goes on from `step`, read before the lines after that step are removed."""
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
    """`resumes`, `restarts` (of these, without the user), `steps` made again and their `seconds`: as the last event has them."""
    return NOTHING | next((dict(line["so_far"]) for line in reversed(list(lines)) if line.get("so_far")), {})
