"""Starts of a tiny run for `python -m tests.campaigns`: started on a few ranks, ended by a fault, started again.

    this process, which has loaded torch -> a launcher that only waits -> ranks: moe.launch.launch, as a launcher starts it

All are forks of this process, so that a run takes a second or two. Ranks die with their launcher, as with a real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from moe.launch import status
from moe.launch.processes import TOKEN, Rank
from moe.records.metrics import METRICS, read, whole_lines
from parallel.process.libc import die_with
from parallel.store.lock import HELD
from parallel.store.stored import Reader

STEPS, SAVE_EVERY = 9, 3
LONGEST_S = 90.0  # longest time of one run in seconds, on a busy machine
TINY = {
    "model.num_layers": "2",
    "model.d_model": "16",
    "model.num_heads": "2",
    "model.d_ff": "24",
    "model.max_length": "12",
    "experts.num_experts": "4",
    "data.validation_share": "0.2",
    "optimizer.warmup_steps": "1",
    "train.steps": f"{STEPS}",
    "train.global_batch": "8",
    "train.eval_every": "4",
    "train.eval_sequences": "8",
    "train.save_every": f"{SAVE_EVERY}",
    "train.sample_tokens": "0",
    "train.measure_speed": "false",
    "train.report": "false",
    "train.timeout_s": "20",
}
Before = Callable[[int], None]  # called in each rank's process with its rank, before it trains


class Attempt:
    """One start of the run in the folder `out`. Its processes run when the constructor returns."""

    def __init__(self, home: Path, out: Path, overrides: Mapping[str, str], *, world: int = 2, before: Before | None = None) -> None:
        self.out, self.world, self.log = out, world, out.with_suffix(".log")
        self._codes = out.with_suffix(".codes")
        self._codes.unlink(missing_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        status.empty(out)
        heard, told = os.pipe()
        self.launcher = os.fork()
        if not self.launcher:
            try:
                os.close(heard)
                self._launch(home, overrides, before, told)
            finally:
                os._exit(1)
        os.close(told)
        with os.fdopen(heard) as pipe:
            self.ranks = [Rank(rank, int(pid)) for rank, pid in enumerate(pipe.readline().split())]

    def _launch(self, home: Path, overrides: Mapping[str, str], before: Before | None, told: int) -> None:
        os.setsid()
        port, this = _free_port(), os.getpid()
        pids = [os.fork() or self._rank(rank, port, home, overrides, before, launcher=this) for rank in range(self.world)]
        os.write(told, (" ".join(map(str, pids)) + "\n").encode())
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        self._codes.write_text(json.dumps(codes))
        os._exit(0)

    def _rank(self, rank: int, port: int, home: Path, overrides: Mapping[str, str], before: Before | None, *, launcher: int) -> int:
        code = 1
        try:
            die_with(launcher)  # a real launcher also ends ranks that have not called this yet
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(log, stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            places: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": self.world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": self.world}
            places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "XDG_CACHE_HOME": home / "cache", "CUDA_VISIBLE_DEVICES": ""}
            os.environ.update({key: str(value) for key, value in places.items()} | {"DS_ACCELERATOR": "cpu", TOKEN: str(launcher)})
            os.environ[HELD] = str(self.out.resolve())  # a rank writes its status file only if its launcher has set this
            if before is not None:
                before(rank)
            from moe.launch import launch

            words = [f"--{key}={value}" for key, value in (TINY | {"data.path": str(home / "text.txt")} | dict(overrides)).items()]
            code = launch.main(["switch_tiny", *words, "--out", str(self.out)])
            sys.stderr.flush()
        finally:
            os._exit(code)

    def steps(self) -> int:
        """The number of steps recorded so far."""
        return sum(line.get("kind") == "train" for line in whole_lines(self.out / METRICS))

    def reach(self, step: int) -> bool:
        """Wait until this number of steps is recorded. Returns False if the run ends or takes too long before."""
        until = time.monotonic() + LONGEST_S
        while self.steps() < step:
            if self.dead() or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def dead(self) -> list[int]:
        """The ranks that have ended."""
        for rank in self.ranks:
            rank.look()
        return [rank.rank for rank in self.ranks if rank.ended_at is not None]

    def send(self, number: int, ranks: list[int] | None = None) -> None:
        """Send a signal to some ranks, or to all."""
        for rank in self.ranks:
            if ranks is None or rank.rank in ranks:
                _send(rank.pid, number)

    def end(self, limit_s: float = LONGEST_S) -> list[int]:
        """Wait for the ranks, and kill the ranks that still run after `limit_s`. Returns the killed ranks."""
        until = time.monotonic() + limit_s
        while len(self.dead()) < self.world and time.monotonic() < until:
            time.sleep(0.01)
        stuck = [rank.rank for rank in self.ranks if rank.ended_at is None]
        self.send(signal.SIGKILL, stuck)
        while len(self.dead()) < self.world:
            time.sleep(0.01)
        os.waitpid(self.launcher, 0)
        return stuck

    def codes(self) -> list[int | None]:
        """Exit code of each rank after all have ended; None if the launcher was killed."""
        found: list[int | None] = json.loads(self._codes.read_text()) if self._codes.exists() else [None] * self.world
        return found

    def orphans(self) -> list[int]:
        """Return ids of processes that the ranks started and that still run."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                if os.getsid(process.pid) == self.launcher and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process.pid)
        return found

    def said(self) -> str:
        """Return the last part of the ranks' output."""
        return self.log.read_text(errors="replace")[-400:] if self.log.exists() else ""


def whole(home: Path, out: Path, overrides: Mapping[str, str], *, world: int = 2, before: Before | None = None) -> str:
    """Run from the newest checkpoint in `out`, or the beginning, to the end. Return the problem, or ""."""
    attempt = Attempt(home, out, overrides, world=world, before=before)
    stuck = attempt.end()
    codes = attempt.codes()
    return "" if not stuck and codes == [0] * world else f"the run ended with {codes}, stuck {stuck}: {attempt.said()!r}"


def left_behind(out: Path) -> dict[str, Any]:
    """Return a run's results for a bitwise comparison: losses of steps and evaluations, and hashes of the tensors of its checkpoints."""
    lines = read(out)
    found: dict[str, Any] = {"steps": [(line["step"], float(line["loss"]).hex()) for line in lines if line["kind"] == "train"]}
    found["evaluations"] = {line["step"]: float(line["validation_loss"]).hex() for line in lines if line["kind"] == "eval"}
    # a kill may leave a partly removed folder
    saved = [path for path in sorted((out / "checkpoints").glob("step-*")) if path.suffix != ".tmp"]
    return found | {path.name: hashes(path) for path in saved}


def hashes(checkpoint: Path) -> dict[str, str]:
    """Return {name: SHA-256} of a checkpoint's whole tensors (weights and moments), independent of shards, and of its counters."""
    reader = Reader(checkpoint)
    found = {"counters": str(reader.state["counters"])}
    for (name, kind), parts in reader.entries.items():
        tensor = reader.region(name, kind, tuple(slice(0, n) for n in parts[0]["shape"]))
        found[f"{name}/{kind}"] = hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return found


def differ(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Return the name of the first difference between two results of `left_behind`; "" if all is equal."""
    for name in [*wanted, *(name for name in found if name not in wanted)]:
        ours, theirs = found.get(name), wanted.get(name)
        if ours == theirs:
            continue
        if isinstance(ours, dict) and isinstance(theirs, dict):
            return f"{name}: {next(key for key in {**theirs, **ours} if ours.get(key) != theirs.get(key))} differs"
        return f"{name} differ" if ours is not None and theirs is not None else f"{name} is in one alone"
    return ""


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
