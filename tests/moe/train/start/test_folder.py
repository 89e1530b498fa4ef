"""A run's folder: one run at a time, unchanged by a refused or finished start, and an error if it is renamed during the run."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.launch import launch, status
from moe.recipe.load import resolved_yaml
from moe.records import metrics
from moe.records.tracker import Board
from moe.train.loop import trainer
from moe.train.start import opening
from parallel.errors import BadInput
from parallel.process.process import World
from parallel.store.lock import HELD, NAME, alone_in
from tests.support import trained


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.delenv(HELD, raising=False)
    return trained.home(tmp_path / "home", monkeypatch)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A new folder whose lock another process holds."""
    out = tmp_path / "run"
    up, told = os.pipe()
    if not (pid := os.fork()):
        with alone_in(out):
            os.write(told, b".")
            signal.pause()
    os.read(up, 1)
    yield out
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def everything(folder: Path) -> dict[str, tuple[str, int]]:
    """Return {relative path: (SHA-256, modification time in ns)} of all files."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_refused_start_changes_nothing_and_the_next_is_refused_too(
    ranks: int, home: Path, held: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A start in the folder of a running run is refused, each time, and changes no file. Each rank prints the error."""
    run, before = trained.recipe(home), everything(held)
    (home / "tiny.yaml").write_text(resolved_yaml(run, {}))
    for _ in range(2):
        if ranks == 1:
            assert launch.main([str(home / "tiny.yaml"), "--out", str(held)]) == 2
            said = [capfd.readouterr().err.removeprefix("error: ").strip()]
        else:
            said = trained.train(run, held, ranks=2)
        assert all(line.startswith(f"--out: got {held}, in which process ") and "\n" not in line for line in said)
        assert everything(held) == before and [path.name for path in held.iterdir()] == [NAME]


def test_a_run_whose_folder_is_renamed_ends_at_the_next_step_and_leaves_nothing_at_the_old_name(home: Path, tmp_path: Path) -> None:
    out, moved = tmp_path / "run", tmp_path / "moved"

    def steps(folder: Path) -> list[int]:
        return [line["step"] for line in metrics.read(folder) if line["kind"] == "train"]

    run = trained.recipe(home, train={"steps": 8})
    (end,) = trained.train(run, out, before=lambda _: trained.on_line(4, lambda: out.rename(moved)))
    assert end.startswith(f"run folder {out}: got metrics.jsonl or its folder was removed or renamed") and "--out" in end
    assert not out.exists() and steps(moved) == [1, 2, 3, 4, 5]
    trained.train(run, moved)
    assert steps(moved) == [*range(1, 9)]


def test_a_run_whose_folder_is_renamed_while_it_starts_is_one_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    monkeypatch.setattr(opening, "prepare", lambda *_: out.rename(tmp_path / "renamed"))
    with pytest.raises(
        BadInput, match="--out: got .*/recipe.yaml: No such file or directory, needed a folder that stays.*; fix: start again"
    ):
        trainer.train(trained.recipe(home, train={"steps": 1}), out=out, world=World())
    assert not out.exists()


def tensorboard(folder: Path, **_: Any) -> Board:
    """Fake `open_tensorboard`: it makes a new file at each start of a run."""
    folder.mkdir(exist_ok=True)
    (folder / f"events.{len(list(folder.iterdir()))}").touch()
    return Board(lambda values, step, time: None, lambda: None)


@pytest.mark.parametrize("changed", [{}, {"optimizer": {"lr": 0.5}}, {"train": {"steps": 2, "keep": 1}}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_starting_a_finished_run_again_writes_nothing(
    changed: dict[str, Any], ranks: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the recipe changes the learning rate, or asks for fewer steps and fewer checkpoints."""
    monkeypatch.setattr(metrics, "open_tensorboard", tensorboard)
    out = tmp_path / "run"
    (first, *_) = trained.train(trained.recipe(home, train={"steps": 4, "save_every": 2}), out, ranks=ranks)
    before = everything(out)
    assert {"recipe.yaml", "metrics.jsonl", "summary.json", "tensorboard/events.0"} <= before.keys()
    sections = {"train": {"steps": 4, "save_every": 2} | changed.get("train", {})} | {k: v for k, v in changed.items() if k != "train"}
    (again, *_) = trained.train(trained.recipe(home, **sections), out, ranks=ranks)
    assert everything(out) == before
    assert again["validation_loss"] == first["validation_loss"] and again["steps"] == 4


def test_a_process_that_nobody_waits_for_leaves_no_status(home: Path, tmp_path: Path) -> None:
    (home / "tiny.yaml").write_text(resolved_yaml(trained.recipe(home, train={"steps": 1}), {}))
    assert launch.main([str(home / "tiny.yaml"), "--out", str(tmp_path / "run")]) == 0
    assert not (tmp_path / "run" / status.NAME).exists() and not (tmp_path / "run" / NAME).exists()


def test_a_start_with_bad_input_removes_only_folders_that_it_made(home: Path, tmp_path: Path) -> None:
    """The run's folder is made before the bad input is found; a folder that existed before stays."""
    short = trained.recipe(home, data={"path": str(home / "short.txt")})
    (home / "short.txt").write_text("short")
    for out, stays in ((tmp_path / "a" / "b", False), (tmp_path / "c", True)):
        if stays:
            out.mkdir()
        with pytest.raises(ValueError, match="train text: got 6 tokens"):
            trainer.train(short, out=out, world=World(), display=False)
        assert out.exists() == stays and (not stays or not any(out.iterdir()))
    assert not (tmp_path / "a").exists()
