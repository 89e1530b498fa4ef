"""Compiles the Triton kernels at published shapes for GPUs that need not be present, and prints a table of registers and spills.

Each row: a kernel and a tile's rows. A cell: the tile's columns, a thread's registers, bytes that ptxas spills, and buffers, the fewest
copies of a tile under way to shared memory; the worst of all variants (activations, gathered operands, weights' dtype, remainders).
`python -m tests.measured kernels --also FOLDER --json FILE`. FOLDER: another version of Triton, installed there by `pip install --target`.
"""

from __future__ import annotations

import json as json_format
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from moe.launch import exit_codes
from moe.records.results import write_json

TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
KERNELS = ("up", "product", "persistent_product", "back", "weights")  # the ones that multiply
MOST_SHARED = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100a": 227 * 1024}  # bytes of a program
MOST_SPILLED = 32  # bytes of a thread, whose registers hold about 1,000
VERSION = "import triton; print(triton.__version__)"
CASES = "import tests.support.compiled as c, json; print(json.dumps(list(c.PUBLISHED)))"


def main(*, also: str | None = None, json: str | None = None) -> int:
    """Print the table. Returns 1 if a kernel needs too much shared memory, spills over 32 bytes, loads two bytes at a time, or
    ptxas warns of it."""
    rows: list[dict[str, Any]] = []
    cases = json_format.loads(_python(None, "-c", CASES))
    runs = [(folder, _python(folder, "-c", VERSION).strip(), target) for folder in dict.fromkeys((None, also)) for target in TARGETS]
    with ThreadPoolExecutor(2) as pool:  # a compiler uses one core
        printed = pool.map(lambda run: _python(run[0], "-m", "tests.support.compiled", str(run[2]), *cases).splitlines(), runs)
        for (_, version, target), lines in zip(runs, printed, strict=True):
            rows += [{"triton": version, "target": TARGETS[target]} | json_format.loads(line) for line in lines]
            print(f"Triton {version}, {TARGETS[target]}: {len(lines)} kernels", flush=True)
    rows = [row | {"passed": good(row)} for row in rows]
    print(table(rows))
    for row in rows:
        if not row["passed"]:
            print(f"FAIL {row}")
    if json:
        write_json(json, verb="measured kernels", rows=rows)
    return exit_codes.of(all(row["passed"] for row in rows))


def good(row: dict[str, Any]) -> bool:
    """Return whether ptxas spills at most MOST_SPILLED bytes and warns of nothing, shared memory suffices, and a kernel that multiplies has
    no 2-byte loads."""
    if row["shared"] > MOST_SHARED[row["target"]]:
        return False
    return row["spilled"] <= MOST_SPILLED and not row["warnings"] and not (row["narrow_loads"] and row["kernel"] in KERNELS)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of the kernels that multiply: columns/registers/bytes spilled/buffers of the worst variant of each tile."""
    rows = [row for row in rows if row["kernel"] in KERNELS]
    machines = [(target, version) for target in TARGETS.values() for version in sorted({row["triton"] for row in rows})]
    lines = ["| rows | " + " | ".join(" ".join(machine) for machine in machines) + " |", "|---" * (1 + len(machines)) + "|"]
    for kernel in KERNELS:
        for height in sorted({_sides(row)[0] for row in rows if row["kernel"] == kernel}):
            of_tile = [row for row in rows if row["kernel"] == kernel and _sides(row)[0] == height]
            cells = [_cell([row for row in of_tile if (row["target"], row["triton"]) == machine]) for machine in machines]
            lines.append(f"| `{kernel}` {height} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _sides(row: dict[str, Any]) -> list[int]:
    return [int(side) for side in row["tile"].split("x")]


def _cell(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "-"
    (columns,) = {_sides(row)[1] for row in rows}
    worst = columns, max(r["registers"] for r in rows), max(r["spilled"] for r in rows), min(r["buffers"] for r in rows)
    warnings = sorted({warning for row in rows for warning in row["warnings"]})
    return " ".join(["/".join(map(str, worst)), *warnings])


def _python(folder: str | None, *words: str) -> str:
    """Return what Python prints with Triton imported from `folder`, without the interpreter and with an empty cache."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": cache}
        if folder is not None:
            environment["PYTHONPATH"] = str(Path(folder).resolve())
        done = subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=3000)
    if done.returncode:
        raise RuntimeError(f"python {' '.join(words)} failed:\n{done.stderr}")
    return done.stdout
