"""Trains a model that does not fit under a hard memory limit, by following the advice of each failing run.

    moe train dense_wide                         without a limit: gives the expected losses
    moe train dense_wide                         with the limit: ends in one line, `memory: got none left for ...; fix: add FLAGS`
    moe train dense_wide FLAGS                   repeated with the advised flags until a run trains

The limit is on a process's data (RLIMIT_DATA, as `ulimit -d` sets it). Under it an allocation fails as on a machine without free
memory. Runs start with --force, because `moe train` reads the limit and would refuse to start. Passes if the last run trains, in fp32,
with the losses of the first. Linux only.
"""

from __future__ import annotations

import json as json_format
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from moe.records.metrics import read
from moe.records.results import write_json
from parallel.data.deepspeed import compile_async_io
from parallel.process.extensions import use_extensions_dir

RECIPE, LIMIT_BYTES, TRIES, TOLERANCE = "dense_wide", 1500 * 2**20, 6, 1e-5


def main(*, steps: int = 4, json: str | None = None) -> int:
    """Print each run and how it ended. Returns 0 if the last one trained, with the losses of the run without a limit."""
    use_extensions_dir()
    compile_async_io(lambda text: print(text, flush=True))  # compiled without the limit, because the compiler needs more memory
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "disk").mkdir()
        rows = [run({}, folder / "0", steps=steps, limit_bytes=None)]
        flags: dict[str, str] = {}
        for number in range(1, 1 + TRIES):
            rows.append(run(flags, folder / str(number), steps=steps, limit_bytes=LIMIT_BYTES))
            if rows[-1]["said"] is None:
                break
            flags = flags | advised(rows[-1]["said"], folder / "disk")
    rows[-1]["passed"] = rows[-1]["said"] is None and same(rows[-1]["losses"], rows[0]["losses"])
    if json:
        write_json(json, verb="bench fit", rows=rows, limit_bytes=LIMIT_BYTES, tolerance=TOLERANCE)
    return 0 if rows[-1]["passed"] else 1


def run(flags: dict[str, str], out: Path, *, steps: int, limit_bytes: int | None) -> dict[str, Any]:
    """Train in a new process. Return its losses and peak memory, or the line with which it failed."""
    words = [word for key, value in flags.items() for word in (key, value)]
    command = [sys.executable, "-m", "moe", "train", RECIPE, "--out", str(out), "--train.steps", str(steps), "--force", *words]

    def limited() -> None:
        if limit_bytes is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limited, timeout=1200)
    shown = " ".join(words).replace(str(out.parent), "")
    print(f"{'no limit' if limit_bytes is None else f'{limit_bytes / 2**30:.2f} GiB':<10} moe train {RECIPE} {shown}", flush=True)
    row: dict[str, Any] = {"flags": shown, "limit_bytes": limit_bytes, "said": None, "losses": []}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "memory: got" in line]
        if len(lines) != 1 or "Traceback" in done.stderr:
            raise RuntimeError(f"{' '.join(command)} ended otherwise than for want of memory:\n{done.stdout}{done.stderr}")
        row["said"] = lines[0]
        print(f"           {lines[0]}", flush=True)
        return row
    row["losses"] = [line["loss"] for line in read(out) if line["kind"] == "train"]
    summary = json_format.loads((out / "summary.json").read_text())
    row |= {key: summary[key] for key in ("peak_memory_bytes", "tokens_per_second")}
    losses, peak, speed = " ".join(f"{x:.5f}" for x in row["losses"]), row["peak_memory_bytes"] / 2**30, row["tokens_per_second"]
    print(f"           losses {losses}, peak {peak:.2f} GiB, {speed:.0f} tokens/s", flush=True)
    return row


def advised(said: str, disk: Path) -> dict[str, str]:
    """Return the flags that a failed run's message advises. disk: folder for offload to disk."""
    found = re.search(r"; fix: add (.*)$", said)
    assert found is not None, said
    words = found[1].replace("FOLDER_ON_A_DISK", str(disk)).split()
    return dict(zip(words[::2], words[1::2], strict=True))


def same(a: list[float], b: list[float]) -> bool:
    """Whether two runs have the same losses, up to the relative TOLERANCE."""
    return len(a) == len(b) > 0 and all(abs(x / y - 1) <= TOLERANCE for x, y in zip(a, b, strict=True))
