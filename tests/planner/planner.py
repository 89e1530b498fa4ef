"""The planner against measurements: predicted memory (memory.py) and time (choice.py).

    python -m tests.planner tables      published measurements (tests/planner/tables/); another folder of CSV files with --folder
    python -m tests.planner ranges      the range of each prediction, from tables left out (ranges.py)
    python -m tests.planner runs        a small recipe under each sharding.kind on this machine, against torch's bytes (runs.py)
    python -m tests.planner published   layouts of well-known runs (published.py)
    python -m tests.planner cards       the fastest plans of well-known models on 1, 8 and 64 H100 (cards.py)
    python -m tests.planner speed       the seconds that planning these takes (speed.py)
    python -m tests.planner orders      searched orders of actions against the zero-bubble paper's (orders.py)
    python -m tests.planner best        plans of random recipes that are faster than the first plan (best.py)
    python -m tests.planner steps       steps and memory of this project's trainer on this machine (steps.py)

Unusable rows of a table are counted by reason. A table that lacks columns is printed with their names.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import tyro

from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.errors import BadInput
from tests.planner import best as planner_best
from tests.planner import cards as planner_cards
from tests.planner import choice as planner_choice
from tests.planner import memory as planner_memory
from tests.planner import orders as planner_orders
from tests.planner import published as planner_published
from tests.planner import ranges as planner_ranges
from tests.planner import speed as planner_speed
from tests.planner.read_tables import Table, read_folder

Part = Literal["runs", "tables", "ranges", "published", "cards", "speed", "orders", "best"]
READ_BY: dict[str, tuple[Part, ...]] = {"folder": ("tables", "ranges"), "only": ("runs", "speed")}
TABLES = Path(__file__).resolve().parent / "tables"
HEAD = f"{'table':<42}{'rows':>6}{'memory of':>11}{'kind':>12}{'median':>9}{'p90':>9}{'fits':>12}{'no memory':>11}{'formula':>9}"


def main(part: tyro.conf.Positional[Part] = "runs", *, folder: str | None = None, only: str | None = None, json: str | None = None) -> int:
    """Run one `part` (top of this file). Returns 1 if a row fails: a formula that is not met, a run that differs by more than a tenth.
    folder: other tables. only: runs with this text in their name. json: file for the rows. Raises BadInput for a flag that `part` does not
    read."""
    for flag, value in (("folder", folder), ("only", only)):
        if value is not None and part not in READ_BY[flag]:
            raise BadInput(f"--{flag}", got=f"{value} with {part}", needed=f"the part {' or '.join(READ_BY[flag])}", fix=f"remove --{flag}")
    parts: dict[Part, Callable[[], list[dict[str, Any]]]] = {
        "runs": lambda: _runs(only),
        "tables": lambda: table_rows(folder or TABLES),
        "ranges": lambda: planner_ranges.rows(read_folder(folder or TABLES)),
        "published": planner_published.rows,
        "cards": planner_cards.rows,
        "speed": lambda: planner_speed.rows(only),
        "orders": planner_orders.rows,
        "best": planner_best.rows,
    }
    rows = parts[part]()
    if json:
        write_json(json, verb="planner", rows=rows)
    return exit_codes.of(all(row["passed"] for row in rows))


def _runs(only: str | None) -> list[dict[str, Any]]:
    from tests.planner import runs as planner_runs  # imported here, because it imports torch, which tables do not need

    return planner_runs.rows(only)


def table_rows(tables: str | Path) -> list[dict[str, Any]]:
    """Print and return a row for each table of the folder. Raises BadInput for a folder without tables."""
    read = read_folder(tables)
    print(HEAD)
    rows = []
    for table in read:
        formula = planner_memory.zero_table(Path(tables).expanduser() / f"{table.name}.csv") if table.missing else None
        if not table.missing or formula:
            rows.append(row_of(table, formula))
            print(_line(rows[-1]), flush=True)
    print("", *planner_choice.time_lines(read), sep="\n", flush=True)
    _say_unusable(read)
    return rows


def row_of(table: Table, formula: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return one table's row of the JSON. formula: the numbers of `zero_table`, for the ZeRO paper's table."""
    row: dict[str, Any] = {"table": table.name, "rows": len(table.rows), "unusable": dict(table.reasons())}
    row |= planner_choice.summary(table.rows)
    row |= planner_memory.summary(table.rows) | (formula or planner_memory.formulas(table.rows))
    row["passed"] = row["formula_right"] == row["formula_total"]
    return row


def _line(row: dict[str, Any]) -> str:
    errors = "".join(f"{'' if row[name] is None else f'{row[name]:.2%}':>9}" for name in ("memory_error_median", "memory_error_p90"))
    shares = "".join(f"{_share(row, name):>{width}}" for name, width in (("fits", 12), ("out_of_memory", 11), ("formula", 9)))
    return f"{row['table']:<42}{row['rows']:>6}{row['memory_rows'] or '':>11}{row['memory_kind'] or '':>12}{errors}{shares}"


def _share(row: dict[str, Any], name: str) -> str:
    right, total = row[f"{name}_right"], row[f"{name}_total"]
    return f"{right}/{total}" if total else ""


def _say_unusable(read: tuple[Table, ...]) -> None:
    print()
    for table in read:
        for reason, count in table.reasons().most_common():
            print(f"{table.name}: {count} rows not used: {reason}")
    for table in read:
        if table.missing:
            print(f"{table.name}: another table, without {', '.join(table.missing[:4])}{' ...' if len(table.missing) > 4 else ''}")
