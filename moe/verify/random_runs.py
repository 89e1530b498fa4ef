"""`moe verify --draws N`: trains random recipes (moe/verify/random_recipe.py) for three steps, and compares each with the plain twin, the
reference implementation in twin.py.

    draw a recipe -> apply fixes until it is accepted -> train it on ranks -> compare with the twin -> if it fails: shrink and print it

Shrinking searches for the smallest recipe that still fails. The same --seed and --nproc give the same recipes. The comparison covers the
loss, the gradients, their norm and the update of the first step, and the losses of all three steps.
"""

from __future__ import annotations

import json as json_text
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import yaml

from moe.launch import exit_codes
from moe.records.results import write_json
from moe.verify.cases import Case, as_written
from moe.verify.expected import NUMBERS, Expected, twin_of
from moe.verify.layouts import run_world
from moe.verify.random_recipe import Draw, Refusal, Values, draw, smaller
from moe.verify.small import known, not_in_the_twin
from moe.verify.verify import Say, judged, place_of, say_now
from parallel.data.kinds import ENGINES, PLAIN
from parallel.errors import counted

_TRIES = 60  # largest number of runs that shrink a failed recipe to the smallest one that still fails
_REASONS = 10  # largest number of refusal reasons in the summary


def main(
    *, draws: int, seed: str = "0", nproc: int | None = None, json: str | None = None, timeout_s: float | None = None, say: Say = say_now
) -> int:
    """Run `moe verify --draws`: print one line for each draw, and a summary. Return 1 if a recipe deviates, or if a refusal's text is not
    one line with what, got, needed and fix; else 0. draws: number of recipes. seed: equal texts give equal recipes. nproc: largest number
    of processes of a recipe (None: 2). json: file to write the rows to. timeout_s: time limit for training one recipe."""
    torch.set_num_threads(1)  # processes forked later must not inherit a thread pool
    ENGINES[PLAIN].load()
    started, rows, refusals = time.perf_counter(), list[dict[str, Any]](), list[Refusal]()
    for number in range(draws):
        try:
            drawn = draw(f"{seed}/{number}", nproc or 2)
        except Exception as error:  # a recipe check, or the fix that it suggests, is wrong; counted as a failure
            rows.append({"passed": False, "lacks": None, "error": f"the draw failed: {type(error).__name__}: {error}"})
            say(f"{number:>4} {rows[-1]['error']} FAIL")
        else:
            rows.append(_compared(number, drawn, timeout_s, say))
            refusals += drawn.refusals
        if json is not None:
            write_json(json, verb="verify draws", rows=rows, seed=seed, reasons=Counter(r.reason for r in refusals))
    for line in _summary(rows, refusals, time.perf_counter() - started):
        say(line)
    return exit_codes.of(not any(row["passed"] is False for row in rows) and not any(map(_is_wrong, refusals)))


def _compared(number: int, drawn: Draw, limit_s: float | None, say: Say) -> dict[str, Any]:
    """Run a draw, print its line and, if it fails, the smallest recipe that still fails. Return the draw's row. number: index of the
    draw."""
    row = tried(drawn, limit_s)
    cells = " ".join(f"{row[n]:9.1e}" for n in NUMBERS) if "loss" in row else f"not compared: {row['lacks']}"
    verdict = "pass" if row["passed"] else "FAIL" if row["passed"] is False else ""
    say(f"{number:>4} {row['layout']:<52} {row['kind']:<6} {row['precision']} {cells} {verdict}")
    if row["passed"] is False:
        for line in _reported(drawn, row, limit_s):
            say(line)
    return row | {"refusals": [{"line": str(r.bad), "fix": r.fix} for r in drawn.refusals]}


def tried(drawn: Draw, limit_s: float | None) -> dict[str, Any]:
    """Train a drawn recipe on its ranks, and compare the results with those of the plain twin, the reference implementation in twin.py.
    Return the table row of the recipe. `passed` is None if the twin does not implement a setting of the recipe."""
    case = as_written(drawn.values, drawn.world, name="drawn")
    row = {"layout": case.layout, "kind": case.kind, "precision": case.precision, "world": case.world, "recipe": recipe_of(case)}
    if (lacks := not_in_the_twin(case.run())) is not None:
        return row | {"passed": None, "lacks": lacks}
    try:
        expected = Expected.of(twin_of(case))
    except Exception as error:
        return row | {"passed": False, "lacks": None, "error": f"the twin failed: {type(error).__name__}: {error}"}
    ((_, ran),) = run_world([case], case.world, timeout_s=limit_s)
    return row | {"lacks": None if known(case.run()) else "optimizer.kind"} | judged(case, ran, expected)


def recipe_of(case: Case) -> Values:
    """Return the recipe of a case made by `as_written`, with resolved degrees. For a dense model, it has no sections about experts, because
    the checks of recipes would refuse them."""
    values: Values = json_text.loads(case.values or "{}")
    sparse = case.run().model.layers_with_experts()
    return {section: keys for section, keys in values.items() if sparse or section not in ("router", "experts", "dispatch")}


def _reported(drawn: Draw, row: dict[str, Any], limit_s: float | None) -> Iterator[str]:
    """Yield lines on a failure: its error or first deviation, and the smallest recipe that still fails."""
    values, made, failed = _smallest(drawn, row, limit_s)
    yield failed.get("error") or f"first deviation: {place_of(made, failed)}"
    yield f"the smallest recipe that fails, for moe verify --recipe FILE --nproc {made.world}:"
    yield yaml.safe_dump(recipe_of(made), sort_keys=False)


def _smallest(drawn: Draw, row: dict[str, Any], limit_s: float | None) -> tuple[Values, Case, dict[str, Any]]:
    """Reset one key after another to its value in the tiny recipe (random_recipe.py), and keep each change with which the recipe still
    fails. Return (values, case, row) of the smallest recipe that fails."""
    values, left = drawn.values, _TRIES
    again = True
    while again:
        again = False
        for fewer in smaller(values, drawn.world):
            left -= 1
            found = tried(Draw(fewer, drawn.world, []), limit_s) if left > 0 else {"passed": None}
            if found["passed"] is False:
                values, row, again = fewer, found, True
                break
    return values, as_written(values, drawn.world, name="drawn"), row


def _is_wrong(refusal: Refusal) -> bool:
    """Return whether the refusal's text is not one plain line with what, got, needed and fix."""
    line = str(refusal.bad)
    return not (line.isprintable() and all(word in line for word in (": got ", ", needed ", "; fix: ")))


def _summary(rows: list[dict[str, Any]], refusals: list[Refusal], seconds: float) -> Iterator[str]:
    """Yield the lines of the summary: numbers of draws by outcome, settings that the twin lacks, and the most frequent refusals."""
    states, drawn = Counter(row["passed"] for row in rows), [row["refusals"] for row in rows if "refusals" in row]
    accepted = drawn.count([])
    yield (
        f"{counted(len(rows), 'draw')} in {seconds:.0f} s: {accepted} accepted as drawn, {len(drawn) - accepted} after "
        f"{counted(len(refusals), 'refusal')}; {states[True]} equal the twin, {states[False]} deviate or fail, {states[None]} not compared"
    )
    lacking = Counter(row["lacks"] for row in rows if row["lacks"])
    yield from (f"  the twin does not have {name}: {counted(number, 'draw')}" for name, number in lacking.most_common())
    by_reason = Counter(refusal.reason for refusal in refusals)
    yield from (f"  {number} refused: {reason}" for reason, number in by_reason.most_common(_REASONS))
    yield f"  {sum(by_reason.values()) - sum(n for _, n in by_reason.most_common(_REASONS))} refused for other reasons"
    stuck = [refusal for refusal in refusals if not refusal.fix]
    yield f"  {counted(len(stuck), 'refusal')} without a fix that can be applied: the refused keys were reset"
    yield from (f"  not a plain line: {refusal.bad}" for refusal in refusals if _is_wrong(refusal))
