"""`python -m tests.campaigns restarts` measures ETTR, the productive share of a run's wall time, while ranks are killed now and then.

    moe train --nproc 2 --restarts 3; a random rank gets SIGKILL once in BETWEEN checkpoint intervals, at a random step of them

    ETTR = 1 - (lost seconds / all seconds)
    all seconds     from the first step to the last, including saves
    lost seconds    from the checkpoint that a run resumes from to its first new step: ending, restarting, repeated steps

The row passes if the run continued after each kill and ended well; with --full ETTR must also be at least AIM. By default there is one
kill with short intervals, in which a restart costs more than AIM allows, so ETTR is only reported.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from moe.launch.processes import find_ranks
from moe.records.metrics import METRICS, read_summary, whole_lines
from tests.campaigns.faults import Row
from tests.campaigns.hangs import warm_up
from tests.campaigns.lives import TINY

AIM, BETWEEN = 0.95, 20
FULL_S, SMALL_S = 20.0, 4.0  # seconds between two checkpoints
FULL_KILLS, SMALL_KILLS = 3, 1
_LONGEST_S = 3600.0
_END = 1 << 16  # bytes, more than a line of the records has


def rows(*, full: bool, rounds: int | None, only: str) -> Iterator[Row]:
    """Yield one row, of all kills: they pass if the run continued after each and ETTR is large enough."""
    name = f"restarts: a kill every {BETWEEN} intervals"
    if only not in name:
        return
    with tempfile.TemporaryDirectory(prefix="restarts-") as folder:
        home = Path(folder)
        warm_up(home, deepspeed=False)
        interval_s, kills = (FULL_S, FULL_KILLS) if full else (SMALL_S, SMALL_KILLS)
        yield measured(home, name, interval_s=interval_s, kills=rounds or kills, aim=AIM if full else 0.0)


def measured(home: Path, name: str, *, interval_s: float, kills: int, aim: float) -> Row:
    """Train a run for `kills` expected kills. Return the row with its ETTR. interval_s: between checkpoints. aim: least ETTR."""
    steps_a_second = _speed(home)
    every = max(1, round(interval_s * steps_a_second))
    steps = every * BETWEEN * kills
    draw = random.Random(0)
    out = home / "killed"
    row = Row(name)
    with _train(home, out, steps=steps, every=every) as process:
        for number in range(kills):
            due = (number + draw.uniform(0.1, 0.9)) * BETWEEN * every
            while process.poll() is None and _step(out) < due:
                time.sleep(0.05)
            if ranks := find_ranks(process.pid):
                row.tried += 1
                os.kill(draw.choice(ranks).pid, signal.SIGKILL)
        code = process.wait(_LONGEST_S)
    told = (home / "killed.log").read_text(errors="replace")
    lines = whole_lines(out / METRICS)
    summary = read_summary(out) or {}
    whole_s, gaps = shares(lines)
    row.seconds_median = round(statistics.median(gaps), 2) if gaps else 0.0
    ettr = 1 - sum(gaps) / whole_s if whole_s else 0.0
    row.fault = f"{name} of {interval_s:g} s: ETTR {ettr:.3f}"
    if row.tried < kills:
        row.problems.append(f"the run had ended before {kills - row.tried} of {kills} kills: {told[-300:]!r}")
    if code or summary.get("redone", {}).get("restarts") != row.tried:
        row.problems.append(f"the run ended with {code}, restarts {summary.get('redone')}: {told[-300:]!r}")
    if ettr < aim:
        row.problems.append(f"ETTR {ettr:.3f}, {aim} was the aim: {sum(gaps):.0f} of {whole_s:.0f} s were between lives")
    row.lost = len(row.problems)
    row.held = max(0, row.tried - row.lost)
    return row


def shares(lines: Iterable[dict[str, Any]]) -> tuple[float, list[float]]:
    """Return (seconds from the end of the first step to the end of the last, lost seconds of each resume). lines: of metrics.jsonl."""
    gaps: list[float] = []
    times: list[float] = []
    resumed = False
    for line in lines:
        if line["kind"] == "train":
            if resumed and times:
                gaps.append(line["time"] - times[-1] - line["step_seconds"])
            times, resumed = [*times, line["time"]], False
        resumed = resumed or line.get("event") == "resumed"
    return (times[-1] - times[0] if times else 0.0), gaps


def _speed(home: Path) -> float:
    """Measure a short run like the one to be killed. Return its steps a second."""
    with _train(home, home / "speed", steps=150, every=0) as process:
        process.wait(_LONGEST_S)
    lines = [line for line in whole_lines(home / "speed" / METRICS) if line["kind"] == "train"][50:]
    return (len(lines) - 1) / float(lines[-1]["time"] - lines[0]["time"])


def _train(home: Path, out: Path, *, steps: int, every: int) -> subprocess.Popen[bytes]:
    values = TINY | {"data.path": f"{home / 'text.txt'}", "train.steps": f"{steps}", "train.save_every": f"{every}"}
    words = [f"--{key}={value}" for key, value in (values | {"train.eval_every": "0"}).items()]
    command = [sys.executable, "-m", "moe", "train", "switch_tiny", "--nproc", "2", "--restarts", "3", "--out", str(out), *words]
    with out.with_suffix(".log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"XDG_CACHE_HOME": str(home / "cache")})


def _step(out: Path) -> int:
    """Return the newest step recorded since the last start; 0 before its first step."""
    path = out / METRICS
    if not path.exists():
        return 0
    with path.open("rb") as file:  # only the end of the file, because reading it all would take measured time
        file.seek(max(0, path.stat().st_size - _END))
        lines = file.read().split(b"\n")
    last = json.loads(lines[-2]) if len(lines) > 1 else {}
    return int(last["step"]) if last.get("kind") == "train" else 0
