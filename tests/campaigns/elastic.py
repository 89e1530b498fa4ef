"""Lost ranks, for `python -m tests.campaigns elastic`: the run continues with fewer processes, and must give the same results.

    moe train --nproc 4 --restarts 1 --elastic 2         a rank is killed after each start on four, until the run continues with two
    torchrun --nnodes 1:2 --nproc_per_node 2             one of two agents is killed with its ranks; later another agent joins

A try passes if the run ends well, its records name these numbers of processes, and its losses are those of an undisturbed run on one
process, up to rounding. For `moe train`, the last weights and moments must also be bitwise equal to a run that is resumed by hand on two
processes, with dp, ep and micro-batches given. Seconds: from the last kill to the end of the first new step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from moe.launch.environment import free_port
from moe.launch.processes import find_ranks
from moe.records.metrics import METRICS, read, whole_lines
from tests.campaigns.faults import Row
from tests.campaigns.hangs import warm_up
from tests.campaigns.lives import TINY, Attempt, hashes, whole

CLOSE = 1e-5  # largest relative difference of losses, because layouts sum in different orders
_LONGEST_S = 400.0
_KEPT = {"train.keep": "9", "precision.compute": "fp32"}
_AGENTS = {"train.steps": "1500", "train.save_every": "20", "train.eval_every": "0", "precision.compute": "fp32", "optimizer.lr": "1e-6"}
_NODES = ["--nnodes", "1:2", "--nproc_per_node", "2", "--max-restarts", "3", "--rdzv_backend", "c10d", "--rdzv_conf", "last_call_timeout=3"]


def rows(*, full: bool, rounds: int | None, only: str) -> Iterator[Row]:
    """Yield a row for each launcher, of one try, or of three with `full`."""
    torch.set_num_threads(1)
    tries = rounds or (3 if full else 1)
    with tempfile.TemporaryDirectory(prefix="elastic-") as name:
        home = Path(name)
        warm_up(home)
        for row, once in (("elastic: moe train, 4 processes, then 2", _moe_train), ("elastic: torchrun, 4, then 2, then 4", _torchrun)):
            if only in row:
                yield Row.of(row, tries, lambda number, once=once: once(home, number))  # type: ignore[misc]


def _moe_train(home: Path, number: int) -> tuple[str, float]:
    out, by_hand, wanted = (home / f"{name}-{number}" for name in ("run", "by-hand", "undisturbed"))
    attempt = Attempt(home, out, _KEPT, world=4)
    attempt.reach(4)
    attempt.send(signal.SIGTERM)
    attempt.end()
    shutil.copytree(out, by_hand)
    words = ["-m", "moe", "train", "switch_tiny", "--nproc", "4", "--restarts", "1", "--elastic", "2", "--out", str(out)]
    with _started(home, words, _KEPT, out.with_suffix(".log")) as process:
        killed: set[int] = set()
        while len(killed) < 2 and process.poll() is None:  # kills rank 1 of the first two starts
            for rank in find_ranks(process.pid):
                if rank.rank == 1 and rank.pid not in killed:
                    os.kill(rank.pid, signal.SIGKILL)
                    killed.add(rank.pid)
            time.sleep(0.1)
        at = time.time()
        code = process.wait(_LONGEST_S)
    problem = "" if code == 0 else f"the run ended with {code}"
    problem = problem or whole(home, by_hand, _KEPT | {"degrees.dp": "2", "degrees.ep": "2", "pipeline.microbatches": "2"})
    problem = problem or whole(home, wanted, _KEPT | {"degrees.ep": "1"}, world=1) or _unlike(out, wanted, worlds=[4, 2])
    last = "checkpoints/step-" + TINY["train.steps"]
    if not problem and hashes(out / last) != hashes(by_hand / last):
        problem = "the last weights or moments differ from the run that was resumed by hand"
    return _told(problem, out), _seconds(out, at)


def _torchrun(home: Path, number: int) -> tuple[str, float]:
    out, wanted, port = home / f"agents-{number}", home / f"alone-{number}", free_port()
    words = ["-m", "torch.distributed.run", *_NODES, "--rdzv_endpoint", f"127.0.0.1:{port}", "-m", "moe.launch.launch", "switch_tiny"]
    words += ["--elastic", "2", "--degrees.dp", "4", "--out", str(out)]
    with contextlib.ExitStack() as stack:

        def agent(name: str) -> subprocess.Popen[bytes]:
            return stack.enter_context(_started(home, words, _AGENTS, out.with_suffix(f".{name}")))

        first = agent("log")
        time.sleep(1.0)  # the first agent hosts the rendezvous, so only the second may be killed
        second = agent("second")
        if not _reach(first, out, 30):
            return _told("no steps on two agents", out), 0.0
        second.kill()
        at = time.time()
        if not _reach(first, out, _steps(out) + 30):
            return _told("no steps on the agent that is left", out), 0.0
        third = agent("third")
        codes = [process.wait(_LONGEST_S) for process in (first, third)]
    problem = "" if codes == [0, 0] else f"agents ended with {codes}"
    problem = problem or whole(home, wanted, _AGENTS | {"degrees.ep": "1"}, world=1) or _unlike(out, wanted, worlds=[4, 2, 4])
    return _told(problem, out), _seconds(out, at)


@contextlib.contextmanager
def _started(home: Path, words: list[str], values: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start `python *words` with the overrides `values`, and kill it when the context exits. log: receives its output."""
    overrides = [f"--{key}={value}" for key, value in (TINY | {"data.path": str(home / "text.txt")} | dict(values)).items()]
    env = os.environ | {"XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # without it torch 2.13 does not tell an agent that joins later where to meet
    with log.open("w") as file, subprocess.Popen([sys.executable, *words, *overrides], stdout=file, stderr=file, env=env) as process:
        try:
            yield process
        finally:
            process.kill()


def _reach(process: subprocess.Popen[bytes], out: Path, step: int) -> bool:
    until = time.monotonic() + _LONGEST_S
    while _steps(out) < step:
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def _steps(out: Path) -> int:
    return max((line["step"] for line in whole_lines(out / METRICS) if line["kind"] == "train"), default=0)


def _unlike(out: Path, wanted: Path, *, worlds: list[int]) -> str:
    """Compare the numbers of processes of the run's starts with `worlds`, and its losses with `wanted`'s. Return a difference, or ""."""
    resumed = [line for line in read(out) if line.get("event") == "resumed"]
    lives = [line["world"] for line in resumed]
    lives = [*([resumed[0]["world_before"]] if resumed and "world_before" in resumed[0] else []), *lives]
    changed = [world for place, world in enumerate(lives) if place == 0 or world != lives[place - 1]]
    if changed != worlds:
        return f"the records name lives on {lives} processes, not {worlds}"
    ours, theirs = ({line["step"]: line["loss"] for line in read(run) if line["kind"] == "train"} for run in (out, wanted))
    apart = [step for step in theirs if abs(ours.get(step, 0.0) - theirs[step]) > CLOSE * theirs[step]]
    return f"losses differ at steps {apart[:5]}" if apart else ""


def _seconds(out: Path, at: float) -> float:
    """Return the seconds from time `at` to the first step recorded by a start after it."""
    lines: list[dict[str, Any]] = whole_lines(out / METRICS)
    begun = next((line["time"] for line in lines if line.get("event") == "resumed" and line["time"] > at), at)
    return float(next((line["time"] - at for line in lines if line["kind"] == "train" and line["time"] > begun), 0.0))


def _told(problem: str, out: Path) -> str:
    return f"{problem}: {out.with_suffix('.log').read_text(errors='replace')[-300:]!r}" if problem else ""
