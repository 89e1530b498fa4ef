"""Ranges of predicted step times (moe/plan/time/ranges.yaml), from tables that are left out one by one.

Each group of runs (GROUPS) has measured / predicted seconds of several tables; each table has the same weight. The range of some tables is
their 10 % to 90 % quantile, widened by a factor. The factor is the smallest, in steps of 1 %, with which WITHIN of a table's rows fall in
the range of the group's other tables, as a mean over tables. No constant of the planner is fitted again without a table: those that were
chosen with the tables in sight (docs/parallel/planner_time.md) stay.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from moe.plan.time.cost import FILE, Range, crosses_nodes
from tests.planner.read_tables import Table
from tests.planner.time import Predicted, cluster_of, predictions

WITHIN, TAIL = 0.8, 0.1
NEWER = ("h100", "h200", "h800", "b200")
# text, words in the device's name, whether data parallelism crosses nodes; a group needs three tables. The
# tables of A100 with replicas on several nodes are all of Megatron's family, so such runs take the group of all devices
GROUPS: tuple[tuple[str, tuple[str, ...], bool | None], ...] = (
    ("on A100 with replicas on one node", ("a100",), False),
    ("on H100 to B200 with replicas on several nodes", NEWER, True),
    ("on H100 to B200", NEWER, None),
    ("with replicas on several nodes", (), True),
    ("with replicas on one node", (), False),
)
HEAD = "# Measured / predicted seconds of published runs; written by `python -m tests.planner ranges`\n"


def rows(tables: Iterable[Table]) -> list[dict[str, Any]]:
    """Write the file, and print and return its groups."""
    made = [predictions(table.rows) for table in tables]
    found = [asdict(group(made, *each)) for each in GROUPS]
    FILE.write_text(HEAD + yaml.safe_dump([{**each, "devices": list(each["devices"])} for each in found], sort_keys=False, width=120))
    for each in found:
        count = f"{each['tables']} tables, {each['rows']} rows"
        print(f"{each['low']:.2f} to {each['high']:.2f}, held out {each['held_out']:.0%}, {count} {each['runs']}")
    return [{**each, "passed": each["held_out"] >= WITHIN and each["tables"] >= 3} for each in found]


def group(made: Iterable[Sequence[Predicted]], runs: str, devices: tuple[str, ...], across: bool | None) -> Range:
    """Return the range of a group. made: predictions of each table."""
    empty = Range(runs, devices, across, 0, 0, 0, 0, 0)
    tables = [[1 / one.ratio for one in table if _in(one, empty)] for table in made]
    tables = [table for table in tables if table]
    factor = next(1 + n / 100 for n in range(1000) if held_out(tables, 1 + n / 100) >= WITHIN)
    low, high = interval(tables, factor)
    share = held_out(tables, factor)
    return Range(runs, devices, across, round(low, 3), round(high, 3), round(share, 3), len(tables), sum(map(len, tables)))


def _in(one: Predicted, of: Range) -> bool:
    cluster = cluster_of(one.row)
    assert cluster is not None
    return of.holds(cluster.device.name, across=crosses_nodes(cluster, one.row.plan))


def interval(tables: Sequence[Sequence[float]], factor: float) -> tuple[float, float]:
    """Return the quantiles TAIL and 1 - TAIL of all tables, each of the same weight, divided and multiplied by `factor`."""
    weighted = sorted((ratio, 1 / len(table) / len(tables)) for table in tables for ratio in table)
    below = [sum(weight for _, weight in weighted[: n + 1]) for n in range(len(weighted))]
    low, high = (next(r for (r, _), sum_ in zip(weighted, below, strict=True) if sum_ >= at - 1e-9) for at in (TAIL, 1 - TAIL))
    return low / factor, high * factor


def held_out(tables: Sequence[Sequence[float]], factor: float) -> float:
    """Return the share of a table's ratios within the interval of the other tables, as a mean over tables."""
    shares = []
    for n, table in enumerate(tables):
        low, high = interval([*tables[:n], *tables[n + 1 :]], factor)
        shares.append(statistics.mean(low <= ratio <= high for ratio in table))
    return statistics.mean(shares)
