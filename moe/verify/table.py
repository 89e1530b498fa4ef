"""Writes the rows of `moe verify` to the file of --json every few seconds, so that --go_on can continue an interrupted run.

--go_on keeps the file's rows that passed, each with the git commit that it tested, and runs all other rows. If the file does not exist yet,
all rows are run, so scripts can always pass --go_on.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moe.records.results import write_json
from moe.verify.cases import Case
from parallel.errors import BadInput, counted
from parallel.store.files import reason

EVERY_S = 10.0  # seconds between two writes of the whole table


class Table:
    """One row for each case in `chosen`. file: path of the JSON file. go_on: keep the file's passed rows. device: value of --device, which
    must be the same in the file. Raises BadInput if --go_on cannot use the file."""

    def __init__(self, chosen: Sequence[Case], file: str | None, *, go_on: bool, device: str | None = None) -> None:
        self.chosen, self.file, self.kept, self.device = list(chosen), file, 0, device
        self.tolerances: dict[str, Any] = {}
        self.commits: set[str] = set()
        self._rows: dict[int, dict[str, Any]] = {}  # index in `chosen` -> the case's row
        self._written = time.monotonic()
        self.begun = go_on and (file is None or Path(file).exists())
        if self.begun:
            self._keep(_read(file))

    def _keep(self, before: dict[str, Any]) -> None:
        """Keep the rows of `before`, the file's table, whose cases passed. Raises BadInput if the table is of another device, or if such a
        row is of a case that is not chosen."""
        if (made := before.get("device")) != self.device:
            got, needed = f"a table of --device {made or 'none'}", f"rows of --device {self.device or 'none'}"
            raise BadInput("--go_on", got=got, needed=needed, fix="give the same --device, or another --json FILE")
        there: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in before["rows"]:
            if row["passed"]:
                there[row["case"]].append({"commit": before["commit"]} | row)
        for place, case in enumerate(self.chosen):
            if same := there[case.in_full]:
                self._rows[place] = same.pop(0)
        if others := sum(map(len, there.values())):
            got = f"{self.file} with {others} passed rows that are not part of this run"
            needed = "a run that includes these rows, because they would be lost"
            raise BadInput("--go_on", got=got, needed=needed, fix="give the same --kinds, --only and --nproc, or another --json FILE")
        self.kept, self.tolerances = len(self._rows), before["tolerances"]
        self.commits = {str(row["commit"]) for row in self._rows.values()}

    def begins(self, now: str | None) -> str:
        """Return a line for the user: how many rows are kept from the file and how many are left to run, and the commits that the kept rows
        tested, if they differ from `now`, the current commit."""
        if not self.begun:
            return f"{self.file} is not there yet: all {len(self.chosen)} rows are to be made"
        others = sorted(self.commits - {str(now)})
        made = f", made at {', '.join(others)}: they do not test later changes" if others else ""
        return f"{counted(self.kept, 'row')} kept from {self.file}{made}; {len(self.chosen) - self.kept} left"

    def left(self, world: int) -> list[Case]:
        """Return the cases of `world` processes that have no row yet."""
        return [case for place, case in enumerate(self.chosen) if case.world == world and place not in self._rows]

    def add(self, case: Case, row: dict[str, Any]) -> None:
        """Add the row of a case, and write the file unless it was written in the last EVERY_S seconds."""
        self._rows[next(place for place, one in enumerate(self.chosen) if one == case and place not in self._rows)] = row
        if time.monotonic() - self._written > EVERY_S:
            self.write()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows so far, in the order of `chosen`."""
        return [self._rows[place] for place in sorted(self._rows)]

    def write(self, **more: Any) -> None:
        """Write the file, if one was given: the rows so far, tolerances, the number of missing rows (`left`), and the entries `more`."""
        self._written, left = time.monotonic(), len(self.chosen) - len(self._rows)
        if self.file is not None:
            write_json(self.file, verb="verify", rows=self.rows, tolerances=self.tolerances, left=left, device=self.device, **more)


def _read(file: str | None) -> dict[str, Any]:
    """Return the table in the file of --json. Raises BadInput if it is not a table of `moe verify`."""
    needed, fix = "--json FILE with the table that an interrupted run has left", "--json docs/benchmarks/verify-hybrid.json"
    if file is None:
        raise BadInput("--go_on", got="no --json", needed=needed, fix=fix)
    try:
        before = json.loads(Path(file).read_text(encoding="utf-8"))
        known = before["verb"] == "verify" and {"rows", "tolerances", "commit"} <= before.keys()
        complete = known and all(isinstance(row["case"], str) and isinstance(row["passed"], bool) for row in before["rows"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BadInput("--go_on", got=f"{file}: {reason(error)}", needed=needed, fix="leave --go_on out") from None
    if not complete:
        raise BadInput("--go_on", got=f"{file}, which is not a table of moe verify", needed=needed, fix="leave --go_on out")
    return before  # type: ignore[no-any-return]
