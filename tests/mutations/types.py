"""`python -m tests.mutations --types`: how many of the faults `moe verify --types` finds, which has no twin and expects no numbers.

All faults with a layout are run; those that a test finds have none. Layouts without a fault run first and must pass.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from moe.records.results import write_json
from moe.verify.cases import Case
from moe.verify.types import checked
from moe.verify.verify import Say
from tests.mutations.mutation import Mutation, applied


def main(chosen: list[Mutation], *, json: str | None, say: Say) -> int:
    """Print a line for each fault that has a layout, and the number that is found. Return 1 if a layout without a fault fails, or if less
    than half of all faults are found."""
    started, rows = time.perf_counter(), list[dict[str, Any]]()
    with_layouts = [(m, m.case) for m in chosen if isinstance(m.case, Case)]
    controls = dict.fromkeys(case for _, case in with_layouts)
    for world in sorted({case.world for case in controls}):
        for row in checked([case for case in controls if case.world == world], world):
            rows.append({"mutation": "none"} | row)
            say(_text("control", row, "pass" if row["passed"] else "FAIL"))
    silent = sum(row["passed"] for row in rows)
    found = 0
    for mutation, case in with_layouts:
        called = mutation.not_called()
        (row,) = checked([case], case.world, inside=partial(applied, mutation, called))
        caught = not row["passed"] and "error" not in row and bool(called.all())
        found += caught
        rows.append(row | {"mutation": mutation.name, "passed": caught})
        say(_text(mutation.name, row, "found" if caught else "not found"))
    say(f"{found} of {len(chosen)} faults found without numbers; {len(chosen) - len(with_layouts)} have no layout")
    say(f"{silent} of {len(controls)} layouts without a fault pass, in {time.perf_counter() - started:.0f} s")
    if json:
        write_json(json, verb="mutations types", rows=rows, found=found, concerned=len(with_layouts), all=len(chosen))
    return int(silent < len(controls) or 2 * found < len(chosen))


def _text(name: str, row: dict[str, Any], verdict: str) -> str:
    first = row["broken"][-1 if "error" in row else 0] if row["broken"] else ""
    return f"{name:<40} {row['layout']:<44} {verdict:<10} {first[:160]}"
