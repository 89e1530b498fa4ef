"""`moe verify --types`: runs each layout for two steps, and checks laws: relations that must hold between the tensors of its ranks,
for example that copies of a weight are equal bit by bit (moe/verify/types/laws.py).

It has no twin (a second implementation) and no expected numbers: it compares tensors of ranks with each other. So it shares nothing with
the comparison of `moe verify` but the layouts, and it finds only faults of layouts, not of the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from moe.launch import exit_codes
from moe.records.results import write_json
from moe.verify.cases import OVERFLOWS, Case
from moe.verify.kinds import KINDS, cases, recipe_cases, rows_with
from moe.verify.layouts import Inside, compute, on_forks, on_one_core
from moe.verify.types.laws import check
from moe.verify.types.watch import Watch
from moe.verify.verify import Say, say_now
from parallel.data.kinds import ENGINES, PLAIN
from parallel.errors import counted, some
from parallel.mesh.mesh import Degrees, Mesh


def main(
    *,
    nproc: int | None = None,
    json: str | None = None,
    only: str | None = None,
    kinds: str = ",".join(KINDS),
    timeout_s: float | None = None,
    recipe: str | None = None,
    say: Say = say_now,
) -> int:
    """Print a row for each layout of up to `nproc` processes (None: 2): number of laws of flows, and the largest difference of two flows
    divided by its bound. Return 1 if a law is broken in a layout.

    kinds: names in moe/verify/kinds.py, separated by commas. only: run only rows whose layout, kind or precision contains this text. json:
    file of the table. timeout_s: time limit for a layout of up to four ranks; eight ranks have twice this time. recipe: a user's recipe, of
    which a small version is tested.
    """
    nproc, started = nproc or 2, time.perf_counter()
    torch.set_num_threads(1)  # processes forked later must not inherit a thread pool
    found = cases(nproc, kinds=tuple(kinds.split(","))) if recipe is None else recipe_cases(recipe, nproc)[0]
    chosen = list(dict.fromkeys(rows_with(only, found)))
    ENGINES[PLAIN].load()  # imported before ranks are forked
    rows = list[dict[str, Any]]()
    say(_line("layout", "kind", "world", "precision", "laws", "of bound", ""))
    for world in sorted({case.world for case in chosen}):
        for row in checked([case for case in chosen if case.world == world], world, timeout_s=timeout_s):
            rows.append(row)
            cells = (row["layout"], row["kind"], world, row["precision"], row["laws"], f"{row['of_bound']:.2f}")
            say(_line(*cells, "pass" if row["passed"] else "FAIL"))
            for line in row["broken"]:
                say(f"  {line}")
    failed = sum(not row["passed"] for row in rows)
    without = sorted({_last(name) for row in rows for name in row["without"]})
    say(f"{len(rows) - failed} passed, {failed} failed: {counted(len(rows), 'layout')} in {time.perf_counter() - started:.0f} s")
    if without:
        say(f"parameters that no law of flows covers; only their copies and sums are checked: {some(without)}")
    if json is not None:
        write_json(json, verb="verify types", rows=rows)
    return exit_codes.of(bool(rows) and not failed)


def checked(chosen: list[Case], world: int, *, inside: Inside = nullcontext, timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
    """Run cases of `world` ranks, and yield a row for each. inside: makes the context in which every rank runs a case."""
    steps = [replace(case, steps=1 if case.delayed else OVERFLOWS + 2 if case.overflow else 2) for case in chosen]
    for case, seen in on_forks(partial(_watched, inside=inside), steps, world, timeout_s=timeout_s):
        row = {"layout": case.layout, "kind": case.kind, "world": world, "precision": case.precision, "case": case.in_full}
        if isinstance(seen, str):
            yield row | {"laws": 0, "of_bound": float("inf"), "broken": seen.splitlines(), "without": [], "passed": False, "error": seen}
            continue
        found = check(case.run(), seen)
        row |= {"laws": found.laws, "of_bound": found.largest, "broken": found.broken, "without": found.without}
        yield row | {"passed": not found.broken}


def _watched(rank: int, chosen: list[Case], inside: Inside) -> Iterator[dict[str, Any]]:
    on_one_core(rank)
    meshes: dict[Degrees, Mesh] = {}
    for case in chosen:
        with inside(), Watch() as watch:
            compute(case, rank=rank, meshes=meshes, watch=watch)
        yield asdict(watch.seen)


def _last(name: str) -> str:
    """Return a parameter's name without the number of its layer and without `.weight`: `attention.sinks` for
    `layers.3.attention.sinks.weight`."""
    return ".".join(word for word in name.removesuffix(".weight").split(".") if not word.isdigit() and word != "layers")


def _line(layout: str, kind: str, world: object, precision: str, laws: object, share: str, verdict: str) -> str:
    return f"{layout:<46} {kind:<6} {world:>5} {precision:<9} {laws:>4} {share:>9}  {verdict}"
