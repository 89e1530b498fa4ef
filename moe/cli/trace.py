"""`moe doctor --trace FOLDER`: finds the ranks that a hung run waited for, from the traces of torch's flight recorder.

Prints one line with the culprits, then a row for each waiting rank: its collective, the group, and the ranks it waits for. Raises BadInput
for a file that is not a trace.
"""

from __future__ import annotations

from typing import Any

from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.errors import plain
from parallel.store.files import user_path
from parallel.watch.flight_recorder import Diagnosis, diagnose, read_folder


def main(folder: str, *, json: str | None = None) -> int:
    """Print the line and the table; `json`: also write the rows to this file."""
    path = user_path(folder, what="--trace")
    traces = read_folder(path)
    found = diagnose(traces)
    print(line(found))
    rows = _rows(found)
    if rows:
        print(f"{'rank':>5}  {'waits at':<44} {'over':<40} for")
    for row in rows:
        print(f"{row['rank']:>5}  {row['collective'][:44]:<44} {row['group'][:40]:<40} {row['waits_for']}")
    if json is not None:
        about = {"culprits": list(found.culprits), "line": line(found), "traces": len(traces), "silent": list(found.silent)}
        write_json(json, verb="doctor", rows=[row | {"passed": True} for row in rows], **about)
    return exit_codes.DONE


def line(found: Diagnosis) -> str:
    """The finding in one line."""
    if not found.culprits:
        return plain(f"no culprit: {found.said}")
    return plain(f"rank{'s' if len(found.culprits) > 1 else ''} {' '.join(map(str, found.culprits))}: {found.said}")


def _rows(found: Diagnosis) -> list[dict[str, Any]]:
    """One row for each waiting rank: the collective in which it waits for a culprit, or else its first."""
    rows = []
    for rank in sorted({wait.rank for wait in found.waits if wait.behind}):
        waits = [wait for wait in found.waits if wait.rank == rank and wait.behind]
        wait = next((w for w in waits if set(w.behind) & set(found.culprits)), waits[0])
        rows.append(
            {
                "rank": rank,
                "collective": plain(f"{wait.call.kind} {wait.call.number}"),
                "group": plain(wait.group[1] or wait.group[0]),
                "waits_for": " ".join(map(str, wait.behind)),
            }
        )
    return rows
