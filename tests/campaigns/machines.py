"""Two machines, for `python -m tests.campaigns machines`: real launchers start a tiny run on them; it is ended, and resumed.

    hostfile   moe train --hostfile -> DeepSpeed's launcher -> pdsh -> ssh          torchrun   one on each; then the cable is pulled
    SLURM      sbatch, with the script of docs/use/launching.md -> srun             the machines: hosts.py, slurm.py

A try passes if the exit code after a signal is 75, no process still runs on either machine, and all losses, up to some steps after the
resume, are bitwise equal to an undisturbed run with two ranks on one machine.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from moe.launch import status
from moe.launch.exit_codes import STOPPED
from moe.records.metrics import METRICS, whole_lines
from parallel.store.lock import HELD
from tests.campaigns.faults import Row
from tests.campaigns.hangs import warm_up
from tests.campaigns.hosts import NAMES, Hosts, missing, two_hosts
from tests.campaigns.lives import TINY, Attempt
from tests.campaigns.slurm import SLURM, cluster
from tests.campaigns.two_machines import why_not

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "use" / "launching.md"
LONG = {"train.steps": "100000", "train.save_every": "0", "train.eval_every": "0", "train.timeout_s": "30"}  # a signal ends it
START_S = 100.0  # seconds to start two ranks with launchers, on a busy machine
MORE = 3  # steps after a resume

Check = Callable[[Path, Hosts], str]


def rows(*, full: bool, rounds: int | None, only: str) -> Iterator[Row]:
    """Yield a row for each launcher."""
    torch.set_num_threads(1)
    tries = rounds or (3 if full else 1)
    checks: list[tuple[str, Check]] = [
        ("hostfile, SIGTERM, and again", hostfile),
        ("hostfile, Ctrl-C, and again", lambda home, hosts: hostfile(home, hosts, signal.SIGINT)),
        ("hostfile, SIGKILL of moe train, and again", lambda home, hosts: hostfile(home, hosts, signal.SIGKILL)),
        ("torchrun on each, link cut, and again", torchrun),
        ("SLURM, a signal, requeued", slurm),
    ]
    if full:
        checks.append(("SLURM, its time is over, requeued", lambda home, hosts: slurm(home, hosts, of_slurm=True)))
    for name, check in checks:
        row = f"machines: {name}"
        if only not in row:
            continue
        if lacking := why_not() or (missing(SLURM) if "SLURM" in name else missing()):
            yield Row(row, skipped=lacking)
            continue
        yield Row.of(row, tries, lambda number, check=check: once(check))  # type: ignore[misc]


def once(check: Check) -> tuple[str, float]:
    """Call `check` on two new hosts. Return (problem or "", seconds)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="machines-") as name:
        home = Path(name)
        warm_up(home, deepspeed=False)
        with two_hosts(home, {"XDG_CACHE_HOME": str(home / "cache")}) as hosts:
            try:
                return check(home, hosts), time.monotonic() - began
            except (OSError, subprocess.SubprocessError) as error:
                return str(error), time.monotonic() - began


def hostfile(home: Path, hosts: Hosts, number: signal.Signals = signal.SIGTERM, *, resumed: str = "there") -> str:
    """Start a run with --hostfile, send it a signal, resume it. Return the problem, or "".

    resumed: "there", on the same machines, or "here", on two ranks forked from this process.
    """
    (home / "hosts.txt").write_text("".join(f"{name} slots=1\n" for name in NAMES))
    out = home / "run"

    def one_run(number: signal.Signals) -> str:
        words = ["-m", "moe", "train", "switch_tiny", "--hostfile", "hosts.txt", "--out", "run", *_words(home)]
        process = hosts.start(0, [sys.executable, *words], env=environment(home), cwd=home)
        began = _steps(out)
        _until(lambda: _steps(out) > began or process.poll() is not None)
        if process.poll() is None:
            hosts.signal(process, number)
        said, _ = process.communicate(timeout=START_S)
        wanted = -signal.SIGKILL if number == signal.SIGKILL else STOPPED
        if process.returncode != wanted:
            return f"moe train ended with {process.returncode}: {said[-600:]}"
        if wanted == STOPPED and not re.search(r"^exit code 75: every rank saved", said, flags=re.M):
            return f"it said {said[-600:]}"
        return _left(hosts)

    problem = one_run(number)
    if not problem:
        problem = _goes_on(home, out) if resumed == "here" else one_run(signal.SIGTERM)
    return problem or same_as_undisturbed(home, out)


def torchrun(home: Path, hosts: Hosts) -> str:
    """Start a run with torchrun, pull the cable, plug it in again and resume. Return the problem, or ""."""
    out, saved = home / "run", {"train.save_every": "20", "train.timeout_s": "5"}

    def start() -> list[subprocess.Popen[str]]:
        where = ["--nnodes", "2", "--nproc_per_node", "1", "--master_addr", NAMES[0], "--master_port", "29500"]
        words = ["-m", "moe.launch.launch", "switch_tiny", "--out", "run", *_words(home, saved)]
        command = [sys.executable, "-m", "torch.distributed.run", *where]
        env = environment(home) | held(out)
        return [hosts.start(host, [*command, "--node_rank", f"{host}", *words], env=env, cwd=home) for host in range(2)]

    def trains_beyond(step: int, both: list[subprocess.Popen[str]]) -> bool:
        _until(lambda: _steps(out) > step or any(process.poll() is not None for process in both))
        return _steps(out) > step

    def end(both: list[subprocess.Popen[str]], number: signal.Signals) -> list[str]:
        for process in both:
            with contextlib.suppress(OSError, IndexError):  # the command may have ended already
                hosts.signal(process, number)
        return [process.communicate(timeout=START_S)[0][-600:] for process in both]

    both = start()
    if trained := trains_beyond(25, both):
        hosts.machines.pull()
        _until(lambda: len(status.read(out / status.NAME)) == 2, limit_s=60.0)
    said = end(both, signal.SIGKILL)  # killed, because torchrun's agents wait minutes for each other
    if not trained:
        return f"it did not train: {said}"
    for rank in range(2):
        word = status.read(out / status.NAME).get(rank, {}).get("error")
        if not re.match(r"(rank 1|rank 0|torchrun at .*) is missing", str(word)):
            return f"rank {rank} did not name the other: {word}; {said[rank]}"
    if problem := _left(hosts):
        return problem
    hosts.machines.plug()
    status.empty(out)
    before, both = _steps(out), start()
    trained = trains_beyond(before, both)
    said = end(both, signal.SIGTERM)
    if not trained:
        return f"it did not resume after the cable was back: {said}"
    return _left(hosts) or _unsaved(out) or same_as_undisturbed(home, out)


def slurm(home: Path, hosts: Hosts, *, of_slurm: bool = False) -> str:
    """Run a batch job that is requeued after a signal, then cancel it. Return the problem, or "". `of_slurm`: SLURM sends the signal."""
    if not PAGE.exists():
        raise OSError(0, "it needs a checkout, with docs/use/launching.md")
    (home / "job.sh").write_text(script(PAGE.read_text()))
    out = home / "run"
    with cluster(hosts, home, home, environment(home) | held(out)) as found:
        asked = ["--parsable", "--ntasks-per-node=1", "--gpus-per-node=0"] + (["--time=1", "--signal=TERM@30"] if of_slurm else [])
        number = found.do("sbatch", *asked, "job.sh", "--out", "run", *_words(home)).strip()
        log = home / f"slurm-{number}.out"
        for attempt in range(2):
            before = _steps(out)
            if not _until(lambda before=before: _steps(out) > before):  # type: ignore[misc]
                return f"attempt {attempt} did not train: {found.job(number)['JobState']}, {log.read_text()[-600:] if log.exists() else ''}"
            if attempt == 0:
                if not of_slurm:
                    found.do("scancel", "--signal=TERM", number)
                if not _until(lambda: found.job(number)["Restarts"] == "1"):
                    return f"not requeued: {found.job(number)['JobState']}, {log.read_text()[-600:]}"
                if problem := _left(hosts) or _unsaved(out):
                    return problem
                status.empty(out)
        found.do("scancel", number)
        if (state := found.reach(number, "CANCELLED", limit_s=60)) != "CANCELLED":
            return f"scancel left it {state}: {log.read_text()[-600:]}"
        if problem := _left(hosts) or _unsaved(out):
            return problem
    return same_as_undisturbed(home, out)


def script(page: str) -> str:
    """Return the batch script in the text `page` of the docs."""
    found = re.search(r"^#!/bin/bash\n(.*\n)+?(?=```)", page, flags=re.M)
    assert found, "the page shows no script"
    return found.group()


def same_as_undisturbed(home: Path, out: Path) -> str:
    """Compare all losses with an undisturbed run of two ranks on this machine. Return "" or the steps that differ."""
    found = _losses(out)
    whole = home / "whole"
    attempt = Attempt(home, whole, TINY | LONG)
    attempt.reach(max(found, default=0))
    attempt.send(signal.SIGTERM)
    attempt.end()
    wanted = _losses(whole)
    wrong = [step for step in range(1, max(found, default=0) + 1) if found.get(step) is None or found[step] != wanted.get(step)]
    return "" if found and not wrong else f"the losses of steps {wrong[:5]} differ, of {len(found)}: {attempt.said()}"


def _goes_on(home: Path, out: Path) -> str:
    before = _steps(out)
    attempt = Attempt(home, out, TINY | LONG)
    reached = attempt.reach(before + MORE)
    attempt.send(signal.SIGTERM)
    if not reached or attempt.end() or attempt.codes() != [STOPPED] * attempt.world:
        return f"it did not resume and save: {attempt.codes()}, {attempt.said()}"
    return ""


def _left(hosts: Hosts) -> str:
    """Wait up to 10 s until no command runs on either machine. Return "" or the commands that still run."""
    _until(lambda: not hosts.left(), limit_s=10.0)
    return f"left behind: {left}" if (left := hosts.left()) else ""


def _unsaved(out: Path) -> str:
    """Return "" if every rank saved and exited with code 75 after its signal, else the exit codes."""
    codes = {rank: word["exit"] for rank, word in status.read(out / status.NAME).items()}
    return "" if codes == dict.fromkeys(range(len(NAMES)), STOPPED) else f"the ranks' exit codes are {codes}"


def _words(home: Path, more: dict[str, str] | None = None) -> list[str]:
    return [f"--{key}={value}" for key, value in (TINY | LONG | {"data.path": str(home / "text.txt")} | (more or {})).items()]


def held(out: Path) -> dict[str, str]:
    """Return environment variables with which ranks write their exit codes into the run's folder `out`, as under `moe train`."""
    return {HELD: str(out.resolve())}


def environment(home: Path) -> dict[str, str]:
    """Return the environment variables of a user on each host. home: folder of the cache."""
    mine = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{mine.get('PATH', '')}"
    return mine | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(home / "cache")}


def _losses(out: Path) -> dict[int, str]:
    return {line["step"]: float(line["loss"]).hex() for line in whole_lines(out / METRICS) if line.get("kind") == "train"}


def _steps(out: Path) -> int:
    return max(_losses(out), default=0)


def _until(done: Callable[[], object], limit_s: float = START_S) -> bool:
    until = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
