"""SIGKILLs, for `python -m tests.campaigns kills`: a tiny run is killed, started again, and must equal the run that was never killed.

    at a random moment of a random step, or of the start: one rank, the launcher (its ranks die with it), or all processes
    inside a save: one rank, when it opens, renames or removes a checkpoint's file; each of these calls is equally likely

A try passes if the second start ends well, and every loss, weight and moment is bitwise equal to the undisturbed run. Further rows are
pairs of layouts: a checkpoint saved on one layout is loaded on another and saved again; the hashes of all tensors must be equal.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from parallel.data.deepspeed import compile_async_io
from parallel.process.extensions import use_extensions_dir
from tests.campaigns.faults import Row
from tests.campaigns.hangs import warm_up
from tests.campaigns.lives import SAVE_EVERY, STEPS, Attempt, Before, differ, hashes, left_behind, whole

MANY = 25  # kills of each layout: 200 in all, 80 of them inside a save
HOW = ("save", "rank", "launcher", "save", "all", "rank", "save", "launcher", "save", "all")
_ZERO = {"sharding.kind": "zero"}
LAYOUTS: dict[str, dict[str, str]] = {
    "ddp": {},
    "fsdp": {"sharding.kind": "fsdp"},
    "zero 1": _ZERO | {"sharding.stage": "1"},
    "zero 2": _ZERO | {"sharding.stage": "2"},
    "zero 3": _ZERO | {"sharding.stage": "3"},
    "zero 3, states on a disk": _ZERO | {"sharding.stage": "3", "sharding.offload.optimizer": "nvme", "sharding.offload.path": "DISK"},
    "pp 2": {"degrees.pp": "2", "pipeline.microbatches": "4"},
    "ep 2, moving experts": {"degrees.ep": "2", "experts.rebalance_every": "3", "optimizer.clip_norm": "0.1"},
}
# name of a layout -> number of ranks, recipe values
LAID: dict[str, tuple[int, dict[str, str]]] = {
    "one": (1, {"degrees.ep": "1"}),
    "dp 2": (2, {"degrees.ep": "1"}),
    "dp 2 ep 2": (2, {"degrees.ep": "2"}),
    "dp 4 ep 2": (4, {"degrees.ep": "2"}),
    "zero 1": (2, _ZERO | {"sharding.stage": "1", "degrees.ep": "2"}),
    "zero 3": (2, _ZERO | {"sharding.stage": "3", "degrees.ep": "1"}),
    "fsdp": (2, {"sharding.kind": "fsdp", "degrees.ep": "2"}),
    "tp 2": (2, {"degrees.tp": "2"}),
    "sp 2": (2, {"degrees.sp": "2"}),
    "pp 2": (2, {"degrees.pp": "2", "pipeline.microbatches": "4"}),
}
# each layout is a source and a target at least twice; each number, kind and degree changes in both directions
PAIRS = (
    ("one", "dp 2 ep 2"), ("dp 2 ep 2", "one"), ("dp 2 ep 2", "dp 4 ep 2"), ("dp 4 ep 2", "dp 2"), ("dp 2", "dp 2 ep 2"),
    ("dp 2 ep 2", "zero 1"), ("zero 1", "zero 3"), ("zero 3", "fsdp"), ("fsdp", "dp 4 ep 2"), ("dp 4 ep 2", "zero 3"),
    ("zero 3", "tp 2"), ("tp 2", "dp 2 ep 2"), ("tp 2", "sp 2"), ("sp 2", "tp 2"), ("sp 2", "pp 2"), ("pp 2", "tp 2"),
    ("pp 2", "zero 3"), ("pp 2", "one"), ("one", "pp 2"), ("one", "sp 2"), ("fsdp", "zero 1"), ("zero 1", "pp 2"),
    ("sp 2", "fsdp"), ("dp 2", "dp 4 ep 2"),
)  # fmt: skip
_CALLS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir")


def rows(*, full: bool, rounds: int | None, only: str) -> Iterator[Row]:
    """Yield a row of kills for each layout, and a row for each pair of layouts (saved on one, loaded on the other)."""
    torch.set_num_threads(1)
    tries = rounds or (MANY if full else 1)
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        home = Path(name)
        warm_up(home)
        if any("disk" in layout and only in f"kill: {layout}" for layout in LAYOUTS):
            use_extensions_dir()
            compile_async_io(lambda _: None)  # compiled here, because on a busy machine it takes longer than the limit of a run
        for place, layout in enumerate(LAYOUTS):
            row = f"kill: {layout}"
            if only in row:
                kills = Kills(home, layout)
                yield Row.of(row, tries, lambda number, kills=kills, place=place: kills.once(number + place))  # type: ignore[misc]
        saved: dict[str, Path] = {}
        for source, target in PAIRS if full or only else PAIRS[:4]:
            row = f"layout: {source} to {target}"
            if only in row:
                yield Row.of(row, 1, lambda _, pair=(source, target): resharded(home, saved, *pair))  # type: ignore[misc]


class Kills:
    """Kills of runs on one layout. The undisturbed run to compare with is made at the first kill."""

    def __init__(self, home: Path, layout: str) -> None:
        self.home, self.name = home, layout.replace(" ", "-").replace(",", "")
        disk = home / f"disk-{self.name}"
        disk.mkdir()
        self.overrides = {key: value.replace("DISK", str(disk)) for key, value in LAYOUTS[layout].items()}
        self.reference: dict[str, object] = {}
        self.calls: list[int] = []

    def once(self, number: int) -> tuple[str, float]:
        """Kill a run and start it again. number: selects the kind of kill. Return (problem or "", seconds of the second start)."""
        problem = self._undisturbed()
        if problem:
            return problem, 0.0
        draw, how = random.Random(f"{self.name} {number}"), HOW[number % len(HOW)]
        out = self.home / f"{self.name}-{number}"
        killed = self._killed(out, how, draw)
        if killed:
            return f"{how}: {killed}", 0.0
        began = time.monotonic()
        problem = whole(self.home, out, self.overrides) or differ(left_behind(out), self.reference)
        took = time.monotonic() - began
        shutil.rmtree(out)
        return f"{how}, number {number}: {problem}" if problem else "", took

    def _undisturbed(self) -> str:
        if self.reference:
            return ""
        counts = [self.home / f"{self.name}-calls-{rank}" for rank in range(2)]
        out = self.home / f"{self.name}-whole"

        def counted(rank: int) -> None:
            handle = os.open(counts[rank], os.O_WRONLY | os.O_CREAT)
            at_calls(lambda _: os.write(handle, b"."))

        problem = whole(self.home, out, self.overrides, before=counted)
        if not problem:
            self.reference, self.calls = left_behind(out), [path.stat().st_size for path in counts]
        return problem

    def _killed(self, out: Path, how: str, draw: random.Random) -> str:
        """Run until a SIGKILL ends all processes. Return the problem, or "". how: kind of kill."""
        before: Before | None = None
        if how == "save":
            who = draw.choices((0, 1), weights=self.calls)[0]
            at = draw.randrange(1, self.calls[who] + 1)
            before = partial(_die_at, who, at)
        attempt = Attempt(self.home, out, self.overrides, before=before)
        if how == "save":
            while not attempt.dead():
                time.sleep(0.01)
            victims = [who]
        else:
            attempt.reach(draw.randrange(0, STEPS - 2))
            time.sleep(draw.uniform(0, 0.1))
            victims = [draw.randrange(2)] if how == "rank" else [0, 1]
            if how == "launcher":
                os.kill(attempt.launcher, signal.SIGKILL)
            else:
                attempt.send(signal.SIGKILL, victims)
        died = attempt.end(limit_s=0.5 if how in ("rank", "save") else 10.0)  # also ends the other ranks, as the parent would
        codes = attempt.codes()
        if how == "launcher":
            return f"ranks {died} outlived their launcher" if died else ""
        return "" if all(codes[rank] == -signal.SIGKILL for rank in victims) else f"the kill came too late: {codes}"


def at_calls(act: Callable[[int], object]) -> None:
    """Make this rank's process call `act(n)` before its nth call that opens, renames or removes a checkpoint's file."""
    made = [0]

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in _CALLS and "/checkpoints" in str(arguments[0]):
            made[0] += 1
            act(made[0])

    sys.addaudithook(heard)


def _die_at(who: int, at: int, rank: int) -> None:
    if rank == who:
        at_calls(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == at else None)


def resharded(home: Path, saved: dict[str, Path], source: str, target: str) -> tuple[str, float]:
    """Load a checkpoint of layout `source` on layout `target` and save it again. Return (differing tensors or "", seconds)."""
    if source not in saved:
        ranks, overrides = LAID[source]
        out = home / f"from {source}"
        if problem := whole(home, out, overrides | {"train.steps": f"{SAVE_EVERY}"}, world=ranks):
            return problem, 0.0
        saved[source] = out
    out, again = home / f"{source} to {target}", home / f"{source} to {target}, again"
    shutil.copytree(saved[source], out)
    ranks, overrides = LAID[target]
    began = time.monotonic()
    problem = whole(home, out, overrides | {"train.steps": f"{SAVE_EVERY + 1}"}, world=ranks, before=lambda _: _save_first(again))
    name = f"checkpoints/step-{SAVE_EVERY}"
    problem = problem or differ({"loaded": hashes(again / name)}, {"loaded": hashes(out / name)})
    return problem, time.monotonic() - began


def _save_first(again: Path) -> None:
    """Make this rank's process save the loaded state in `again` before training."""
    from moe.train.loop import trainer
    from moe.train.start.job import Job
    from parallel.store.saver import Saver

    loop = trainer._loop

    def hooked(job: Job, asked: Callable[[], bool]) -> None:
        first, job.saves.saver = job.saves.saver, Saver(again / "checkpoints", job.mesh.axis("world"), keep=1)
        trainer._save(job, wait=True)
        job.saves.saver = first
        loop(job, asked)

    trainer._loop = hooked
