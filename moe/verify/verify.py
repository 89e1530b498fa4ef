"""`moe verify`: trains the same tiny models on one process and in every layout, and compares losses, gradients and weights.

    twin        moe/verify/twin.py: a second implementation, written from the papers; computes whole batches on one process
    layouts     moe/verify/layouts.py: the trainer's own step on forked ranks, for each case of moe/verify/kinds.py
    tolerance   moe/verify/expected.py: 1e-5 in fp32; in 16 bits twice the measured effect of rounding
    where       moe/verify/where.py: if a layout fails, the first layer or parameter that deviates

Compared numbers: loss, balance loss, every parameter's gradient, gradient norm, weights after one step, losses of ten steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from moe.launch import exit_codes
from moe.records.results import source_commit
from moe.verify.cases import Case
from moe.verify.expected import NUMBERS, Expected, compare, computed_in_background, rounds, twin_of
from moe.verify.hybrid import WORLD, as_json, covering, covering_few, described
from moe.verify.kinds import KINDS, cases, recipe_cases, rows_with
from moe.verify.layouts import Ran, run_world
from moe.verify.small import known
from moe.verify.started import run_started
from moe.verify.table import Table
from moe.verify.where import Standard, last_module
from parallel.data.kinds import ENGINES, PLAIN
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.process.process import gpus

Say = Callable[[str], None]
Run = Callable[..., Iterator[tuple[Case, Ran]]]  # `run_world` or `run_started`
# --device -> values of experts.kernels with which each case of one process is run
ALONE = {"cuda": ("triton", "triton_persistent", "grouped_mm", "cpu", "reference"), "cpu": ("cpu", "reference")}
# number of the table (expected.NUMBERS) -> text for the place of a fault that only this number shows
_SAID = {
    "loss": "head: loss of step 0",
    "ten_step": "head: losses of all steps",
    "norm": "all parameters: gradient norm of step 0",
    "update": "weights after step 0",
}
_BY_DEFINITION = "not compared: router.group rank, which counts capacity over a rank's tokens and so depends on the layout by definition"
say_now: Say = partial(print, flush=True)  # print each row immediately, even into a pipe


def main(
    *,
    nproc: int | None = None,
    json: str | None = None,
    only: str | None = None,
    kinds: str = ",".join(KINDS),
    timeout_s: float | None = None,
    go_on: bool = False,
    recipe: str | None = None,
    device: str | None = None,
    say: Say = say_now,
) -> int:
    """Run `moe verify`: print a table with a row for each layout of up to `nproc` processes (None: 2). Returns 1 if a layout fails.

    kinds: comma-separated kinds of parallelism (KINDS). only: run only rows whose layout, kind or precision contains this text. json: file
    to which the table is written. timeout_s: time limit for a layout of up to four ranks (None: 120); eight ranks have twice this time.
    go_on: keep the rows of `json` that passed, run the others. recipe: a user's recipe, of which a small version is tested instead of the
    project's models. device: "cuda" or "cpu": ranks are started as `moe train` starts them, on this device; None: ranks are forked, on the
    CPU. say: prints a line.
    """
    nproc = _nproc_on(device, nproc)
    torch.set_num_threads(1)  # processes forked later must not inherit a thread pool
    started = time.perf_counter()
    if recipe is None:
        found, notes = cases(nproc, kinds=tuple(kinds.split(","))), [_BY_DEFINITION]
    else:
        kinds = ""
        found, notes = recipe_cases(recipe, nproc)
    found = found if device is None else _with_kernels(found, device)
    chosen = rows_with(only, found)
    table = Table(chosen, json, go_on=go_on, device=device)
    worlds, run = sorted({c.world for c in chosen}), run_world if device is None else run_started
    expected: dict[Case, Expected] = {}
    twins = dict.fromkeys(twin_of(case) for world in worlds for case in table.left(world))  # in the order of the rows
    ENGINES[PLAIN].load()  # imported before ranks are forked
    made = computed_in_background(list(twins))
    failed: list[tuple[Case, dict[str, Any]]] = []
    if go_on:
        say(table.begins(source_commit()))
    say(_line("layout", "kind", "world", "precision", *NUMBERS, "of bound", ""))
    for world in worlds:
        for case, ran in run(table.left(world), world, timeout_s=timeout_s):
            twin = twin_of(case)
            if twin not in expected:
                expected[twin] = next(made)
            row = judged(case, ran, expected[twin])
            if rounds(twin):
                table.tolerances[name_of(twin)] = expected[twin].limits
            table.add(case, row)
            failed += [] if row["passed"] else [(case, row)]
            cells = [f"{row[n]:.1e}" for n in NUMBERS] + ["" if row["of_bound"] is None else f"{row['of_bound']:.2f}"]
            say(_line(row["layout"], row["kind"], world, row["precision"], *cells, "pass" if row["passed"] else "FAIL"))
    _say_where(failed, expected, run, say)
    for line in (*notes, *_sums(table.rows, expected, nproc, time.perf_counter() - started)):
        say(line)
    coverings = (covering(), covering_few()) if "hybrid" in kinds.split(",") and nproc >= WORLD else ()
    for line in (line for found in coverings for line in described(found)):
        say(line)
    table.write(**(as_json(*coverings) if coverings else {}))
    return exit_codes.of(bool(table.rows) and not failed)


def _nproc_on(device: str | None, nproc: int | None) -> int:
    """Return the largest number of processes of a layout: `nproc`, by default 2, or 1 on a single GPU. Raises BadInput for an unknown
    device, and for more processes than GPUs."""
    if device not in (None, *ALONE):
        raise BadInput("--device", got=device, needed=f"one of {', '.join(ALONE)}", fix="--device cuda")
    if device != "cuda":
        return 2 if nproc is None else nproc
    if not (found := gpus()):
        raise BadInput("--device", got="cuda, but torch sees no GPU", needed="a GPU", fix="see: moe doctor" | Set("it", "cpu"))
    if nproc is not None and nproc > found:
        raise BadInput("--nproc", got=nproc, needed=f"at most the {counted(found, 'GPU')} of this machine", fix=f"--nproc {found}")
    return min(2, found) if nproc is None else nproc


def _with_kernels(found: list[Case], device: str) -> list[Case]:
    """Return the cases for ranks on `device`. A case of one process is repeated with each of the kernels in ALONE; the others get the
    kernels that the trainer would choose."""
    several = "auto" if device == "cuda" else Case.kernels
    return [replace(case, kernels=k) for case in found for k in (ALONE[device] if case.world == 1 else [several])]


def judged(case: Case, ran: Ran, expected: Expected) -> dict[str, Any]:
    """Return the case's table row: a dict with a deviation for each name in NUMBERS, `passed`, and `of_bound`. `of_bound`: largest ratio of
    a deviation to its limit in the case's Bound, or None if it has no Bound. A Bound (expected.py) has further limits, for runs that round
    because of their dtype."""
    row = _row(case, ran, expected)
    if row["passed"] or isinstance(ran, str):
        return row
    if case.values is not None:
        return row if rounds(case) else _row(case, ran, expected.by_rounding())
    if not (rounds(case) or known(case.run())):
        return row
    # compare again, with one process that adds in this layout's order: another order of sums may send a token that is nearly tied between
    # two experts to the other expert
    again = (_row(case, ran, other) for other in expected.in_the_order_of(case, ran[0].gradients))
    return next((found for found in again if found["passed"]), row)


def _row(case: Case, ran: Ran, expected: Expected) -> dict[str, Any]:
    """Return the case's table row, by one comparison with `expected`."""
    row: dict[str, Any] = {"layout": case.layout, "kind": case.kind, "world": case.world, "precision": case.precision, "case": case.in_full}
    if isinstance(ran, str):
        return row | dict.fromkeys((*NUMBERS, "of_bound"), float("inf")) | {"passed": False, "error": ran}
    numbers = compare(ran[0], expected.result)
    share, farthest = (None, "") if expected.bound is None else expected.bound.share(ran[0])
    passed = all(numbers[n] <= expected.tolerance[n] for n in NUMBERS) and (share is None or share <= 1)
    row |= numbers | {"of_bound": share, "passed": passed}
    return row if share is None or share <= 1 else row | {"farthest": farthest}


def _say_where(failed: list[tuple[Case, dict[str, Any]]], expected: dict[Case, Expected], run: Run, say: Say) -> None:
    """For each (case, table row) that failed, print its ranks' errors, or run it again with a Tape (a record of its tensors) and print its
    first deviation."""
    standards: dict[Case, Standard] = {}
    for case, row in failed:
        twin, where = twin_of(case), "its ranks failed"
        no_twin = case.recipe is not None and not known(twin.run())
        if "error" in row:
            say(row["error"])
            if not any(words in row["error"] for words in ("gave no result", "still running")):  # ranks raised errors
                ((_, ran),) = run([case], case.world, taped=True)
                row["where"] = where = _where(case, ran, None, row)
        elif no_twin:
            say(f"{case.layout} {case.kind}: the plain twin does not implement this recipe, so the place of the fault is unknown")
        else:
            standard = standards.setdefault(twin, Standard(expected[twin]))
            ((_, ran),) = run([case], case.world, taped=True)
            row["where"] = where = _where(case, ran, standard, row)
        if "error" in row or not no_twin:
            say(f"first deviation in {case.layout} {case.kind} {case.precision}: {where}")


def place_of(case: Case, row: dict[str, Any]) -> str:
    """Run a failed case once more with a Tape (a record of its tensors), and return text about the first value that deviates."""
    if not known(case.run()):
        return "unknown: the plain twin does not implement this recipe"
    ((_, ran),) = run_world([case], case.world, taped=True)
    return _where(case, ran, Standard(Expected.of(twin_of(case))), row)


def _where(case: Case, ran: Ran, standard: Standard | None, row: dict[str, Any]) -> str:
    """Return text about a case's first deviating value, or about the module after which its ranks failed. ran: outcome of a second run with
    a Tape. standard: the reference's tape; None if there is none."""
    if isinstance(ran, str):
        return f"its ranks failed after {last_module(ran) or 'a module that is not known'}"
    if standard is None or ran[1] is None:
        return "not found: its ranks failed only in the first run"
    found = standard.first_deviation(ran[1], ran[0], case)
    if found is None and "farthest" in row:
        return f"{_SAID.get(row['farthest'], row['farthest'])} (farther from the twin in fp32 than {case.precision} explains)"
    return str(found or "not found: no deviation is larger than rounding")


def _sums(rows: list[dict[str, Any]], expected: dict[Case, Expected], nproc: int, seconds: float) -> Iterator[str]:
    """Yield the lines of text below the table: the number of rows that passed, the seconds, and the tolerances in 16 bits."""
    passed = sum(row["passed"] for row in rows)
    chosen = f"{counted(len(rows), 'layout')} of up to {counted(nproc, 'process')}"
    yield f"{passed} passed, {len(rows) - passed} failed: {chosen} in {seconds:.0f} s"
    yield "tolerances: fp32 1e-5 for every number; in lower precision twice the effect of rounding, as measured in this run:"
    for twin, e in expected.items():
        if rounds(twin):
            yield f"  {name_of(twin)}: " + " ".join(f"{number} {value:.0e}" for number, value in e.limits.items())


def name_of(twin: Case) -> str:
    """Return a reference case's name for the table: model, precision, and all fields that differ from their defaults."""
    words = (
        (f"of {counted(twin.layers, 'layer')}", twin.layers != Case.layers),
        (f"of {counted(twin.experts, 'expert')}", twin.experts != Case.experts),
        (f"of {counted(twin.length, 'token')}", twin.length != Case.length),
        (f"of {counted(twin.microbatches, 'micro-batch')}", twin.microbatches > 1),
        ("padded", twin.padded),
        ("packed", twin.packed),
        ("overflow", twin.overflow),
        (f"of {counted(twin.batch, 'sequence')}", twin.batch != Case.batch),
        (f"in {counted(twin.parts, 'part')}", twin.parts > 1),
        (f"in {twin.blocks} x {twin.blocks} blocks", twin.blocks > 1),
        (f"{twin.head_tiles} tiles of the head", twin.head_tiles > 1),
        (f"{twin.chunks} chunks of the loss", twin.chunks > 1),
    )
    more = "".join(f" {word}" for word, differs in words if differs)
    return f"{twin.model} {twin.precision}{more}" + (f", {twin.schedule} pp{twin.pp}" if twin.delayed else "")


def _line(layout: str, kind: str, world: object, precision: str, *cells: str) -> str:
    return f"{layout:<46} {kind:<6} {world:>5} {precision:<9} " + " ".join(f"{cell:>9}" for cell in cells)
