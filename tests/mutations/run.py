"""`python -m tests.mutations`: puts each fault into the running code, and checks that `moe verify` fails and names the place.

    control     each case without a fault must pass, without a deviating layer
    mutation    the same case with the fault on every rank: a column must fail, and a layer or parameter must be named

A fault of kind "test" is put in the same way into a process that runs one test, which must fail, and must pass without the fault.

The reference model runs in this process, without faults. A run also fails if no rank called a replacement ("not exercised") or if ranks
raise an error. If a target does not exist, the run ends before the first case.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import inf
from typing import Any

import pytest
import torch
import tyro

from moe.records.results import write_json
from moe.verify.cases import Case
from moe.verify.expected import NUMBERS, Expected, twin_of
from moe.verify.layouts import Ran, run_world
from moe.verify.verify import Say, judged, say_now
from moe.verify.where import Deviation, Standard, last_module
from parallel.errors import BadInput, cut
from tests.mutations.every import MUTATIONS, listed
from tests.mutations.mutation import Mutation, applied
from tests.mutations.types import main as of_types


def main(
    *, json: str | None = None, only: str | None = None, list: bool = False, types: bool = False, say: tyro.conf.Suppress[Say] = say_now
) -> int:
    """Print the table. Return 1 if a fault is not found, or found without a place. only: runs only mutations with this text in their name.
    list: prints the faults and their sources, and runs nothing. types: asks `moe verify --types` instead (types.py). Raises AttributeError
    or ModuleNotFoundError if a mutation's target does not exist."""
    if list:
        say(listed())
        return 0
    torch.set_num_threads(1)  # like `moe verify`, so that sums are rounded equally
    started = time.perf_counter()
    chosen = [m for m in MUTATIONS if only is None or only in m.name]
    if not chosen:
        names = ", ".join(m.name for m in MUTATIONS)
        raise BadInput("--only", got=only, needed=f"a part of a fault's name: {cut(names)}", fix=f'--only "{MUTATIONS[0].name}"')
    for edit in (edit for m in chosen for edit in m.edits):
        edit.found()
    if types:
        return of_types(chosen, json=json, say=say)
    standards = Standards()
    rows = []
    for row in controls(chosen, standards):
        rows.append(row)
        say(_line(row, "pass" if row["passed"] else "FAIL"))
        if "error" in row:
            say(row["error"])
    for mutation in chosen:
        called, case = mutation.not_called(), mutation.case
        if isinstance(case, str):
            row = of_test(mutation, case, code_of(case, inside=applied(mutation, called)), called=bool(called.all()))
            idle = []
        else:
            ((_, ran),) = run_world([case], case.world, taped=True, inside=partial(applied, mutation, called))
            idle = [edit.target for edit, there in zip(mutation.edits, called.tolist(), strict=True) if not there]
            row = found(mutation, case, ran, standards[twin_of(case)], idle=idle)
        rows.append(row)
        say(_line(row, "found" if row["passed"] else "NOT EXERCISED" if idle else "FAILED" if "error" in row else "MISSED"))
        if "error" in row:
            say(row["error"])
    failed = [row for row in rows if not row["passed"]]
    number = sum(row["passed"] for row in rows if row["mutation"] != "none")
    say(f"{number} of {len(chosen)} faults found and named, in {time.perf_counter() - started:.0f} s")
    if json:
        write_json(json, verb="mutations", rows=rows)
    return 1 if failed or not chosen else 0


class Standards(dict[Case, Standard]):
    """Case of a reference run -> its Standard, computed at the first access."""

    def __missing__(self, twin: Case) -> Standard:
        self[twin] = Standard(Expected.of(twin))
        return self[twin]


def controls(chosen: list[Mutation], standards: Standards) -> Iterator[dict[str, Any]]:
    """Run each case of these mutations without a fault, and yield its row."""
    for test in dict.fromkeys(m.case for m in chosen if isinstance(m.case, str)):
        code = code_of(test, inside=nullcontext())
        yield {"mutation": "none", "found_by": "" if code == 0 else "test", "layer": "", "passed": code == 0} | _about(test)
    kinds = {m.case: m.kind for m in chosen if not isinstance(m.case, str)}
    for world in sorted({case.world for case in kinds}):
        for case, ran in run_world([case for case in kinds if case.world == world], world, taped=True):
            standard = standards[twin_of(case)]
            row = judged(case, ran, standard.expected)
            where = _where(case, ran, standard)
            passed = row["passed"] and where is None
            out = {"mutation": "none", "found_by": _columns(kinds[case], row, standard), "layer": _said(where), "passed": passed} | _about(
                case
            )
            yield out | {"error": ran} if isinstance(ran, str) else out


def _about(case: Case | str) -> dict[str, Any]:
    """Return the columns that name a case or a test."""
    if isinstance(case, str):
        return {"layout": case, "kind": "", "precision": ""}
    return {"layout": case.layout, "kind": case.kind, "precision": case.precision}


def code_of(test: str, *, inside: AbstractContextManager[Any]) -> int:
    """Return the exit code of pytest for the test with this id, run in a forked process within the context `inside`."""

    def child() -> None:
        with open(os.devnull, "w") as nothing, inside:
            for output in (1, 2):
                os.dup2(nothing.fileno(), output)
            os._exit(int(pytest.main([test, "-q", "-p", "no:cacheprovider"])))

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return process.exitcode or 0


def of_test(mutation: Mutation, test: str, code: int, *, called: bool) -> dict[str, Any]:
    """Return the row of a mutation that a test must find. code: pytest's exit code; called: whether all replacements were called."""
    failed = called and code == pytest.ExitCode.TESTS_FAILED
    out = {"mutation": mutation.name, "found_by": "test" if failed else "", "layer": test.rpartition("::")[2] if failed else ""}
    return out | {"passed": failed, "where": ""} | _about(test) | {"source": mutation.source}


def found(mutation: Mutation, case: Case, ran: Ran, standard: Standard, *, idle: list[str]) -> dict[str, Any]:
    """Return the row of one mutation. It passes if a number fails and a layer or parameter is named. idle: targets that no rank called."""
    row = judged(case, ran, standard.expected)
    where = None if idle else _where(case, ran, standard)
    columns = f"not exercised: {', '.join(idle)}" if idle else _columns(mutation.kind, row, standard)
    passed = not idle and not isinstance(ran, str) and not row["passed"] and where is not None
    out = {"mutation": mutation.name, "found_by": columns, "layer": _said(where), "passed": passed, "where": str(where or "")}
    out |= _about(case) | {"source": mutation.source}
    return out | {"error": ran} if isinstance(ran, str) else out


def _where(case: Case, ran: Ran, standard: Standard) -> Deviation | None:
    if isinstance(ran, str):
        return Deviation(f"after {last_module(ran)}", "failure", 0, inf, 0.0)
    if ran[1] is None:
        return None
    return standard.first_deviation(ran[1], ran[0], case)


def _said(where: Deviation | None) -> str:
    """Return the name of the deviating layer or parameter; for a gradient norm, the first parameter with a wrong update and the norm's
    family."""
    if where is None:
        return ""
    return f"{where.then} (norm of {where.name})" if where.then else where.name


def _columns(kind: str, row: dict[str, Any], standard: Standard) -> str:
    """Return "kind: columns that failed", or an empty string if none failed."""
    if "error" in row:
        return "its ranks failed"
    failed = [n for n in NUMBERS if not row[n] <= standard.expected.tolerance[n]]
    failed += ["of_bound"] if row["of_bound"] is not None and not row["of_bound"] <= 1 else []
    return f"{kind}: {', '.join(failed)}" if failed else ""


def _line(row: dict[str, Any], verdict: str) -> str:
    about = f"{row['layout']} {row['kind']} {row['precision']}"
    name = "control" if row["mutation"] == "none" else row["mutation"]
    return f"{name:<40} {about:<38} {row['found_by']:<52} {row['layer']:<44} {verdict}"
