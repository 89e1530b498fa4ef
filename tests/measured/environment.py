"""Measures two settings of environment variables that `moe` makes (moe/launch/environment.py).

    caches     size of the caches of compiled matrix products, 32 or torch's default of 1,024 entries: peak memory and processor seconds of
               training on two ranks
    threads    whether waiting OpenMP threads spin or sleep, in training and in generating with a thread for each core: alone, and next to
               two busy processes of lower priority in another session, as of another user

Each setting runs in a new process, all in turn; ratios are of times in the same round. Seconds are of the whole command, processor seconds
include its ranks. "unset" is the default of GNU's OpenMP library.
`python -m tests.measured environment --rounds 3 --only "threads training alone" --json FILE`. Linux.
"""

from __future__ import annotations

import json as json_format
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moe.bench.timing import ratio
from moe.launch import exit_codes
from moe.launch.environment import BEFORE_TORCH
from moe.records.metrics import read
from moe.records.results import write_json
from parallel.machine import usable_cores

RECIPE, TOKENS = "switch_tiny", 20
CAPACITY = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
CACHES = {"1024": dict.fromkeys(CAPACITY, "1024"), "32": dict.fromkeys(CAPACITY, "32")}
WAITING = {
    "unset": {"GOMP_SPINCOUNT": "300000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
SHORT = ("--train.report=false", "--train.measure_speed=false", "--train.sample_tokens=0", "--train.eval_every=0")
ALLOWED = 0.10  # largest allowed increase of processor seconds over torch's default: 10 %


def main(*, nproc: int = 2, steps: int = 20, rounds: int = 3, only: str | None = None, json: str | None = None) -> int:
    """Print the table. Returns 1 if losses or texts differ between settings, if smaller caches save no memory, or if the settings of `moe`
    need over 10 % more processor time.
    """
    rows: list[dict[str, Any]] = []
    print(
        f"{'kind':<9}{'work':<12}{'load':<6}{'setting':<12}{'processors':>12}{'over first':>11}{'clock':>9}{'over first':>11}{'peak':>10}"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if chosen("caches", only):
            rows += compare("caches", "training", CACHES, train(folder / "caches", steps=steps, nproc=nproc), rounds=rounds)
        loads = {"alone": 0, "beside others": 2}
        wanted = [(work, load) for work in ("training", "generating") for load in loads if chosen(f"threads {work} {load}", only)]
        words = train(folder / "threads", steps=steps, nproc=1)
        generating = ["generate", words[words.index("--out") + 1], "--tokens", str(TOKENS), "--temperature", "0"]
        if wanted:
            command(words, WAITING["passive"])  # trains the model that generates
        for work, load in wanted:
            what = words if work == "training" else generating
            rows += compare("threads", work, WAITING, what, rounds=rounds, busy=loads[load])
    if json:
        write_json(
            json, verb="bench environment", rows=rows, recipe=RECIPE, steps=steps, rounds=rounds, tokens=TOKENS, threads=usable_cores()
        )
    return exit_codes.of(all(row["passed"] for row in rows))


def chosen(name: str, only: str | None) -> bool:
    """Whether `--only` selects the comparison with this name."""
    return only is None or only in name


def train(out: Path, *, steps: int, nproc: int) -> list[str]:
    """Return the words of a `moe train` command without report, samples and evaluation."""
    return ["train", RECIPE, "--out", str(out), "--fresh", "--nproc", str(nproc), f"--train.steps={steps}", *SHORT]


def compare(
    kind: str, work: str, settings: dict[str, dict[str, str]], words: list[str], *, rounds: int, busy: int = 0
) -> list[dict[str, Any]]:
    """Run the command `words` with each setting (name -> environment variables). Return a table row for each: medians over rounds, and
    ratios to the first setting in the same round. busy: number of busy processes at the same time.
    """
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    others = os.getloadavg()[0]  # load by other programs
    with busy_processes(busy):
        for number in range(rounds):
            for name in list(settings)[:: 1 if number % 2 == 0 else -1]:
                found[name].append(command(words, settings[name]))
    first = found[next(iter(settings))]
    rows = []
    for name, runs in found.items():
        row: dict[str, Any] = {
            "kind": kind,
            "work": work,
            "load": busy,
            "setting": name,
            "environment": settings[name],
            "load_average": others,
        }
        for what in ("processor_seconds", "seconds"):
            row[what] = statistics.median(run[what] for run in runs)
            row[f"{what}_over_first"] = ratio([run[what] for run in runs], [run[what] for run in first])
            row[f"{what}_of_rounds"] = [run[what] for run in runs]
        row["peak_bytes"] = max(run["peak_bytes"] for run in runs)
        row["same_result"] = all(run["result"] == first[0]["result"] for run in runs)
        default = settings[name].items() <= BEFORE_TORCH.items()
        row["passed"] = row["same_result"] and not (default and row["processor_seconds_over_first"] > 1 + ALLOWED)
        if kind == "caches" and default:
            row["passed"] &= row["peak_bytes"] < max(run["peak_bytes"] for run in first)
        rows.append(row)
        used, took, more = row["processor_seconds"], row["seconds"], row["processor_seconds_over_first"]
        peak = f"{row['peak_bytes'] / 2**20:.0f} MiB" if row["peak_bytes"] else ""
        print(
            f"{kind:<9}{work:<12}{busy:<6}{name:<12}{used:>10.1f} s{more:>7.2f}{took:>7.1f} s{row['seconds_over_first']:>7.2f}"
            f"{peak:>10}{'' if row['passed'] else '  FAIL'}",
            flush=True,
        )
    return rows


def command(words: list[str], settings: dict[str, str]) -> dict[str, Any]:
    """Run a `moe` command with these environment variables instead of the user's. Return its seconds, peak memory and results."""
    names = {name for some in (*CACHES.values(), *WAITING.values()) for name in some} | {"OMP_NUM_THREADS"}
    environment = {name: value for name, value in os.environ.items() if name not in names} | settings
    began, before = time.perf_counter(), os.times()
    done = subprocess.run([sys.executable, "-m", "moe", *words], env=environment, capture_output=True, text=True, timeout=1200)
    seconds, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise RuntimeError(f"moe {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    row: dict[str, Any] = {"seconds": seconds, "processor_seconds": used, "peak_bytes": 0, "result": done.stdout}
    if words[0] == "train":
        out = Path(words[words.index("--out") + 1])
        row["peak_bytes"] = json_format.loads((out / "summary.json").read_text())["peak_memory_bytes"]
        row["result"] = [line["loss"] for line in read(out) if line["kind"] == "train"]
    return row


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Within this context, `count` busy processes run at a lower priority. Each has its own session, because Linux may divide cores between
    sessions first.
    """
    count_on = "import os\nos.nice(10)\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", count_on], start_new_session=True) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()
