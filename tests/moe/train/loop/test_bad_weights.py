"""A run never saves weights that are not finite, and never removes a good checkpoint for a bad one; --from_step removes none either."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.records.summary import summary_rows
from moe.train.loop.trainer import Job
from parallel.mesh.mesh import Axis
from parallel.store import checkpoint
from parallel.store.checkpoint import Piece
from parallel.store.stored import Reader
from tests.moe.train.loop.test_trainer import poison
from tests.support import trained

STEPS, AT = 8, 5  # steps of a run; step after which a weight is made NaN


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        yield trained.home(tmp_path_factory.mktemp("home"), patch)


@pytest.fixture(scope="module")
def whole(home: Path) -> Path:
    """The folder of an undisturbed run."""
    trained.train(trained.recipe(home, degrees={"ep": 2}, train={"steps": STEPS, "save_every": 2, "keep": 9}), home / "whole", ranks=2)
    return home / "whole"


def spoil(kind: str, *, rank: int, step: int = AT) -> Callable[[int], None]:
    """Return a `before` function: after `step`, on `rank`, it makes an element of an expert's weight NaN, or of a moment infinite."""

    def act(job: Job) -> None:
        if job.counters.step == step and job.world.rank == rank:
            held = next(held for held in job.engine.tensors() if held.kind == kind and "experts.w" in held.name)
            with torch.no_grad():
                held.tensor.view(-1)[-1] = math.nan if kind == "weight" else math.inf

    return lambda this: trained.after_step(act)


@pytest.mark.parametrize(
    ("kind", "sharding", "mode"),
    [("weight", "ddp", "sync"), ("exp_avg", "ddp", "async"), ("weight", "fsdp", "async")],
)
def test_a_bad_weight_ends_the_run_is_not_saved_and_the_next_start_is_the_undisturbed_run(
    kind: str, sharding: str, mode: str, home: Path, whole: Path, tmp_path: Path
) -> None:
    train = {"steps": STEPS, "save_every": 2, "keep": 2, "save_mode": mode}
    run, out = trained.recipe(home, degrees={"ep": 2}, sharding={"kind": sharding}, train=train), tmp_path / "run"
    first, second = trained.train(run, out, ranks=2, before=spoil(kind, rank=1))
    assert isinstance(first, str) and first == second and "\n" not in first
    assert "values that are not finite in the weight of" in first and "on rank 1" in first
    assert "continues from step-4" in first  # also if an asynchronous save of step 4 is still running
    assert trained.checkpoints(out) == [2, 4]
    assert all(isinstance(summary, dict) for summary in trained.train(run, out, ranks=2))
    if sharding == "ddp":
        assert trained.losses(out) == trained.losses(whole)
        assert trained.tensors(out / f"checkpoints/step-{STEPS}") == trained.tensors(whole / f"checkpoints/step-{STEPS}")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_finds_a_moment_that_is_not_finite(mode: str, home: Path, tmp_path: Path) -> None:
    """The gradients are still finite: an infinite moment spoils the weight in the next step, and gradients in the step after."""
    run, out = trained.recipe(home, degrees={"ep": 2}, train={"save_every": 1, "keep": 1, "save_mode": mode}), tmp_path / "run"
    first, second = trained.train(run, out, ranks=2, before=spoil("exp_avg", rank=1, step=2))
    assert first == second and "step-2: got values of layers.1.experts." in first and "/exp_avg that are not finite, on rank 1" in first
    assert trained.checkpoints(out) == [1] and not list((out / "checkpoints").glob("*.tmp"))


def test_while_steps_are_skipped_nothing_is_saved_or_pruned(home: Path, tmp_path: Path) -> None:
    """A save that is due during skipped steps follows after the next update. If the last steps are skipped, older checkpoints stay."""
    run, out = trained.recipe(home, degrees={"ep": 2}, train={"save_every": 2, "keep": 1}), tmp_path / "run"
    trained.train(run, out, ranks=2, before=poison(trained.EXPERT, range(2, 4), rank=1))
    assert [step for event, step in trained.events(out) if event == "saved"] == [2, 5, 6] and trained.checkpoints(out) == [6]
    last = tmp_path / "last"
    summary, _ = trained.train(run, last, ranks=2, before=poison(trained.EXPERT, range(4, 6), rank=1))
    assert trained.checkpoints(last) == [4, 6] and (summary["skipped"], summary["skipped_last"]) == (2, 2)
    assert ("skipped steps", "2: gradients that were not finite; these include the run's last 2") in summary_rows(summary)
    before = trained.tensors(last / "checkpoints/step-4")
    trained.train(run, last, ranks=2)
    assert trained.checkpoints(last) == [4, 6] and trained.tensors(last / "checkpoints/step-4") == before


def test_a_checkpoint_that_is_not_finite_is_passed_over(home: Path, whole: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A resume skips a checkpoint with a NaN, which an earlier release may have saved, and takes the one before."""
    out = shutil.copytree(whole, tmp_path / "run")
    folder = out / "checkpoints"
    shutil.rmtree(folder / "step-8")
    reader = Reader(folder / "step-6")
    bad = [
        (kind, Piece(name, tuple(parts[0]["shape"]), (0,) * len(parts[0]["shape"]), _whole(reader, name, kind)))
        for (name, kind), parts in reader.entries.items()
    ]
    next(piece for kind, piece in bad if kind == "weight" and "experts.3" in piece.name).tensor.view(-1)[0] = math.nan
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "finite", lambda tensor: True)
        checkpoint.save(folder, 6, bad, state=reader.state, world=Axis("world"), keep=9)
    run = trained.recipe(home, degrees={"ep": 2}, train={"steps": STEPS, "save_every": 2, "keep": 9})
    assert all(isinstance(summary, dict) for summary in trained.train(run, out, ranks=2))
    assert ("resumed", 4) in trained.events(out) and trained.losses(out) == trained.losses(whole)


def test_a_checkpoint_that_was_passed_over_displaces_no_good_one(home: Path, whole: Path, tmp_path: Path) -> None:
    """It is set aside, so it is none of the `train.keep` newest checkpoints, also if its step is never saved again."""
    out = shutil.copytree(whole, tmp_path / "run")
    shutil.rmtree(out / "checkpoints/step-8")
    (out / "checkpoints/step-6").rename(out / "checkpoints/step-5")
    next((out / "checkpoints/step-5").glob("*.safetensors")).write_bytes(b"damaged")
    run = trained.recipe(home, degrees={"ep": 2}, train={"steps": STEPS, "save_every": 9, "keep": 2})
    trained.train(run, out, ranks=2, before=trained.stop_at(5))
    assert trained.checkpoints(out) == [4, 6] and [path.name for path in (out / "checkpoints.before-1").iterdir()] == ["step-5"]


def _whole(reader: Reader, name: str, kind: str) -> Any:
    return reader.region(name, kind, tuple(slice(0, n) for n in reader.entries[name, kind][0]["shape"]))


def test_a_named_step_is_gone_on_from_and_later_checkpoints_are_set_aside(home: Path, whole: Path, tmp_path: Path) -> None:
    out = shutil.copytree(whole, tmp_path / "run")
    before = trained.files(out / "checkpoints")
    run = trained.recipe(home, degrees={"ep": 2}, train={"steps": STEPS, "save_every": 2, "keep": 9})
    said = "--from_step: got 5, needed one of 2, 4, 6, 8; fix: --from_step 8"
    assert trained.train(run, out, ranks=2, from_step=5) == [said] * 2 and trained.files(out / "checkpoints") == before
    assert trained.train(run, out, ranks=2, from_step=4, before=trained.stop_at(5)) == [trained.STOPPED] * 2
    aside = {f"step-{step}/{name}": digest for step in (6, 8) for name, digest in trained.files(whole / f"checkpoints/step-{step}").items()}
    assert trained.files(out / "checkpoints.before-1") == aside and trained.checkpoints(out) == [2, 4, 6]
    assert all(isinstance(summary, dict) for summary in trained.train(run, out, ranks=2, from_step=6))  # no checkpoint is later than step 6
    assert ("resumed", 4) in trained.events(out) and ("resumed", 6) in trained.events(out)
    assert trained.losses(out) == trained.losses(whole) and not (out / "checkpoints.before-2").exists()
