"""`moe doctor --trace FOLDER`: the ranks that a run hung at, from the traces that torch's flight recorder left.

One line with the culprits, then a row for each rank that waits: where, and for whom. Raises BadInput for what is no trace.
"""

from __future__ import annotations

from typing import Any

from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.errors import plain
from parallel.store.files import user_path
from parallel.watch.flight_recorder import Diagnosis, diagnose, read_folder


def main(folder: str, *, json: str | None = None) -> int:
    """Print the line and the table; `json`: also write the rows there."""
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
        told = {"culprits": list(found.culprits), "line": line(found), "traces": len(traces), "silent": list(found.silent)}
        write_json(json, verb="doctor", rows=[row | {"passed": True} for row in rows], **told)
    return exit_codes.DONE


def line(found: Diagnosis) -> str:
    """What is found, in one line."""
    if not found.culprits:
        return plain(f"no culprit: {found.said}")
    return plain(f"rank{'s' if len(found.culprits) > 1 else ''} {' '.join(map(str, found.culprits))}: {found.said}")


def _rows(found: Diagnosis) -> list[dict[str, Any]]:
    """Of each rank that waits for somebody, the collective in which it waits for a culprit, or else the first."""
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
