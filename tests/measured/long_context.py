"""Trains sequences of 32,768 tokens on four sequence-parallel ranks, under a memory limit that is too small for one process.

    moe train long_context_tiny --nproc 4                                  with the limit on each process: trains
    moe train long_context_tiny --nproc 1 --degrees.sp 1                   with the same limit: ends in one line, `memory: got none left`
    both, with 4,096 tokens, without a limit                               the same losses

The limit is on a process's data (RLIMIT_DATA, as `ulimit -d` sets it), as in `python -m tests.measured fit`. Passes if the ranks train,
one process does not, and the losses of the short sequences agree (in fp32). One sequence in a batch. Linux only. `python -m
tests.measured long-context --steps 2 --json FILE`, some minutes.
"""

from __future__ import annotations

import json as json_format
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from moe.launch import exit_codes
from moe.records.metrics import read
from moe.records.results import write_json

RECIPE, LIMIT_BYTES, SHORT, TOLERANCE = "long_context_tiny", 1000 * 2**20, 4096, 1e-5
FLAGS = (
    "--pipeline.microbatches=2",
    "--precision.compute=fp32",
    "--train.eval_every=0",
    "--train.measure_speed=false",
    "--train.report=false",
)
ALONE = ("--nproc", "1", "--degrees.sp=1")
TOGETHER = ("--nproc", "4")


def main(*, steps: int = 2, json: str | None = None) -> int:
    """Print each run and how it ended. Returns 0 if all ended as described above."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            run("four ranks", TOGETHER, folder / "0", steps=steps, limit_bytes=LIMIT_BYTES),
            run("one process", ALONE, folder / "1", steps=steps, limit_bytes=LIMIT_BYTES),
        ]
        short = (f"--model.max_length={SHORT}",)
        rows += [
            run("four ranks, short", (*TOGETHER, *short), folder / "2", steps=steps, limit_bytes=None),
            run("one process, short", (*ALONE, *short), folder / "3", steps=steps, limit_bytes=None),
        ]
    together, alone, ours, expected = rows
    together["passed"], alone["passed"] = together["said"] is None, alone["said"] is not None
    expected["passed"] = expected["said"] is None
    ours["passed"] = len(ours["losses"]) == steps and same(ours["losses"], expected["losses"])
    if json:
        write_json(json, verb="bench long-context", rows=rows, limit_bytes=LIMIT_BYTES, tolerance=TOLERANCE, steps=steps)
    return exit_codes.of(all(row["passed"] for row in rows))


def run(what: str, words: tuple[str, ...], out: Path, *, steps: int, limit_bytes: int | None) -> dict[str, Any]:
    """Train in new processes. Return the losses and the peak memory of a process, or the line with which the run failed."""
    command = [sys.executable, "-m", "moe", "train", RECIPE, "--out", str(out), f"--train.steps={steps}", "--force", *FLAGS, *words]

    def limited() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited, timeout=3600)
    row: dict[str, Any] = {"kind": what, "flags": " ".join(words), "limit_bytes": limit_bytes, "said": None, "losses": []}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "memory: got" in line]
        if len(lines) != 1 or "Traceback" in done.stderr:
            raise RuntimeError(f"{' '.join(command)} ended otherwise than for want of memory:\n{done.stdout}{done.stderr}")
        row["said"] = lines[0]
    else:
        row["losses"] = [line["loss"] for line in read(out) if line["kind"] == "train"]
        summary = json_format.loads((out / "summary.json").read_text())
        row |= {key: summary[key] for key in ("peak_memory_bytes", "tokens_per_second", "train_seconds")}
    limit = "no limit" if limit_bytes is None else f"{limit_bytes / 2**30:.2f} GiB"
    told = row["said"] or f"losses {' '.join(f'{x:.5f}' for x in row['losses'])}, peak {row['peak_memory_bytes'] / 2**30:.2f} GiB a process"
    print(f"{what:<20}{limit:<10}{told}", flush=True)
    return row


def same(a: list[float], b: list[float]) -> bool:
    """Whether two runs have the same losses, up to the relative TOLERANCE."""
    return len(a) == len(b) > 0 and all(abs(x / y - 1) <= TOLERANCE for x, y in zip(a, b, strict=True))
