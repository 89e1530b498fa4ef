"""`moe verify --compare ONE MANY`: names the first value of the forward pass and the first of the backward pass that differ between
records of the same step on one process (ONE) and on several (MANY)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from moe.launch import exit_codes
from moe.records.results import write_json
from moe.verify.yours.causes import explain
from moe.verify.yours.judge import FORWARD, TOO_LOOSE, Comparison
from moe.verify.yours.values import Deviation, Recorded, Recording
from parallel.errors import BadInput, counted

Say = Callable[[str], None]
# kind of a recorded value -> its name in the printed table; others: the kind itself
_NAMES = {"weight": "weight before", "note": "noted value"}
# kind -> its class in the file of --json; others: activation
_CLASS = {"weight": "parameter", "weight after": "parameter", "gradient": "gradient", "output gradient": "gradient"}
_SHOWN = 5  # largest number of names in a printed line; the file of --json has all


def judged(one: str | Path, many: str | Path) -> tuple[Comparison, str]:
    """Compare two folders that `record` wrote. Return (comparison, reason why gradients could not be compared or "" if they were)."""
    first, second = Recording.read(one, what="ONE"), Recording.read(many, what="MANY")
    if not first.rounded:
        got, needed = f"{one}, recorded in {counted(len(first.ranks), 'process')}", "a step of one process, with its rounding measured"
        raise BadInput("ONE", got=got, needed=needed, fix="record it in one process, without torchrun")
    comparison = Comparison.of(first, second)
    comparison.run(explain)
    return comparison, _without_gradients(comparison)


def main(one: str, many: str, *, json: str | None = None, say: Say = print) -> int:
    """Compare two folders that `record` wrote, and print a table. Return 0 if gradients could be compared and all values are equal within
    their bounds, else 1."""
    comparison, lacking = judged(one, many)
    deviations = [deviation for deviation, _ in comparison.found]
    wrong = [deviation for deviation in deviations if not deviation.passed]
    say(_line("", "module or parameter", "value", "deviation", "bound", "factor", "likely cause"))
    for title, worst in zip(("first forward", "first backward"), first_deviations(comparison), strict=True):
        say(f"{title:<15} none" if worst is None else _line(title, *worst))
    say(f"{counted(len(deviations) - len(wrong), 'value')} equal, {len(wrong)} differ, {len(comparison.refused)} not compared")
    costs = _cost(one, [comparison.one]), _cost(many, comparison.ranks)
    for line in (*_not_compared(comparison), *costs, *([lacking] if lacking else [])):
        say(line)
    if json is not None:
        rows = [{**d.row(), "value": d.kind, "kind": _CLASS.get(d.kind, "activation")} for d in deviations]
        refused = [{"name": key.name, "value": key.kind, "slot": key.slot, "reason": why} for key, why in comparison.refused.items()]
        write_json(json, verb="verify", rows=rows, not_compared=refused)
    return exit_codes.of(not wrong and not lacking)


def first_deviations(comparison: Comparison) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """Return the first deviation of the forward pass, and the first of the backward pass and update. Each is a tuple of table cells (name,
    value, deviation, bound, factor, cause), or None if nothing deviates."""
    wrong = [deviation for deviation, _ in comparison.found if not deviation.passed]
    forward, backward = (next((d for d in wrong if (d.kind in FORWARD) == way), None) for way in (True, False))
    follows = "may follow from forward: " if forward is not None else ""
    return (
        None if forward is None else _cells(comparison, forward, ""),
        None if backward is None else _cells(comparison, backward, follows),
    )


def _cells(comparison: Comparison, worst: Deviation, before: str) -> tuple[str, ...]:
    kind = comparison.one.modules.get(worst.name)
    name = (worst.name or "the model") + (f" ({kind})" if kind and worst.kind in ("input", "output", "output gradient") else "")
    factor = "" if worst.factor is None else f"{worst.factor:.4g}"
    value = _NAMES.get(worst.kind, worst.kind)
    return name, value, f"{worst.deviation:.1e}", f"{worst.bound:.1e}", factor, before + worst.cause


def _not_compared(comparison: Comparison) -> list[str]:
    reasons = Counter(comparison.refused.values())
    lines = []
    for reason, number in reasons.most_common():
        names = [f"{key.kind} of {key.name or 'the model'}" for key, why in comparison.refused.items() if why == reason]
        lines.append(f"not compared: {', '.join(names[:_SHOWN])}{f' and {number - _SHOWN} more' if number > _SHOWN else ''}: {reason}")
    if loose := [d.name or "the model" for d, _ in comparison.found if d.passed and d.bound > 0.05]:
        lines.append(f"compared loosely, because rounding alone moves them by more than 2.5 %: {', '.join(dict.fromkeys(loose[:_SHOWN]))}")
    return lines


def _without_gradients(comparison: Comparison) -> str:
    """Return the reason why gradients could not be compared; "" if they were."""
    if any(key.kind == "gradient" and why == TOO_LOOSE for key, why in comparison.refused.items()):
        return f"failed: gradients are not compared, because {TOO_LOOSE.replace('it, or its gradient,', 'them')}: record in fp32"
    if not any(d.kind == "gradient" for d, _ in comparison.found):
        return "failed: no gradient of a parameter was compared: both programs must record a backward of parameters with the same names"
    return ""


def _cost(folder: str, ranks: list[Recorded]) -> str:
    size, seconds = max(r.bytes for r in ranks), max(r.seconds for r in ranks)
    sampled = [p for r in ranks for pieces in r.pieces.values() for p in pieces if p.sampled]
    chance = ""
    if sampled:
        least = min(p.values.numel() for p in sampled)
        chance = f"; {counted(len(sampled), 'tensor')} as samples of at least {least} elements, which miss a fault in 1 % of the elements"
        chance += f" with chance {0.99**least:.0e}"
    return f"{folder}: {counted(len(ranks), 'rank')}, {size / 1e6:.2f} MB and {seconds:.2f} s for each{chance}"


def _line(title: str, name: str, value: str, *cells: str) -> str:
    return f"{title:<15} {name:<44} {value:<16} {cells[0]:>9} {cells[1]:>8} {cells[2]:>8}  {cells[3]}"
