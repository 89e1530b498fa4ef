"""The layout oracle: the same tiny model and batch on one process and on every legal layout, compared number by number.

    twin        moe/verify/twin.py: whole batches, a model and an update of its own, written from the papers; fp32
    layouts     moe/verify/layouts.py: the trainer's own step on forked ranks, for each of moe/verify/cases.py
    judgement   moe/verify/expected.py: 1e-5 in fp32; in 16 bits what reordering does, and a bound to the twin in fp32
    where       moe/verify/where.py: of a row that fails, the first layer or parameter that is off

Compared: loss, balance loss, every logical gradient, gradient norm, weights after one step, losses of ten steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from moe.launch import exit_codes
from moe.records.speed import source_commit
from moe.verify.cases import Case
from moe.verify.compare import NUMBERS, compare
from moe.verify.expected import Expected, made_beside, rounds, twin_of
from moe.verify.hybrid import WORLD, as_json, covering, described
from moe.verify.kinds import KINDS, cases
from moe.verify.layouts import Ran, run_world
from moe.verify.recipe import recipe_cases
from moe.verify.small import known
from moe.verify.table import Table
from moe.verify.where import Standard
from parallel.errors import BadInput, counted, cut

Say = Callable[[str], None]
_BY_DEFINITION = "router.group rank, which counts capacity over what a rank holds and so depends on the layout by definition"
say_now: Say = partial(print, flush=True)  # a pipe gets each row when it is done, too


def main(
    *,
    nproc: int = 2,
    json: str | None = None,
    only: str | None = None,
    kinds: str = ",".join(KINDS),
    timeout_s: float | None = None,
    go_on: bool = False,
    recipe: str | None = None,
    say: Say = say_now,
) -> int:
    """`moe verify`: print the table of layouts, each row when it is done; 1 if any fails. `only` keeps the rows whose text holds it.

    A layout of up to four ranks that takes longer than `timeout_s` seconds has failed (None: 120); of eight ranks, twice that. `json`
    is written every few seconds; with `go_on` the rows in it that passed are kept, and the others run (moe/verify/table.py). `recipe`: a
    user's own, made small, in the place of the project's models (moe/verify/recipe.py).
    """
    torch.set_num_threads(1)  # ranks are forked, and a forked process must not inherit a pool of threads
    started = time.perf_counter()
    if recipe is None:
        found, notes = cases(nproc, kinds=tuple(kinds.split(","))), ["not compared: " + _BY_DEFINITION]
    else:
        kinds = ""
        found, notes = recipe_cases(recipe, nproc)
    chosen = [c for c in found if only is None or only in f"{c.layout} {c.kind} {c.precision}"]
    if not chosen:
        layouts = ", ".join(dict.fromkeys(case.layout for case in found))
        raise BadInput("--only", got=only, needed=f"a part of a row's text: {cut(layouts)}", fix=f'--only "{found[0].layout}"')
    table = Table(chosen, json, go_on=go_on)
    worlds = sorted({c.world for c in chosen})
    expected: dict[Case, Expected] = {}
    made = made_beside(list(dict.fromkeys(twin_of(case) for world in worlds for case in table.left(world))))  # as rows will ask for them
    failed: list[tuple[Case, dict[str, Any]]] = []
    if go_on:
        say(table.begins(source_commit()))
    say(_line("layout", "kind", "world", "precision", *NUMBERS, "of bound", ""))
    for world in worlds:
        for case, ran in run_world(table.left(world), world, timeout_s=timeout_s):
            twin = twin_of(case)
            if twin not in expected:
                expected[twin] = next(made)
            row = judged(case, ran, expected[twin])
            if rounds(twin):
                table.tolerances[name_of(twin)] = expected[twin].tolerance
            table.add(case, row)
            failed += [] if row["passed"] else [(case, row)]
            cells = [f"{row[n]:.1e}" for n in NUMBERS] + ["" if row["of_bound"] is None else f"{row['of_bound']:.2f}"]
            say(_line(row["layout"], row["kind"], world, row["precision"], *cells, "pass" if row["passed"] else "FAIL"))
    _say_where(failed, expected, say)
    _say_sums(table.rows, expected, nproc, time.perf_counter() - started, say, notes)
    pairs = covering() if "hybrid" in kinds.split(",") and nproc >= WORLD else None
    for line in [] if pairs is None else described(pairs):
        say(line)
    table.write(**({} if pairs is None else as_json(pairs)))
    return exit_codes.of(bool(table.rows) and not failed)


def judged(case: Case, ran: Ran, expected: Expected) -> dict[str, Any]:
    """A row: how far each number is off, and in 16 bits the largest share of the bound to the exact twin that any deviation takes.

    A row in 16 bits that is off is compared once more, with one process that takes all sums in the row's own order: a token at a near
    tie may go elsewhere in that order alone. The tolerance stays as it is.
    """
    row = _row(case, ran, expected)
    if row["passed"] or "error" in row or not rounds(case):
        return row
    again = _row(case, ran, expected.in_the_order_of(case))
    return again if again["passed"] else row


def _row(case: Case, ran: Ran, expected: Expected) -> dict[str, Any]:
    row: dict[str, Any] = {"layout": case.layout, "kind": case.kind, "world": case.world, "precision": case.precision, "case": case.in_full}
    if isinstance(ran, str):
        return row | dict.fromkeys((*NUMBERS, "of_bound"), float("inf")) | {"passed": False, "error": ran}
    numbers = compare(ran[0], expected.result)
    share, farthest = (None, "") if expected.bound is None else expected.bound.share(ran[0])
    passed = all(numbers[n] <= expected.tolerance[n] for n in NUMBERS) and (share is None or share <= 1)
    row |= numbers | {"of_bound": share, "passed": passed}
    return row if share is None or share <= 1 else row | {"farthest": farthest}


def _say_where(failed: list[tuple[Case, dict[str, Any]]], expected: dict[Case, Expected], say: Say) -> None:
    """Run what failed once more, with a tape of its first steps, and say where it parts from what it should be."""
    standards: dict[Case, Standard] = {}
    for case, row in failed:
        twin = twin_of(case)
        if case.recipe is not None and not known(twin.run()):
            say(row.get("error", f"{case.layout} {case.kind}: no twin knows the recipe's own parts, so where it parts is not known"))
            continue
        if "error" not in row:
            standard = standards.setdefault(twin, Standard(expected[twin]))
            ((_, ran),) = run_world([case], case.world, taped=True)
            row["where"] = _where(case, ran, standard, row)
        else:
            say(row["error"])
        say(f"first off in {case.layout} {case.kind} {case.precision}: {row.get('where', 'its ranks failed')}")


def _where(case: Case, ran: Ran, standard: Standard, row: dict[str, Any]) -> str:
    if isinstance(ran, str) or ran[1] is None:
        return "nothing: its ranks failed when they ran again"
    found = standard.first_deviation(ran[1], ran[0], case)
    if found is None and "farthest" in row:
        return f"{row['farthest']} (farther from the twin in fp32 than {case.precision} explains)"
    return str(found or "nothing that can be told from rounding")


def _say_sums(rows: list[dict[str, Any]], expected: dict[Case, Expected], nproc: int, seconds: float, say: Say, notes: list[str]) -> None:
    passed = sum(row["passed"] for row in rows)
    for line in notes:
        say(line)
    chosen = f"{counted(len(rows), 'layout')} of up to {counted(nproc, 'process')}"
    say(f"{passed} passed, {len(rows) - passed} failed: {chosen} in {seconds:.0f} s")
    say("tolerances: fp32 1e-5 for every number; in lower precision twice the spread of rounding, measured just now:")
    for twin, e in expected.items():
        if rounds(twin):
            say(f"  {name_of(twin)}: " + " ".join(f"{number} {value:.0e}" for number, value in e.tolerance.items()))


def name_of(twin: Case) -> str:
    """In tables."""
    size = f" of {twin.layers} layers" if twin.layers != Case.layers else ""
    words = (
        (f"of {twin.experts} experts", twin.experts != Case.experts),
        (f"of {twin.length} tokens", twin.length != Case.length),
        (f"of {twin.microbatches} micro-batches", twin.microbatches > 1),
        ("padded", twin.padded),
        ("overflow", twin.overflow),
        (f"of {twin.batch} sequences", twin.batch != Case.batch),
        (f"in {twin.parts} parts", twin.parts > 1),
        (f"in {twin.blocks} x {twin.blocks} blocks", twin.blocks > 1),
        (f"{twin.head_tiles} tiles of the head", twin.head_tiles > 1),
    )
    more = "".join(f" {word}" for word, there in (*words, (f"{twin.chunks} chunks of the loss", twin.chunks > 1)) if there)
    return f"{twin.model} {twin.precision}{size}{more}" + (f", {twin.schedule} pp{twin.pp}" if twin.delayed else "")


def _line(layout: str, kind: str, world: object, precision: str, *cells: str) -> str:
    return f"{layout:<46} {kind:<6} {world:>5} {precision:<9} " + " ".join(f"{cell:>9}" for cell in cells)
