"""Compares the speed of a bench between this checkout and an earlier commit, in turn on one machine.

    python -m tests.measured commits --before 903419f7 --bench step --only fp32
    python -m tests.measured commits --before 903419f7 --bench dispatch --only E64 --pairs 7

In each pair both sides run `moe bench BENCH` twice, every second pair in reverse order: once the bench reads the processor time of its
process, which other programs on the machine change little, and once the clock. A ratio is this checkout's shortest time over the commit's,
because other programs only add time. `noise` is the commit's longest time over its shortest, by the processor: the same code varies by
this factor. Only this project's rows are compared.
"""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from moe.launch import exit_codes
from moe.records.results import write_json
from tests.measured.losses import ROOT, checked_out

MOST = 1.02  # largest ratio of processor times that passes
CLOCKS = {"processor": "process_time", "wall": "perf_counter"}
# runs a bench of the code on PYTHONPATH with the given clock
PROGRAM = """
import sys, time
from types import SimpleNamespace
from moe.bench import timing
from moe.cli.main import main
timing.time = SimpleNamespace(perf_counter=getattr(time, sys.argv[1]))
sys.exit(main(sys.argv[2:]))
"""


def main(*, before: str, bench: str = "step", only: str | None = None, pairs: int = 5, rounds: int = 5, json: str | None = None) -> int:
    """Print the ratios of each of the bench's rows after each pair, from all pairs so far. Returns 1 if a ratio of
    processor times is above MOST. only: the bench's flag --only. rounds: of each run of the bench."""
    flags = [bench, "--rounds", str(rounds), "--peers", "none", *(["--only", only] if only else [])]
    took: list[dict[tuple[str, str], dict[str, float]]] = []
    rows: list[dict[str, Any]] = []
    with checked_out(before) as tree:
        for number in range(pairs):
            took.append(_pair(tree, flags, reverse=number % 2 == 1))
            rows = [_row(name, took) for name in took[0]["before", "wall"]]
            print(f"{f'{len(took)} pairs':<60}{'processor':>10}{'wall':>7}{'noise':>7}")
            for row in rows:
                verdict = "" if row["passed"] else "  SLOWER"
                print(f"{row['row']:<60}{row['processor']:>10.3f}{row['wall']:>7.3f}{row['noise']:>7.2f}{verdict}", flush=True)
            if json:
                write_json(json, verb="measured commits", rows=rows, before=before, bench=bench, pairs=len(took), rounds=rounds)
    return exit_codes.of(all(row["passed"] for row in rows))


def _row(name: str, took: list[dict[tuple[str, str], dict[str, float]]]) -> dict[str, Any]:
    """Return the ratios of one row of the bench. took: for each pair, (side, clock) -> seconds of each row."""
    times = {(side, clock): [one[side, clock][name] for one in took] for side in ("before", "after") for clock in CLOCKS}
    ratio = {clock: min(times["after", clock]) / min(times["before", clock]) for clock in CLOCKS}
    noise = max(times["before", "processor"]) / min(times["before", "processor"])
    return {"row": name, **ratio, "noise": noise, "passed": ratio["processor"] <= MOST}


def _pair(tree: Path, flags: list[str], *, reverse: bool) -> dict[tuple[str, str], dict[str, float]]:
    """Return (side, clock) -> seconds of each row."""
    sides = {"before": tree, "after": ROOT}
    order = [(side, clock) for clock in CLOCKS for side in (reversed(sides) if reverse else sides)]
    return {(side, clock): seconds(sides[side], flags, clock=CLOCKS[clock]) for side, clock in order}


def seconds(tree: Path, flags: list[str], *, clock: str) -> dict[str, float]:
    """Run `moe bench` with the code in the folder `tree`. Return name -> seconds for each row of this project. clock: a function of
    Python's module time."""
    with tempfile.TemporaryDirectory() as out:
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM, clock, "bench", *flags, "--json", f"{out}/rows.json"]
        done = subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(flags)} in {tree}\n{done.stdout}{done.stderr}")
        rows = json_format.loads(Path(out, "rows.json").read_text(encoding="utf-8"))["rows"]
    return {_name(row): row["seconds"] if "seconds" in row else 1 / row["tokens_per_second"] for row in rows if _is_ours(row)}


def _is_ours(row: dict[str, Any]) -> bool:
    return str(row.get("implementation")).startswith("ours") and ("seconds" in row or "tokens_per_second" in row)


def _name(row: dict[str, Any]) -> str:
    return " ".join(str(row[key]) for key in ("implementation", "shape", "dtype", "precision", "routing") if key in row)
