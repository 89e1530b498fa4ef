"""Writes docs/parallel/combinations.md, which says which methods work together: `python -m tests.laws.combinations --out FILE`.
For every pair of values it runs the checks that every recipe passes (moe/checks/).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

from moe.checks.verdict import verdict
from moe.cli.run import write_rows
from moe.launch import exit_codes
from moe.verify.hybrid import FACTORS, Idle, case_of, completed
from moe.verify.pairwise import Pair, every_pair, together
from parallel.errors import BadInput
from parallel.store.files import write_text
from tests.support.command import carry_out

MARKS = {"runs": "yes", "not recommended": "slow", "refused": "no", "no effect": "-"}
PAGE = """# Combinations

This page says which methods work together, pair by pair. `python -m tests.laws.combinations` writes it from the checks that every
recipe passes before it runs (`moe/checks/`). In each pair, all other values are the simplest, on as many processes as the pair needs.
`moe verify --kinds hybrid --nproc 8` runs all pairs that fit on eight processes and compares them with one process
([verify](../use/verify.md)).

| mark | meaning |
|---|---|
| yes | runs |
| slow | runs with the right result, but is not recommended; the number gives the reason and a better choice |
| no | refused before the run starts; the number gives the reason |
| - | no effect: one of the two values changes nothing with the other |

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


@dataclass(frozen=True)
class Rule:
    """Whether another system runs or refuses each pair of a value in `one` and a value in `other`, as read in its file `source`.
    one, other: (factor of moe/verify/hybrid.py, values of this factor). Conditions on sizes are left out."""

    system: str
    one: tuple[str, tuple[str, ...]]
    other: tuple[str, tuple[str, ...]]
    status: Literal["runs", "refused"]
    reason: str
    source: str


_STAGES, _FSDP = ("schedule", ("gpipe", "1f1b", "interleaved")), ("data", ("fsdp",))
_SPARSE, _EP, _MEGATRON = ("model", ("switch", "gshard", "deepseek")), ("experts", ("ep2", "ep4")), "training/arguments.py"
_GATHERED, _OWN_LAYER = "weights stay gathered over the micro-batches by default", "of its own MoE layer; its automatic ep runs without tp"
_STAGE_1 = "its pipeline engine asserts stage 0 or 1"
RULES = (
    Rule("DeepSpeed", _STAGES, ("data", ("zero2", "zero3")), "refused", _STAGE_1, "runtime/pipe/engine.py"),
    Rule("Megatron-Core", _STAGES, _FSDP, "refused", "with torch's FSDP2; its own Megatron-FSDP runs", _MEGATRON),
    Rule("torchtitan", _STAGES, _FSDP, "runs", _GATHERED, "distributed/fsdp.py"),
    Rule("DeepSpeed", ("data", ("zero3",)), _SPARSE, "refused", _OWN_LAYER, "runtime/engine.py"),
    Rule("Megatron-Core", _FSDP, _EP, "refused", "with torch's FSDP2", _MEGATRON),
    Rule("torchtitan", _FSDP, _EP, "runs", "where ep divides dp_shard * cp * tp", "distributed/parallel_dims.py"),
    Rule("Megatron-Core", _FSDP, ("precision", ("fp16",)), "refused", "with torch's FSDP2", _MEGATRON),
)


def main(*, out: Path | None = None, json: Path | None = None) -> int:
    """Prints the page or writes it to --out, and writes one row for each pair to --json."""
    table = judge_pairs()
    text = page(table)
    if out is None:
        print(text, end="")
    else:
        write_text(out, text, what="--out")
    write_rows(json, "combinations", _rows(table))
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


def page(table: dict[Pair, Judged]) -> str:
    parts = [PAGE, _alone()]
    for one, other in combinations(FACTORS, 2):
        cells = {(a[1], b[1]): judged for (a, b), judged in table.items() if (a[0], b[0]) == (one, other)}
        if any(judged.status != "runs" for judged in cells.values()):
            parts.append(_matrix(one, other, cells))
    others = "## All other pairs of factors\n\nAll their values run together.\n"
    return "\n".join([*parts, others, _systems(table)])


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


def _systems(table: dict[Pair, Judged]) -> str:
    rows = [
        f"| {together(pairs)[0]} | {rule.system} | {rule.status}: {rule.reason} | `{rule.source}` | "
        f"{', '.join(dict.fromkeys(table[pair].status for pair in pairs))} |"
        for rule in RULES
        for pairs in [_pairs(rule)]
    ]
    head = "## Other systems\n\nRead in their code. For a pair that is not listed with a system, its answer is not known.\n\n"
    return head + "\n".join(["| pair | system | there | its file | here |", "|---|---|---|---|---|", *rows]) + "\n"


def _pairs(rule: Rule) -> list[Pair]:
    (one, ones), (other, others) = rule.one, rule.other
    return [((one, a), (other, b)) for a in ones for b in others]


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


if __name__ == "__main__":
    sys.exit(carry_out(main, "python -m tests.laws.combinations", sys.argv[1:]))
