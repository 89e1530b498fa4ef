"""Fault injection into training runs: the table of all campaigns.

    python -m tests.campaigns hangs damage         kinds of faults; all of them if none is named
    python -m tests.campaigns machines:torchrun    the rows of a kind with this text in their name
    python -m tests.campaigns --full               many tries of each fault; by default one

Columns: fault, tried (number of tries), held (passed), lost (failed), seconds_median (median of the seconds from fault to end).
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import tyro

from moe.launch import exit_codes
from moe.records.results import write_json
from parallel.errors import BadInput, did_you_mean

KINDS = {
    "hangs": "tests.campaigns.hangs",
    "recipes": "tests.campaigns.recipes",
    "damage": "tests.campaigns.damage",
    "kills": "tests.campaigns.kills",
    "preemption": "tests.campaigns.preemption",
    "corruption": "tests.campaigns.corruption",
    "restarts": "tests.campaigns.restarts",
    "hostile": "tests.campaigns.hostile",
    "disks": "tests.campaigns.disks",
    "elastic": "tests.campaigns.elastic",
    "machines": "tests.campaigns.machines",
    "peers": "tests.campaigns.peers",
}


@dataclass
class Row:
    """Results of several tries of one fault. held: passed tries; lost: failed tries. problems: a line for each failed try. more:
    results that only this kind of fault has."""

    fault: str
    tried: int = 0
    held: int = 0
    lost: int = 0
    seconds_median: float | None = None
    problems: list[str] = field(default_factory=list)
    skipped: str = ""
    more: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(fault: str, tries: int, once: Callable[[int], tuple[str, float]]) -> Row:
        """Call `once(number)` for each try, which returns (problem or "", seconds). Return the row."""
        row, seconds = Row(fault), []
        for number in range(tries):
            problem, took = once(number)
            row.tried += 1
            seconds.append(took)
            if problem:
                row.problems.append(problem)
        row.lost = len(row.problems)
        row.held = row.tried - row.lost
        row.seconds_median = round(statistics.median(seconds), 2)
        return row


def main(
    kinds: tyro.conf.Positional[tuple[str, ...]] = (), *, full: bool = False, rounds: int | None = None, json: str | None = None
) -> int:
    """Print a row for each fault. Return exit code 0 if no try failed.

    `kinds`: hangs, recipes, damage, kills, preemption, corruption, restarts, hostile, disks, elastic, machines, peers;
    all if none is named.
    `machines:torchrun`: only the rows of that kind with this text in their name. `full`: many tries of each fault.
    """
    rows: list[Row] = []
    asked = _asked(kinds)
    print(f"{'fault':<52} {'tried':>5} {'held':>5} {'lost':>5} {'seconds':>8}", flush=True)
    for kind, text in asked:
        found: Iterator[Row] = importlib.import_module(KINDS[kind]).rows(full=full, rounds=rounds, only=text)
        for row in found:
            rows.append(row)
            said = f"skipped: {row.skipped}" if row.skipped else f"{row.tried:>5} {row.held:>5} {row.lost:>5} {row.seconds_median:>8.2f}"
            print(f"{row.fault:<52} {said}", flush=True)
            for problem in row.problems:
                print(f"    {problem}", flush=True)
            if json:  # written after each kind, because a full table takes long and may be interrupted
                write_json(json, verb="campaigns", rows=[_plain(r) for r in rows])
    return exit_codes.of(not any(row.lost for row in rows))


def _asked(kinds: tuple[str, ...]) -> list[tuple[str, str]]:
    asked = []
    for word in kinds or KINDS:
        kind, _, text = word.partition(":")
        if kind not in KINDS:
            near = did_you_mean(kind, KINDS)
            raise BadInput(
                "KIND",
                got=kind,
                needed=f"kinds of faults: {', '.join(KINDS)}",
                fix=f"python -m tests.campaigns {near or 'hangs'}",
            )
        asked.append((kind, text))
    return asked


def _plain(row: Row) -> dict[str, Any]:
    told = {name: value for name, value in asdict(row).items() if value or name in ("fault", "tried", "held", "lost", "seconds_median")}
    return told | {"passed": row.lost == 0}
