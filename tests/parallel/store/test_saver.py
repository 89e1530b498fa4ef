"""An asynchronous save writes the same files as a synchronous one, with the values at its begin, and reports every failure."""

from __future__ import annotations

import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.errors import BadInput
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.process import World
from parallel.store import checkpoint
from parallel.store.checkpoint import Piece, numbered
from parallel.store.saver import Saver, _Writer
from tests.support.ranks import run_on_ranks

ROWS, WIDTH = 5, 300  # shape of each rank's shard


def held(rank: int, ranks: int, fill: float = 0.0) -> list[tuple[str, Piece]]:
    """Return (kind, piece) of a rank's rows of one tensor: a weight, a moment, and a bf16 state."""
    values = torch.arange(ROWS * WIDTH, dtype=torch.float32).reshape(ROWS, WIDTH) + 1000 * rank + fill
    kinds = {"weight": values, "exp_avg": -values, "half": values.bfloat16()}
    return [(kind, Piece("layer.w", (ROWS * ranks, WIDTH), (ROWS * rank, 0), tensor)) for kind, tensor in kinds.items()]


def connected(rank: int, ranks: int) -> Axis:
    return process.connect(Degrees(dp=ranks), World(rank, ranks)).axis("world")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_files_are_those_of_a_save_that_waits_whatever_comes_after_it_began(tmp_path: Path) -> None:
    """Files equal a synchronous save's, although tensors and state change during writing. A second save reuses the first one's buffers."""

    def work(rank: int) -> list[int | None]:
        world, counters = connected(rank, 2), {"step": 3}
        saver, parts = Saver(tmp_path / "async", world, keep=2), held(rank, 2)
        checkpoint.save(tmp_path / "sync", 3, held(rank, 2), state={"counters": {"step": 3}}, world=world, keep=2)
        saver.begin(3, parts, state={"counters": counters})
        for _, piece in parts:
            piece.tensor.add_(7)
        counters["step"] = 4
        saver.begin(4, parts, state={"counters": counters})
        saver.settle()
        news = [saver.news(), saver.news()]
        changed = [(kind, Piece(p.name, p.shape, p.start, p.tensor)) for kind, p in parts]
        checkpoint.save(tmp_path / "sync", 4, changed, state={"counters": counters}, world=world, keep=2)
        return news

    assert run_on_ranks(work, 2) == [[4, None]] * 2
    for step in (3, 4):
        assert contents(tmp_path / "async" / f"step-{step}") == contents(tmp_path / "sync" / f"step-{step}")
    assert not list((tmp_path / "async").glob("*.tmp"))


@pytest.mark.parametrize("failing", [0, 1])
def test_what_one_rank_cannot_write_every_rank_learns_and_the_checkpoint_before_stays(tmp_path: Path, failing: int) -> None:
    def work(rank: int) -> str:
        saver = Saver(tmp_path, connected(rank, 2), keep=1)
        saver.save(1, held(rank, 2), state={})
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # a write past it fails as on a full disk
        try:
            saver.begin(2, held(rank, 2), state={})
            saver.settle()
        except BadInput as refused:
            return str(refused)
        return "saved"

    said = run_on_ranks(work, 2)
    assert said[0] == said[1] and "File too large" in said[0] and f"on rank {failing}" in said[0]
    assert [step for step, _ in numbered(tmp_path)] == [1] and not list(tmp_path.glob("*.tmp"))
    assert checkpoint.verify(tmp_path / "step-1")


def test_a_commit_that_fails_is_told_at_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "commit", full)
    saver = Saver(tmp_path, Axis("world"), keep=1)
    saver.begin(1, held(0, 1), state={})
    with pytest.raises(BadInput, match="No space left on device"):
        saver.begin(2, held(0, 1), state={})
    assert saver.news() is None and not list(tmp_path.iterdir())


def test_copies_of_what_has_gone_to_other_ranks_go(tmp_path: Path) -> None:
    saver = Saver(tmp_path, Axis("world"), keep=1)
    for step in (1, 2, 3):
        expert = Piece(f"experts.{step}.w1", (ROWS, WIDTH), (0, 0), torch.ones(ROWS, WIDTH))
        saver.begin(step, [("weight", expert)], state={})
        assert [name for _, name, _ in saver._copies] == [f"experts.{step}.w1"]
    saver.settle()


def test_a_run_that_fails_gives_the_last_save_time_to_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, real = threading.Event(), checkpoint.write_part

    def slow(*given: Any) -> None:
        go_on.wait(20)
        real(*given)

    monkeypatch.setattr(checkpoint, "write_part", slow)
    saver = Saver(tmp_path, Axis("world"), keep=1)
    saver.begin(5, held(0, 1), state={})
    assert saver.news() is None and not numbered(tmp_path)  # the save is still in progress
    threading.Timer(0.2, go_on.set).start()
    saver.leave()
    assert saver.news() == 5 and [step for step, _ in numbered(tmp_path)] == [5]


def test_no_rank_waits_for_parts_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    """Rank 0's writer ends with an error if the folder was renamed or removed, because the other rank cannot write its part."""
    folder = checkpoint.temporary(tmp_path, 3)
    folder.mkdir()
    writer = _Writer(tmp_path, 3, list(held(0, 2)), {}, Axis("world", (0, 1), 0), 1)
    writer.written()
    shutil.rmtree(folder)
    writer.join(20)
    assert not writer.is_alive() and isinstance(writer.problem, FileNotFoundError)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_run_that_fails_does_not_wait_for_a_part_that_failed(tmp_path: Path, failing: int) -> None:
    """Saver.leave returns soon if a rank's part failed. The older checkpoint stays, and the next save succeeds."""

    def work(rank: int) -> float:
        saver = Saver(tmp_path, connected(rank, 2), keep=1)
        saver.save(1, held(rank, 2), state={})
        if rank == failing:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        saver.begin(2, held(rank, 2), state={})
        began = time.monotonic()
        saver.leave()
        return time.monotonic() - began

    assert max(run_on_ranks(work, 2)) < 10
    assert [step for step, _ in numbered(tmp_path)] == [1]
    run_on_ranks(lambda rank: Saver(tmp_path, connected(rank, 2), keep=1).save(2, held(rank, 2), state={}), 2)
    assert [step for step, _ in numbered(tmp_path)] == [2] and not list(tmp_path.glob("*.tmp"))
