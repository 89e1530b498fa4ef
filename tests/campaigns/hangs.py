"""Hangs, for `python -m tests.campaigns hangs`: a rank of a small run stops, dies, raises, or calls another collective than the others.

    fork N ranks -> moe.launch.launch, as a launcher would start it -> the fault, in the third step -> every other rank's last line

A try passes if every other rank ends within the watchdog's limit plus SLACK_S, with a line that names the faulty rank and the point in the
step at which it was. The ranks are forks of this process, which has loaded torch, so that a try takes seconds.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from parallel.mesh.record import Record
from parallel.process.libc import die_with
from parallel.store.lock import HELD
from tests.campaigns.faults import Row
from tests.campaigns.hang_faults import (
    another,
    busy,
    holding_python,
    killed,
    lost_message,
    noted,
    nothing,
    raising,
    slow,
    split,
    stopped,
)
from tests.campaigns.two_machines import Machines, two_machines, why_not

LIMIT_S, SLACK_S, WORLD, CULPRIT = 2.0, 5.0, 3, 1
_TINY = {
    "model.num_layers": "2",
    "model.d_model": "16",
    "model.num_heads": "2",
    "model.d_ff": "24",
    "model.max_length": "12",
    "experts.num_experts": "6",
    "data.validation_share": "0.2",
    "optimizer.warmup_steps": "1",
    "train.steps": "6",
    "train.global_batch": "12",
    "train.eval_every": "4",
    "train.eval_sequences": "12",
    "train.save_every": "4",
    "train.sample_tokens": "0",
    "train.measure_speed": "false",
    "train.report": "false",
    "train.timeout_s": f"{LIMIT_S:g}",
}
_PIPELINE = {"degrees.pp": "3", "model.num_layers": "3", "pipeline.microbatches": "4"}
_COST = "cost of announcing a collective"
Install = Callable[[int, Path], None]  # (number of the try, file to which the time of the fault is written)


@dataclass(frozen=True)
class Case:
    """One fault. `install`: called in the faulty rank's process (`culprit`) before it trains. `said`: regular expression for the error
    line of the other ranks, in which CULPRIT is the faulty rank; if the run must continue, for its notes ("": it has none). `limit`: the
    time in which the run must end, in multiples of the watchdog's limit."""

    name: str
    install: Install
    said: str
    overrides: dict[str, str] = field(default_factory=dict)
    culprit: int = CULPRIT
    world: int = WORLD
    limit: float = 1.0
    absent: bool = False
    exits: int = 1


CASES = [
    Case("stopped (SIGSTOP) at a collective", stopped, r"CULPRIT is missing \(no answer; rank 1: last seen .* of step 3"),
    Case("stopped, the rank that holds the store", stopped, r"CULPRIT is missing: it holds the store", culprit=0),
    Case("killed (SIGKILL) at a collective", killed, r"CULPRIT is missing \(no answer; rank 1: last seen"),
    Case("killed, the rank that holds the store", killed, r"CULPRIT is missing: it holds the store", culprit=0, limit=0),
    Case(
        "stopped, ZeRO-2 (DeepSpeed's engine)", stopped, r"CULPRIT is missing \(no answer", {"sharding.kind": "zero", "sharding.stage": "2"}
    ),
    Case("stopped, FSDP", stopped, r"CULPRIT is missing \(no answer", {"sharding.kind": "fsdp"}),
    Case("stopped in a pipeline", stopped, r"CULPRIT is missing \(no answer", _PIPELINE),
    Case(
        "busy for ever in the forward pass", busy("the forward pass"), r"CULPRIT is missing \(rank 1 has been .* the forward pass of step 3"
    ),
    Case(
        "busy for ever, ZeRO-2", busy("the backward pass"), r"CULPRIT is missing .* the backward pass of step 3", {"sharding.kind": "zero"}
    ),
    Case("busy for ever in a stage", busy("F of stage"), r"CULPRIT is missing .* F of stage 1", _PIPELINE),
    Case("holding Python's lock in C", holding_python, r"CULPRIT is missing \(no answer"),
    Case(
        "raising in the forward pass",
        raising("the forward pass"),
        r"CULPRIT failed in the forward pass of step 3: ValueError: boom",
        limit=0,
    ),
    Case(
        "raising in the backward pass", raising("the backward pass"), r"CULPRIT failed in the backward pass of step 3: ValueError", limit=0
    ),
    Case(
        "raising in the optimizer",
        raising("the optimizer's step"),
        r"CULPRIT failed in the optimizer's step of step 3: ValueError",
        limit=0,
    ),
    Case(
        "raising while saving", raising("saving after the step"), r"CULPRIT failed in saving after the step of step 4: ValueError", limit=0
    ),
    Case("raising in evaluation", raising("evaluation"), r"CULPRIT failed in evaluation after the step of step 4: ValueError", limit=0),
    Case(
        "raising in the rank that holds the store", raising("the backward pass"), r"CULPRIT failed in the backward pass", culprit=0, limit=0
    ),
    Case("a message of a pipeline lost", lost_message, r"^message \d+ from rank 1 to rank 2 .* is lost", _PIPELINE),
    Case("a collective called twice", another("twice"), r"CULPRIT (made|is missing)"),
    Case("a collective left out", another("none"), r"CULPRIT (made|is missing)"),
    Case("a collective of another shape", another("shape"), r"CULPRIT made another collective \d+ over"),
    Case("a collective of another dtype", another("dtype"), r"CULPRIT made another collective \d+ over"),
    Case("splits that disagree", split, r"CULPRIT has other splits .*sends \d+ rows to rank \d", {"degrees.ep": "3"}),
    Case("a rank that never starts", nothing, r"CULPRIT did not come", absent=True, limit=5.0),
    Case("slow, below the limit: named, not ended", slow(0.7), r"^slow: rank 1 is late", exits=0),
]
_QUIET: list[dict[str, str]] = [
    {},
    {"degrees.ep": "2"},
    {"degrees.tp": "2", "tensor.sequence_parallel": "true"},
    {"degrees.sp": "2"},
    {"degrees.pp": "2", "pipeline.microbatches": "4", "pipeline.schedule": "chimera"},
    {"sharding.kind": "zero", "sharding.stage": "3"},
    {"degrees.pp": "2", "pipeline.microbatches": "4", "pipeline.schedule": "two_bw", "optimizer.clip_norm": "null"},
    {"sharding.kind": "fsdp"},
]
_CUT = Case(
    "link cut between two machines",
    noted,
    r"^(rank 1 is missing \(no answer|rank 0 is missing: it holds the store)",
    {"train.steps": "100000", "train.save_every": "0", "train.eval_every": "0"},
    world=2,
)


def rows(*, full: bool, rounds: int | None, only: str) -> Iterator[Row]:
    """Yield a row for each fault, and one for runs without a fault."""
    torch.set_num_threads(1)
    tries = rounds or (4 if full else 1)
    with tempfile.TemporaryDirectory(prefix="hangs-") as name:
        home = Path(name)
        warm_up(home)
        if only in _COST:
            yield _cost()
        for case in CASES:
            if only in case.name:
                yield Row.of(f"hang: {case.name}", tries, lambda number, case=case: once(case, number, home))  # type: ignore[misc]
        if only in _CUT.name:
            yield _cut(tries, home)
        quiet = Case("no fault: nothing said, nothing ended", nothing, "", exits=0)
        if only in quiet.name:
            clean = 30 if full else rounds or 3
            layouts = [
                replace(quiet, overrides=values | {"train.timeout_s": "6"}, world=2 if "degrees" in " ".join(values) else WORLD)
                for values in _QUIET
            ]
            yield Row.of(quiet.name, clean, lambda number: once(layouts[number % len(layouts)], number, home))


def warm_up(home: Path, *, deepspeed: bool = True) -> None:
    """Import the modules that ranks need once, and write their training text."""
    import torch._dynamo  # noqa: F401

    import moe.train.loop.trainer  # noqa: F401

    if deepspeed:
        from parallel.data.deepspeed import load_deepspeed

        load_deepspeed()
    draw = torch.Generator().manual_seed(0)
    letters = torch.randint(97, 123, (12_000,), generator=draw).tolist()
    (home / "text.txt").write_text("".join(" " if i % 6 == 5 else chr(c) for i, c in enumerate(letters)))


def _cut(tries: int, home: Path) -> Row:
    """Return the row of the pulled cable between two machines (network namespaces): each side must end by itself and name the other."""
    name = f"hang: {_CUT.name}"
    if reason := why_not():
        return Row(name, skipped=reason)
    with two_machines() as machines:
        return Row.of(name, tries, lambda number: once(_CUT, number, home, machines))


def once(case: Case, number: int, home: Path, machines: Machines | None = None, *, slack_s: float = SLACK_S) -> tuple[str, float]:
    """Run the case once. Return (problem or "", seconds from the fault to the last rank's end). `machines`: two machines with one rank
    each; the cable between them is pulled once the faulty rank has written its time of the fault."""
    with tempfile.TemporaryDirectory(dir=home) as name:
        folder = Path(name)
        port = _free_port()
        others = [rank for rank in range(case.world) if rank != case.culprit or case.exits == 0 or machines]
        if machines:
            machines.plug()
        there = [rank for rank in range(case.world) if not case.absent or rank != case.culprit]
        pids = {rank: _fork(case, rank, number, port, home, folder, machines) for rank in there}
        began, ended = time.time(), dict.fromkeys(others, 0.0)
        codes: dict[int, int] = {}
        pulled = False
        until = began + 60
        while time.time() < until and any(rank not in codes for rank in others):
            if machines and not pulled and (folder / "fault").exists():
                machines.pull()
                pulled = True
            for rank, pid in pids.items():
                if rank not in codes and os.waitpid(pid, os.WNOHANG)[0]:
                    codes[rank], ended[rank] = 0, time.time()
            time.sleep(0.02)
        for rank, pid in pids.items():
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        at = float((folder / "fault").read_text()) if (folder / "fault").exists() else began
        took = max(ended[rank] for rank in others) - at if all(rank in codes for rank in others) else time.time() - at
        return _judged(case, folder, [rank for rank in others if rank not in codes], took, slack_s), took


def _cost() -> Row:
    """Return a row with the seconds that announcing a collective to the watchdog takes: an all-to-all of 8 ranks, the slowest kind."""
    record, rows, splits, times = Record(0), torch.ones(64, 16), [8] * 8, 20_000
    began = time.process_time()  # processor time, so that other users of the core do not count
    for _ in range(times):
        record.announce("ep", tuple(range(8)), 0, name="all_to_all", label="layers.3", tensor=rows, send=splits, receive=splits)
    took = (time.process_time() - began) / times
    return Row(f"{_COST}: {1e6 * took:.1f} us", times, times, 0, round(took, 8))


def _judged(case: Case, folder: Path, running: list[int], took: float, slack_s: float) -> str:
    """Return "" if the ranks ended as they should, else the problem. running: ranks that still run. took: seconds from fault to end."""
    output = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("*.log")))
    if running:
        return f"still running: ranks {running}; {output[-300:]!r}"
    left = {int(p.stem): json.loads(p.read_text()) for p in (folder / "run" / ".status").glob("*.json")}
    codes = {rank: word["exit"] for rank, word in left.items() if rank != case.culprit or case.exits == 0}
    if set(codes.values()) != {case.exits}:
        return f"exit codes {codes}: {output[-400:]!r}"
    if case.exits == 0:
        noted = [line for line in output.splitlines() if line.startswith(("slow:", "error"))]
        if bool(case.said) != bool(noted) or not all(re.search(case.said, line) for line in noted):
            return f"said {noted or 'nothing'}"
        return ""
    said = case.said.replace("CULPRIT", f"^rank {case.culprit}")
    for rank, word in left.items():
        line = str(word["error"])
        if (rank != case.culprit or case is _CUT) and not re.search(said, line):
            return f"rank {rank} said: {line}"
    if took > case.limit * LIMIT_S + slack_s:
        return f"took {took:.1f} s: {left}"
    return ""


def _fork(case: Case, rank: int, number: int, port: int, home: Path, folder: Path, machines: Machines | None) -> int:
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with(parent)
        log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        places: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": case.world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": case.world}
        places |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "XDG_CACHE_HOME": home / "cache", "CUDA_VISIBLE_DEVICES": ""}
        if machines:
            machines.enter(rank)
            places["MASTER_ADDR"] = machines.addresses[0]
        os.environ.update({key: str(value) for key, value in places.items()} | {"DS_ACCELERATOR": "cpu"})
        os.environ[HELD] = str((folder / "run").resolve())  # a rank writes its status file only if its launcher has set this
        if rank == case.culprit:
            case.install(number, folder / "fault")
        from moe.launch import launch

        words = [f"--{key}={value}" for key, value in (_TINY | case.overrides).items()]
        code = launch.main(["switch_tiny", f"--data.path={home / 'text.txt'}", *words, "--out", str(folder / "run")])
        sys.stderr.flush()
    finally:
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
