"""`moe combinations`: what goes with what, as Markdown and as JSON, judged pair by pair by the code that checks recipes.

docs/parallel/combinations.md is what it prints; tests/laws/test_combinations.py holds the page against it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from moe.checks.backends import RULES, Rule
from moe.checks.verdict import verdict
from moe.launch import exit_codes
from moe.verify.hybrid import FACTORS, Idle, case_of, completed
from moe.verify.pairwise import Pair, every_pair, together
from parallel.errors import BadInput
from parallel.files import write_text

MARKS = {"runs": "yes", "not recommended": "slow", "refused": "no", "no effect": "-"}
PAGE = """# What goes with what

`moe combinations` makes this page. It judges every pair of values, all else at its simplest and with as many processes as the pair
needs, by the code that checks a recipe before it runs (`moe/checks/`). `moe verify --kinds hybrid --nproc 8` has rows with every pair
that eight processes can run, and compares each with one process ([verify](../use/verify.md)).

| mark | meaning |
|---|---|
| yes | runs |
| slow | runs and computes the right result, but is not recommended: the number says why and what is better |
| no | refused before anything starts: the number says why |
| - | no effect: one of the two changes nothing beside the other |

| factor | key, and names that are not values of it |
|---|---|
| schedule | `pipeline.schedule`, on two stages |
| sequence | `sequence.kind`; of a ring its order; `heads2`: a ring with Ulysses inside |
| tensor | `tensor.kind`; `sliced`: 1d with `tensor.sequence_parallel` |
| dispatch | `dispatch.kind`; `overlapped`: all_to_all in two chunks |
| data | `sharding.kind` and stage; fsdp, zero2 and zero3 beside stages need `sharding.allow_slow` |
| experts | `degrees.ep` and `degrees.etp` |
| model | one of those that `moe verify` has: a dense one, and three with experts |
| recompute | `recompute.kind` |
| precision | `precision.compute` |
"""


@dataclass(frozen=True)
class Judged:
    """`reasons`: those that neither value has alone; of a value alone, its own."""

    status: str
    reasons: tuple[str, ...] = ()


def main(*, out: str | None = None, json: str | None = None) -> int:
    """Print the page, or write it to `out`; a row for each pair to `json`."""
    table = judge_pairs()
    text = page(table)
    if out is None:
        print(text, end="")
    else:
        write_text(Path(out), text, what="--out")
    if json is not None:
        from moe.records.results import write_json

        write_json(json, verb="combinations", rows=_rows(table))
    return exit_codes.DONE


def judge_pairs() -> dict[Pair, Judged]:
    """Every pair of values of two factors."""
    alone = {value: judge(value) for factor, values in FACTORS.items() for value in ((factor, v) for v in values)}
    found = {}
    for pair in every_pair(FACTORS):
        both = judge(*pair)
        known = {reason for value in pair for reason in alone[value].reasons}
        reasons = tuple(reason for reason in both.reasons if reason not in known)
        found[pair] = Judged("runs" if both.status == "not recommended" and not reasons else both.status, reasons)
    return found


def judge(*values: tuple[str, str]) -> Judged:
    """Some values, all else at its simplest, on as many processes as they need."""
    try:
        case = case_of(completed(dict(values)), world=None)
    except Idle as idle:
        return Judged("no effect", (_without_got(idle),))
    said = verdict(case.run(), case.world)
    return Judged(said.status, said.advice if said.refused is None else (_without_got(said.refused),))


def _without_got(refused: BadInput) -> str:
    """What was found differs from pair to pair; the reason does not."""
    return f"`{refused.what}`: needed {refused.needed}; fix: {refused.fix}"


def page(table: dict[Pair, Judged]) -> str:
    """The whole page as Markdown."""
    parts, plain = [PAGE, _alone()], []
    for one, other in combinations(FACTORS, 2):
        cells = {(a[1], b[1]): judged for (a, b), judged in table.items() if (a[0], b[0]) == (one, other)}
        if all(judged.status == "runs" for judged in cells.values()):
            plain.append(f"{one} and {other}")
        else:
            parts.append(_matrix(one, other, cells))
    parts.append("## Everything goes with everything\n\n" + _paragraph(plain) + "\n")
    return "\n".join([*parts, _systems(table)])


def _alone() -> str:
    rows = [
        f"| {factor} | `{value}` | {' '.join(judged.reasons)} |"
        for factor, values in FACTORS.items()
        for value in values
        if (judged := judge((factor, value))).status == "not recommended"
    ]
    head = "## Not recommended, whatever stands beside it\n\nFor comparison, and for cases in which nothing else fits.\n\n"
    return head + "\n".join(["| factor | value | why |", "|---|---|---|", *rows]) + "\n"


def _matrix(one: str, other: str, cells: dict[tuple[str, str], Judged]) -> str:
    """The factor with more values goes down."""
    down, across = (one, other) if len(FACTORS[one]) >= len(FACTORS[other]) else (other, one)
    numbers: dict[str, int] = {}

    def cell(row: str, column: str) -> str:
        judged = cells[(row, column) if down == one else (column, row)]
        marks = sorted(numbers.setdefault(reason, len(numbers) + 1) for reason in judged.reasons)
        return " ".join([MARKS[judged.status], *map(str, marks)])

    lines = [f"## {down.capitalize()} and {across}\n", f"| {down} | " + " | ".join(FACTORS[across]) + " |"]
    lines.append("|---" * (len(FACTORS[across]) + 1) + "|")
    lines += [f"| `{row}` | " + " | ".join(cell(row, column) for column in FACTORS[across]) + " |" for row in FACTORS[down]]
    return "\n".join([*lines, "", *(f"{number}. {reason}" for reason, number in numbers.items())]) + "\n"


def _paragraph(pairs: Iterable[str]) -> str:
    return "All values of " + "; ".join(pairs) + "."


def _systems(table: dict[Pair, Judged]) -> str:
    """What other systems' code says of some of the same pairs."""
    rows = [
        f"| {together(_pairs(rule))[0]} | {rule.system} | {rule.status}: {rule.reason} | `{rule.source}` | {_here(rule, table)} |"
        for rule in RULES
    ]
    head = "## Other systems\n\nAs their code has it; a system that is not named with a pair is not known to accept or refuse it.\n\n"
    return head + "\n".join(["| pair | system | there | its file | here |", "|---|---|---|---|---|", *rows]) + "\n"


def _pairs(rule: Rule) -> list[Pair]:
    (one, ones), (other, others) = rule.one, rule.other
    return [((one, a), (other, b)) for a in ones for b in others]


def _here(rule: Rule, table: dict[Pair, Judged]) -> str:
    return ", ".join(dict.fromkeys(table[pair].status for pair in _pairs(rule)))


def _rows(table: dict[Pair, Judged]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = [
        {"system": "moe-parallel", "one": " ".join(one), "other": " ".join(other), "status": judged.status, "reasons": list(judged.reasons)}
        for (one, other), judged in table.items()
    ]
    for rule in RULES:
        for one, other in _pairs(rule):
            named = {"one": " ".join(one), "other": " ".join(other)}
            rows.append({"system": rule.system, **named, "status": rule.status, "reasons": [rule.reason], "source": rule.source})
    return rows
