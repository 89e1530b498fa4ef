"""Writes docs/parallel/combinations.md, which says which methods work together: `python -m tests.laws.combinations --out FILE`.
For every pair of values it runs the checks that every recipe passes (moe/checks/).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from moe.cli.run import write_rows
from moe.launch import exit_codes
from moe.verify.hybrid import FACTORS, Idle, Pair, case_of, completed, every_pair
from parallel.errors import BadInput
from parallel.store.files import write_text
from tests.laws.refusals import listed, reason_of, refusals
from tests.support.command import carry_out
from tests.support.verdict import verdict

MARKS = {"runs": "yes", "not recommended": "slow", "refused": "no", "no effect": "-"}
PAGE = """# Combinations

This page says which methods work together. `python -m tests.laws.combinations` writes it from the checks of recipes
(`moe/checks/`). All other values are the simplest, on as few processes as a pair needs.
`moe verify --kinds hybrid --nproc 8` runs all pairs that fit on eight processes and compares them with one process
([verify](../use/verify.md)).

| mark | meaning |
|---|---|
| yes | runs |
| slow | runs with the right result, but is not recommended; the number gives the reason and a better choice |
| no | refused before the run starts; the number gives the reason |

| factor | key and values |
|---|---|
| schedule | `pipeline.schedule`, on two stages |
| sequence | `sequence.kind`; for a ring its order; `heads2`: a ring with Ulysses inside; full recompute keeps `lightseq`'s attention |
| tensor | `tensor.kind`; `sliced`: 1d with `tensor.sequence_parallel` |
| dispatch | `dispatch.kind`; `overlapped`: all_to_all in two chunks |
| data | `sharding.kind` and stage; with stages, zero2, zero3, and fsdp that reshards, need `sharding.allow_slow` |
| experts | `degrees.ep` and `degrees.etp` |
| model | models of `moe verify`: a dense one, and three with experts |
| recompute | `recompute.kind` |
| precision | `precision.compute` |
"""


@dataclass(frozen=True)
class Judged:
    """The result for one value or one pair. status: a key of `MARKS`. reasons: why the status is not "runs"; for a pair, without reasons
    that already apply to one of its values alone."""

    status: str
    reasons: tuple[str, ...] = ()


def main(*, out: Path | None = None, json: Path | None = None) -> int:
    """Prints the page or writes it to --out, and writes one row for each pair to --json."""
    table, refused = judge_pairs(), refusals()
    text = page(table, refused)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text, what="--out")
    write_rows(json, "combinations", _rows(table, refused))
    return exit_codes.DONE


def judge_pairs() -> dict[Pair, Judged]:
    """Judge every pair of values of two different factors (FACTORS: kinds of parallelism, model, precision)."""
    alone = {value: judge(value) for factor, values in FACTORS.items() for value in ((factor, v) for v in values)}
    found = {}
    for pair in every_pair(FACTORS):
        both = judge(*pair)
        known = {reason for value in pair for reason in alone[value].reasons}
        reasons = tuple(reason for reason in both.reasons if reason not in known)
        found[pair] = Judged("runs" if both.status == "not recommended" and not reasons else both.status, reasons)
    return found


def judge(*values: tuple[str, str]) -> Judged:
    """Judge these (factor, value) pairs together, with the simplest value of each other factor, on as many processes as they need."""
    try:
        case = case_of(completed(dict(values)), world=None)
    except Idle as idle:
        return Judged("no effect", (_without_got(idle),))
    said = verdict(case.run(), case.world)
    return Judged(said.status, said.advice if said.refused is None else (_without_got(said.refused),))


def _without_got(refused: BadInput) -> str:
    """Return an error's text without the value that was got, so that errors with the same reason have equal texts."""
    return f"`{refused.what}`: needed {refused.needed}; fix: {refused.fix}"


def page(table: dict[Pair, Judged], refused: dict[Pair, BadInput]) -> str:
    parts = [PAGE, _alone()]
    for one, other in combinations(FACTORS, 2):
        if {one, other} < {"dispatch", "experts", "model"}:
            continue
        cells = {(a[1], b[1]): judged for (a, b), judged in table.items() if (a[0], b[0]) == (one, other)}
        if any(judged.status != "runs" for judged in cells.values()):
            parts.append(_matrix(one, other, cells))
    others = (
        "## All other pairs of factors\n\nAll run together, but a dense model has no experts to spread, and only `ep` has dispatchers.\n"
    )
    return "\n".join([*parts, others, listed(refused)])


def _alone() -> str:
    rows = [
        f"| {factor} | `{value}` | {' '.join(judged.reasons)} |"
        for factor, values in FACTORS.items()
        for value in values
        if (judged := judge((factor, value))).status == "not recommended"
    ]
    head = "## Never recommended\n\nThese values are for comparison, and for cases in which nothing else fits.\n\n"
    return head + "\n".join(["| factor | value | why |", "|---|---|---|", *rows]) + "\n"


def _matrix(one: str, other: str, cells: dict[tuple[str, str], Judged]) -> str:
    """Return a Markdown table of two factors: one row for each value of the factor with more values. Equal rows are merged into one."""
    down, across = (one, other) if len(FACTORS[one]) >= len(FACTORS[other]) else (other, one)
    numbers: dict[str, int] = {}

    def cell(row: str, column: str) -> str:
        judged = cells[(row, column) if down == one else (column, row)]
        marks = sorted(numbers.setdefault(reason, len(numbers) + 1) for reason in judged.reasons)
        return " ".join([MARKS[judged.status], *map(str, marks)])

    lines = [f"## {down.capitalize()} and {across}\n", f"| {down} | " + " | ".join(FACTORS[across]) + " |"]
    lines.append("|---" * (len(FACTORS[across]) + 1) + "|")
    alike: dict[str, list[str]] = {}
    for row in FACTORS[down]:
        alike.setdefault(" | ".join(cell(row, column) for column in FACTORS[across]), []).append(f"`{row}`")
    lines += [f"| {', '.join(rows)} | {cells_of_row} |" for cells_of_row, rows in alike.items()]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in numbers.items())]) + "\n"


def _rows(table: dict[Pair, Judged], refused: dict[Pair, BadInput]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"system": "moe-parallel", "one": " ".join(one), "other": " ".join(other), "status": judged.status, "reasons": list(judged.reasons)}
        for (one, other), judged in table.items()
    ]
    for (one, other), reason in refused.items():
        rows.append({"system": "keys", "one": " ".join(one), "other": " ".join(other), "status": "refused", "reasons": [reason_of(reason)]})
    return rows


if __name__ == "__main__":
    sys.exit(carry_out(main, "python -m tests.laws.combinations", sys.argv[1:]))
