"""A run that is killed and started again equals the run that was never killed: the same losses, weights and samples, bit by bit.

SIGKILL comes at random moments of random steps, and at every kind of point inside a save: before its first byte, within a shard, between
files, before and after the rename, while older checkpoints are removed, within a line of the metrics.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from moe.recipe.sections import Run
from moe.records import metrics
from moe.train.loop import recorded
from moe.train.start import state
from parallel.store import checkpoint, files, stored
from tests.support import trained

STEPS, EVERY = 10, 2
Place = Callable[[Callable[[], None], Callable[[], bool]], None]  # patches this process to call `die()` at one point of a save if `armed()`


@pytest.fixture(scope="module")
def unkilled(home: Path) -> Callable[[str], tuple[Run, Path]]:
    """Return a function: kind of sharding -> (recipe, folder of its complete run). Each runs once."""
    made: dict[str, tuple[Run, Path]] = {}

    def get(kind: str) -> tuple[Run, Path]:
        if kind not in made:
            if kind == "zero":
                trained.warm_zero()
            train = {"steps": STEPS, "save_every": EVERY, "eval_every": 4}
            run = trained.recipe(home, train=train, degrees={"ep": 2}, sharding={"kind": kind}, router={"preset": "gshard"})
            assert all(isinstance(summary, dict) for summary in trained.train(run, home / kind, ranks=2))
            made[kind] = run, home / kind
        return made[kind]

    return get


# --- moments at which a rank is killed --------------------------------------------------------------------------------


def before_the_first_byte(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    _replace(checkpoint, "save_file", lambda real, *a: die() if armed() else real(*a))


def in_half_a_shard(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    def half(real: Any, tensors: Any, path: Path) -> None:
        real(tensors, path)
        if armed():
            os.truncate(path, path.stat().st_size // 2)
            die()

    _replace(checkpoint, "save_file", half)


def at_fsync(number: int) -> Place:
    def place(die: Callable[[], None], armed: Callable[[], bool]) -> None:
        calls: list[Path] = []

        def counted(real: Any, path: Path) -> None:
            if armed():
                calls.append(path)
                if len(calls) == number:
                    die()
            real(path)

        for module in (files, checkpoint):
            _replace(module, "sync", counted)

    return place


def in_half_a_manifest(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    def half(real: Any, path: Path, content: bytes) -> Any:
        if armed() and path.name == "manifest.json":
            real(path, content[: len(content) // 2])
            die()
        return real(path, content)

    _replace(Path, "write_bytes", half)


def before_the_rename(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    _replace(Path, "rename", lambda real, path, to: die() if armed() and _commits(to) else real(path, to))


def after_the_rename(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    def then(real: Any, path: Path, to: Path) -> Any:
        renamed = real(path, to)
        if armed() and _commits(to):
            die()
        return renamed

    _replace(Path, "rename", then)


def while_older_ones_go(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    def half(real: Any, path: Path, *a: Any, **k: Any) -> None:
        held = sorted(path.iterdir()) if armed() and path.is_dir() else []
        if held:
            held[0].unlink()
            die()
        real(path, *a, **k)

    _replace(shutil, "rmtree", half)


def in_half_a_line(die: Callable[[], None], armed: Callable[[], bool]) -> None:
    """Patch this process: if armed(), it dies after writing half of the metrics line "saved", which follows a save."""

    def half(real: Any, records: metrics.Records, line: Any) -> None:
        if armed() and line.get("event") == "saved" and records._file is not None:
            records._file.write(b'{"kind": "event", "step"')
            records._file.flush()
            die()
        real(records, line)

    _replace(metrics.Records, "write", half)


def _commits(to: Any) -> bool:
    return Path(to).name.startswith("step-") and Path(to).suffix == ""


def _replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
    real = getattr(owner, name)
    setattr(owner, name, lambda *a, **k: new(real, *a, **k))


def in_save(place: Place, *, step: int, rank: int) -> Callable[[int, Callable[[], None]], None]:
    """Return a function that prepares a rank's process to die at the point `place` of the save after this step."""

    def prepare(this: int, die: Callable[[], None]) -> None:
        if this != rank:
            return
        saving: list[int] = []

        def parts(real: Any, *a: Any, **k: Any) -> Any:
            saving.append(k["counters"].step)
            return real(*a, **k)

        _replace(state, "parts", parts)
        place(die, lambda: bool(saving) and saving[-1] == step)

    return prepare


def somewhere(seed: int) -> Callable[[int, Callable[[], None]], None]:
    """Return a function that prepares a rank to die at a random moment of a random step: rank 0, rank 1 or both. A timer kills it."""
    draw = random.Random(seed)
    step, ranks = draw.randrange(1, STEPS - 3), draw.choice(([0], [1], [0, 1]))
    delays_s = [draw.uniform(0, 0.05) for _ in range(2)]

    def prepare(rank: int, die: Callable[[], None]) -> None:
        if rank in ranks:
            trained.on_line(step, lambda: threading.Timer(delays_s[rank], die).start())

    return prepare


# --- the law ----------------------------------------------------------------------------------------------------------


def live(run: Run, out: Path, life: int, death: Callable[[int, Callable[[], None]], None] | None = None) -> None:
    """Start the run on two ranks, until its end or until `death(rank, die)` has killed a rank. life: number of this start."""
    killed = out.parent / f"killed-{life}"

    def before(rank: int) -> None:
        def die() -> NoReturn:
            killed.write_text(str(rank))
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError("still alive")

        trained.log_draws(out.parent, rank, life)
        if death is not None:
            death(rank, die)

    if death is None:
        assert all(isinstance(summary, dict) for summary in trained.train(run, out, ranks=2, before=before))
        return
    with pytest.raises(AssertionError, match=r"ended with -9"):
        trained.train(run, out, ranks=2, before=before)
    assert killed.exists()


def assert_same_run(run: Run, out: Path, reference: Path) -> None:
    assert trained.losses(out) == trained.losses(reference)
    assert [step for step, _ in trained.losses(out)] == list(range(1, STEPS + 1))
    assert [(line["step"], line["validation_loss"]) for line in trained.lines(out, "eval")] == [
        (line["step"], line["validation_loss"]) for line in trained.lines(reference, "eval")
    ]
    assert trained.checkpoints(out) == trained.checkpoints(reference) == [STEPS - EVERY, STEPS]
    for step in (STEPS - EVERY, STEPS):
        assert trained.tensors(out / f"checkpoints/step-{step}") == trained.tensors(reference / f"checkpoints/step-{step}")
    consumed: dict[int, list[int]] = {}
    for life in trained.draws(out.parent, ranks=2):
        assert list(life) == list(range(min(life), max(life) + 1)) if life else True
        consumed |= life
    # for each step the windows of the last start that ran it: together they are all windows in the recipe's order
    assert [consumed[step] for step in range(STEPS)] == trained.order(run, STEPS)


# A process killed at each system call of a save leaves a whole checkpoint (tests/parallel/store/test_checkpoint.py). Here a run continues
# from what is left: no checkpoint, an unfinished one, one that no line of metrics tells, one of which a part was removed.
KILLS = {
    "random": ("zero", somewhere(9)),
    "first save": ("ddp", in_save(before_the_rename, step=2, rank=0)),
    "half a shard": ("ddp", in_save(in_half_a_shard, step=6, rank=1)),
    "after the rename": ("zero", in_save(after_the_rename, step=8, rank=0)),
    "older ones go": ("ddp", in_save(while_older_ones_go, step=8, rank=0)),
    "half a line": ("ddp", in_save(in_half_a_line, step=STEPS, rank=0)),
    "async, before the rename": ("zero", in_save(before_the_rename, step=4, rank=0)),
    "async, random": ("ddp", somewhere(7)),
}


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_started_again_is_the_unkilled_run(kill: str, unkilled: Callable[[str], tuple[Run, Path]], tmp_path: Path) -> None:
    kind, death = KILLS[kill]
    run, reference = unkilled(kind)
    if kill.startswith("async"):  # asynchronous saves must change no result
        run = run.model_copy(update={"train": run.train.model_copy(update={"save_mode": "async"})})
    live(run, tmp_path / "run", 0, death)
    live(run, tmp_path / "run", 1)
    assert_same_run(run, tmp_path / "run", reference)


def test_killed_over_and_over(unkilled: Callable[[str], tuple[Run, Path]], tmp_path: Path) -> None:
    """Seven kills of one run, one in each start: between the files of a save, in a resume, after the last save."""
    run, reference = unkilled("ddp")
    out = tmp_path / "run"

    def in_the_resume(rank: int, die: Callable[[], None]) -> None:
        if rank == 0:
            _replace(stored.Reader, "load", lambda real, *a: die())

    def before_the_summary(rank: int, die: Callable[[], None]) -> None:
        if rank == 0:
            _replace(recorded, "write_summary", lambda real, *a: die())

    deaths = [
        in_save(before_the_first_byte, step=2, rank=1),
        in_save(at_fsync(2), step=4, rank=1),
        in_the_resume,
        in_save(in_half_a_manifest, step=4, rank=0),
        in_save(at_fsync(4), step=6, rank=0),
        somewhere(5),
        before_the_summary,
    ]
    for life, death in enumerate(deaths):
        live(run, out, life, death)
    assert not (out / "summary.json").exists()
    live(run, out, len(deaths))
    assert (out / "summary.json").exists()
    assert_same_run(run, out, reference)
