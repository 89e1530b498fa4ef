"""Runs cases of `moe verify --device` on ranks that are started as `moe train` starts them, instead of forked: a fork cannot use a GPU.

    moe verify -> forked process (moe/launch/start.py) -> torchrun, unless there is one rank -> ranks (this file as a program)
    FOLDER/cases.json                       the list of cases that the ranks run
    FOLDER/<case>.<rank>.result             a rank's result of a case; read as soon as all ranks have written theirs
    FOLDER/<rank>.error, FOLDER/log         a failed rank's traceback; output of all ranks

Each rank imports torch once and runs the whole list of cases: on its GPU with NCCL, or with gloo on a machine without a GPU.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from moe.launch.arguments import Arguments, parse
from moe.launch.launch import RankRun, carried_out, run_as_rank
from moe.launch.start import start
from moe.verify import layouts
from moe.verify.cases import Case
from moe.verify.layouts import Ran, few_meshes, gathered, limit_of
from parallel.errors import counted
from parallel.process import process
from parallel.process.libc import die_with

START_S = 300.0  # seconds that processes may take to start, in addition to the limit of the first case
_LEAVE_S, _POLL_S = 10.0, 0.05  # seconds that processes may take to end after the last result; seconds between two checks for results


def run_started(chosen: list[Case], world: int, *, taped: bool = False, timeout_s: float | None = None) -> Iterator[tuple[Case, Ran]]:
    """Run cases of `world` ranks. Yield (case, outcome) when a case has ended. The outcome is its result or, if ranks failed, the text
    of their errors. taped: also record the first steps. timeout_s: limit for a case of up to four ranks; eight get twice that. None:
    LIMIT_S of layouts.py."""
    left = list(chosen)
    while left:
        ready, done = few_meshes(left), 0
        for ran in _started(ready, world, taped, limit_of(world, timeout_s)):
            yield left[done], ran
            done += 1
        left = left[done:]


def _started(cases: list[Case], world: int, taped: bool, limit_s: float) -> Iterator[Ran]:
    """Yield the result of each case. If ranks fail, the last value is the text of their errors. The ranks are ended when the caller stops
    iterating."""
    with tempfile.TemporaryDirectory(prefix="verify-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps({"cases": [asdict(case) for case in cases], "taped": taped, "limit_s": limit_s}))
        parent = get_context("fork").Process(target=_launch, args=(folder, world, os.getpid()), daemon=True)
        parent.start()
        try:
            for number in range(len(cases)):
                parts = _results(folder, number, world)
                until = time.monotonic() + limit_s + (0 if number else START_S)
                while not all(part.exists() for part in parts):
                    ended = not parent.is_alive()  # read before the files, because the parent ends only after all results are written
                    if (ended and not all(part.exists() for part in parts)) or time.monotonic() > until:
                        how = "gave no result" if ended else f"still running after {limit_s:g} s"
                        yield _errors(folder, f"{counted(world, 'rank')} {how}")
                        return
                    time.sleep(_POLL_S)
                yield gathered([torch.load(part, map_location="cpu", weights_only=True) for part in parts])
                for part in parts:
                    part.unlink()
            parent.join(_LEAVE_S)
        finally:
            parent.kill()  # the ranks that this launcher started end with it (moe/launch/processes.py)
            parent.join()


def _errors(folder: Path, head: str) -> str:
    """Return the errors of the ranks that failed. If no rank wrote an error, return the line `head` and the output of all ranks."""
    failed = [f"rank {path.stem} failed:\n{path.read_text()}" for path in sorted(folder.glob("*.error"))]
    return "\n".join(failed or [head, (folder / "log").read_text()])


def _results(folder: Path, number: int, world: int) -> list[Path]:
    return [folder / f"{number}.{rank}.result" for rank in range(world)]


def _launch(folder: Path, world: int, parent: int) -> None:
    """Start the ranks as `moe train` does. This runs in a fork of the process `parent`, which has not used a GPU. A single rank is started
    without torchrun."""
    die_with(parent)
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    given, module = Arguments("verify", out=folder), "moe.verify.started"
    if world == 1:
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # replaces a cluster job's variables
        os.execve(sys.executable, [sys.executable, "-m", module, *given.words()], os.environ | alone)
    start(given, nproc=world, launcher="torchrun", module=module, grace_s=0)


# --- in the ranks -----------------------------------------------------------------------------------------------------------


def _rank(words: list[str], rank_run: RankRun) -> int:
    """Run the cases in the folder of the command line `words`, as one rank. Return the exit code."""
    folder = parse(words).out
    assert folder is not None
    rank_run.place.append(folder)
    return carried_out(partial(_run_cases, folder))


def _run_cases(folder: Path) -> None:
    """Run all cases of cases.json as this rank, and write each result into the folder."""
    world, asked = process.read_environment(), json.loads((folder / "cases.json").read_text())
    given: list[dict[str, Any]] = asked["cases"]
    cases = [Case(**case | {"stages": case["stages"] and tuple(case["stages"])}) for case in given]
    process.share_cores(world)
    process.start(world, timeout_s=asked["limit_s"])
    for kind in {case.engine.name: case.engine for case in cases}.values():
        kind.load()
    try:
        for number, found in enumerate(layouts.ran_by(world.rank, cases, asked["taped"], device=world.device)):
            _write(found, _results(folder, number, world.size)[world.rank])
            process.barrier()
    except BaseException:
        (folder / f"{world.rank}.error").write_text(traceback.format_exc())
        raise


def _write(found: dict[str, Any], path: Path) -> None:
    torch.save(found, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)  # atomic, so that an incomplete result is never read


if __name__ == "__main__":
    sys.exit(run_as_rank(partial(_rank, sys.argv[1:])))
