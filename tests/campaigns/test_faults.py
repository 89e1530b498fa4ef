"""A few tries of campaigns that no other test runs: signals at moments of a run, and failing disks."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from moe.launch import status
from moe.launch.verdict import verdict
from moe.train.loop import trainer
from tests.campaigns import disks
from tests.campaigns.hangs import warm_up
from tests.campaigns.lives import Attempt
from tests.campaigns.preemption import Preemptions


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("home")
    warm_up(found, deepspeed=False)
    return found


@pytest.fixture(scope="module")
def signals(home: Path) -> Preemptions:
    return Preemptions(home)


@pytest.mark.parametrize(("moment", "number"), [("tokenizing", 1), ("in a save", 2)])
def test_a_signal_at_any_moment_saves_or_has_nothing_to_lose(signals: Preemptions, moment: str, number: int) -> None:
    assert signals.once(moment, number)[0] == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_rank_before_its_first_step_ends_the_run_for_a_restart(number: signal.Signals, home: Path, tmp_path: Path) -> None:
    """Rank 1 is in its first step and waits for rank 0, which gets the signal. Rank 0 ends, so rank 1 fails; the run can be restarted."""
    out = tmp_path / "run"

    def late(rank: int) -> None:
        catches = trainer.asked_to_stop

        @contextlib.contextmanager
        def held() -> Any:
            (tmp_path / f"at-{rank}").touch()
            time.sleep(60.0 if rank == 0 else 0.0)
            with catches() as asked:
                yield asked

        trainer.asked_to_stop = held  # type: ignore[assignment]

    attempt = Attempt(home, out, {}, before=late)
    until = time.monotonic() + 30
    while not all((tmp_path / f"at-{rank}").exists() for rank in range(2)) and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)  # until rank 1 waits in its first step
    attempt.send(number, [0])
    assert attempt.end(30) == []
    for rank, code in zip(attempt.ranks, attempt.codes(), strict=True):
        rank.code = code
    code, lines = verdict(status.read(out / status.NAME), attempt.ranks, 2, 1, asked=number)
    assert code == (75 if number == signal.SIGTERM else 130) and "came before training began" in lines[0], (lines, attempt.said())


def test_a_disk_that_fills_a_cache_that_cannot_be_written_and_a_folder_that_goes(tmp_path: Path) -> None:
    faults: list[tuple[Callable[[Path, float], tuple[str, float]], float, bool]] = [
        (disks._fills, 0.35, True),
        (disks._cache_unwritable, 0.5, False),
        (partial(disks._goes, how=shutil.rmtree), 0.1, False),
        (partial(disks._goes, how=disks._rename), 0.1, False),
        (disks._second, 0.1, False),
        (disks._twice, 0.1, False),
    ]
    why = disks.why_not()
    for number, (once, share, mounts) in enumerate(faults):
        if not (mounts and why):
            assert disks._in_folder(lambda place, _, once=once, share=share: once(place, share), tmp_path, 1, number)[0] == ""
