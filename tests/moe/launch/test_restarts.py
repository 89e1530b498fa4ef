"""Restart in place (--restarts): which failures are retried, how often, after which wait, and how many steps records say were repeated."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from moe.cli.main import main as command
from moe.launch import launch, ready, restarts, start, status
from moe.launch.arguments import Arguments
from moe.launch.launch import main as rank_main
from moe.launch.processes import Rank, find_ranks, wait
from moe.launch.restarts import End, Restarts
from moe.records import metrics
from moe.records.redone import Restart
from moe.records.summary import summary_rows
from moe.train.loop import trainer
from parallel.process.process import World
from parallel.watch import watchdog
from tests.support import trained

KILLED = End(1, ["rank 1 ended with signal SIGKILL"], {0: {"exit": 1, "pid": 5, "error": "x", "of_all": True}})


def failed(error: str, **more: Any) -> End:
    return End(1, [f"rank 0 ended with exit code 1: {error}"], {0: {"exit": 1, "pid": 5, "error": error} | more})


def save(out: Path, step: int) -> None:
    (out / "checkpoints" / f"step-{step}").mkdir(parents=True)


class Clock:
    """A clock that advances only during sleep()."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        patch.setattr(restarts, "time", self)

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (End(0, [], {}), ""),
        (End(75, ["every rank saved"], {}), ""),
        (End(130, [], {}), ""),
        (End(2, [], {0: {"exit": 2, "pid": 5, "error": "data.path: ..."}}), ""),
        (End(1, ["no rank started"], {}, began=False), "not started again: no rank had started"),
        (End(1, [], {}, stuck=True), "not started again: a process of the last attempt could not be killed"),
        (failed("a signal before training"), "not started again: a signal ended a rank before training"),
        (failed("memory: got none left", repeats=True), "not started again: memory would run out again"),
    ],
)
def test_what_would_only_repeat_is_not_tried_again(end: End, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Restarts(tmp_path, limit=3, fresh=False).after(end) == end.code
    assert capsys.readouterr().err.strip() == said


def test_without_the_flag_nothing_is_tried_again_and_nothing_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Restarts(tmp_path, limit=0, fresh=False).after(KILLED) == 1
    assert capsys.readouterr().err == ""


def test_a_new_checkpoint_begins_the_count_and_the_waits_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, lives = Clock(monkeypatch), Restarts(tmp_path, limit=8, fresh=False)
    waits: list[float] = []

    def die() -> int | None:
        code, began = lives.after(KILLED), clock.now
        if code is None:
            assert lives.wait([])
            waits.append(round(clock.now - began))
        return code

    assert [die() for _ in range(3)] == [None] * 3
    save(tmp_path, 40)
    assert [die() for _ in range(8)] == [None] * 8
    assert waits == [0, 1, 2, 0, 1, 2, 4, 8, 16, 32, 60]
    assert die() == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "restart 1, 1 of 8 in a row without a new checkpoint: the run continues from its beginning"
    assert lines[3] == "restart 4: the run continues from step-40"
    assert lines[5] == "restart 6, 3 of 8 in a row without a new checkpoint: the run continues from step-40 in 2 s"
    assert lines[-1] == "not started again: 8 restarts in a row (--restarts 8) brought no new checkpoint"
    assert len(lines) == 12
    assert Restart.of(lives.variables()) == Restart(11, "rank 1 ended with signal SIGKILL")


def test_an_error_in_the_same_words_ends_it_unless_something_new_was_saved(tmp_path: Path) -> None:
    lives = Restarts(tmp_path, limit=9, fresh=False)
    assert lives.after(failed("ValueError: boom")) is None
    assert lives.after(failed("ValueError: other")) is None
    save(tmp_path, 40)
    assert lives.after(failed("ValueError: other")) is None
    assert lives.after(failed("ValueError: other")) == 1
    lives = Restarts(tmp_path, limit=3, fresh=False)  # a killed rank leaves no message that could recur, so only the limit counts
    assert [lives.after(KILLED) for _ in range(4)] == [None] * 3 + [1]


def test_a_fresh_start_is_fresh_once(tmp_path: Path) -> None:
    """Restarts.fresh() is True until an attempt has renamed the folder of earlier checkpoints, and False after that."""
    save(tmp_path, 600)
    lives = Restarts(tmp_path, limit=3, fresh=True)
    assert lives.fresh() and lives.after(KILLED) is None and lives.fresh()
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints.before-1")
    assert lives.after(KILLED) is None and not lives.fresh()
    save(tmp_path, 20)
    assert lives.after(KILLED) is None and not lives.fresh()
    first = Restarts(tmp_path / "new", limit=3, fresh=True)
    assert first.fresh() and first.after(KILLED) is None and not first.fresh()


def test_a_named_step_is_gone_back_to_once(tmp_path: Path) -> None:
    """Restarts.from_step() is the step until an attempt has set later checkpoints aside or has saved, and None after that."""
    save(tmp_path, 40), save(tmp_path, 60)
    lives = Restarts(tmp_path, limit=3, fresh=False, from_step=40)
    assert lives.from_step() == 40 and lives.after(KILLED) is None and lives.from_step() == 40
    (tmp_path / "checkpoints/step-60").rename(tmp_path / "step-60")
    assert lives.after(KILLED) is None and lives.from_step() is None
    save(tmp_path, 60)
    assert lives.after(KILLED) is None and lives.from_step() is None


def test_a_folder_that_is_no_checkpoint_does_not_hide_new_ones(tmp_path: Path) -> None:
    for name in ("step-99999999999999999999", "step-٣٣٣"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints/step-77").write_text("a file")
    lives = Restarts(tmp_path, limit=1, fresh=False)
    for step in (20, 40, 60):
        save(tmp_path, step)
        assert lives.saved() and lives.after(KILLED) is None


RANK = """
import json, os, pathlib, signal, sys
status, life = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1]).parent / "lives"
with life.open("a") as file:
    file.write(json.dumps([sys.argv[2:], os.environ.get("MOE_RESTART", "")]) + "\\n")
if len(life.read_text().splitlines()) <= DEATHS:
    (status / "0.json").write_text(json.dumps({"exit": 1, "pid": 1, "error": "", "of_all": True}))
    os.kill(os.getpid(), signal.SIGKILL)
(status / "0.json").write_text(json.dumps({"exit": 0}))
"""


def run(out: Path, monkeypatch: pytest.MonkeyPatch, *, deaths: int, limit: int) -> tuple[int, list[Any]]:
    """Run `start` with a short program as launcher and rank, which fails in the first `deaths` attempts. limit: N of --restarts.
    Return (exit code, the arguments that each attempt got)."""

    def line(*_: object, folder: Path, **__: object) -> list[str]:
        return [sys.executable, "-S", "-c", RANK.replace("DEATHS", str(deaths)), str(folder)]

    monkeypatch.setattr(start, "_command", line)
    code = start.start(Arguments("recipe", out=out, fresh=True), nproc=1, restarts=limit)
    return code, [json.loads(life) for life in (out / "lives").read_text().splitlines()]


def test_the_command_starts_again_until_the_ranks_finish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Clock(monkeypatch)
    code, lives = run(tmp_path / "run", monkeypatch, deaths=2, limit=3)
    assert code == 0 and [("--fresh" in words) for words, _ in lives] == [True, False, False]
    assert [told.partition(" ")[0] for _, told in lives] == ["", "1", "2"] and "ended with" in lives[1][1]
    said = capsys.readouterr().err
    assert said.count("restart ") == 2
    code, lives = run(tmp_path / "again", monkeypatch, deaths=9, limit=2)
    assert code == 1 and len(lives) == 3


class Fork:
    """Replaces `subprocess.Popen` for the warm process: it is a fork of this process, which has imported everything already."""

    def __init__(self, command: list[str], *, env: dict[str, str], **_: object) -> None:
        self.pid, self.returncode = os.fork(), None
        if not self.pid:
            code = 99
            try:
                os.setsid()
                os.environ.clear()
                os.environ.update(env)
                sys.argv = command[3:]
                code = ready.main()
            finally:
                os._exit(code)

    def poll(self) -> int | None:
        return None

    def wait(self) -> int:
        return os.waitpid(self.pid, 0)[1]


@pytest.mark.timeout(60)
def test_ranks_of_later_lives_are_forks_of_one_process_that_has_loaded_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warm process imports once and forks the ranks of two attempts. In the first, rank 1 is killed and the parent kills rank 0; in the
    second, both ranks succeed."""
    loaded = tmp_path / "loaded"

    def live(words: list[str]) -> int:
        told = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MOE_RESTART", "OLD")}
        (tmp_path / f"{words[0]}-{os.environ['RANK']}").write_text(json.dumps([words, told]))
        if words[0] == "first":
            os.kill(os.getpid(), signal.SIGKILL) if told["RANK"] == "1" else time.sleep(60)
        return 0

    monkeypatch.setattr(ready.subprocess, "Popen", Fork)
    monkeypatch.setattr(ready, "_load", lambda words: loaded.write_text(loaded.read_text() + "x" if loaded.exists() else "x"))
    monkeypatch.setattr(launch, "main", live)
    monkeypatch.setattr(ready, "_FORK_S", 45.0)  # a fork of this large process takes over 10 s if eight others compute on two cores
    saved: list[bool] = []
    kept = ready.Ready(["recipe"], {"OLD": "1"}, 2, wanted=lambda: bool(saved))
    told = {"WORLD_SIZE": "2", "MOE_RESTART": "1 0 why"}

    def begin(word: str) -> ready.Forked | None:
        return kept.begin([word, "--a=b"], told, 2, no_more=lambda: False)

    with contextlib.closing(kept):
        kept.look()
        assert begin("none") is None  # `wanted` is False, so there is no warm process yet
        saved.append(True)
        kept.look()
        first = begin("first")
        assert first is not None
        while first.ranks[1].ended_at is None:
            wait(first.ranks, 0.1)
        assert {rank.rank: rank.pid for rank in find_ranks(first.pid)}[0] == first.ranks[0].pid
        assert first.ranks[1].code == -signal.SIGKILL and first.poll() is None and first.ranks[0].ended_at is None
        assert kept.end(first, "no such token") == [] and first.wait() == -signal.SIGKILL
        first.ranks[0].look()
        assert first.ranks[0].ended_at is not None
        second = begin("second")
        assert second is not None and second.wait() == 0 and [rank.code for rank in second.ranks] == [0, 0]
        assert second.pid != first.pid and loaded.read_text() == "x"
    for word, rank in (("first", 0), ("first", 1), ("second", 0), ("second", 1)):
        expected = {"RANK": str(rank), "OLD": None, **told}
        assert json.loads((tmp_path / f"{word}-{rank}").read_text()) == [[word, "--a=b"], expected]
    assert begin("late") is None


def test_who_was_killed_is_waited_for_no_longer_than_who_spoke_for_all(tmp_path: Path) -> None:
    """`_failed_before`: after a rank was killed, the others have half a second, because they can only report that it is missing. After an
    error without a status file they have five seconds, because they may know the reason."""
    for code, waits in ((-signal.SIGKILL, False), (-signal.SIGSEGV, False), (-signal.SIGABRT, True), (1, True), (None, True)):
        assert start._failed_before([Rank(0, 5, ended_at=10.0, code=code)], tmp_path, 11.0) is not waits, code
        assert start._failed_before([Rank(0, 5, ended_at=10.0, code=code)], tmp_path, 15.1)
    status.leave(tmp_path, 0, 1, "an error")
    assert not start._failed_before([Rank(0, 5, ended_at=10.0, code=1)], tmp_path / status.NAME, 11.0)


def test_a_signal_while_it_waits_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(clock, "sleep", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    code, lives = run(tmp_path / "run", monkeypatch, deaths=9, limit=9)
    assert code == 75 and len(lives) == 2 and "a signal came first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["--restarts", "-1"], {}, "--restarts: got -1"),
        (["--restarts", "2"], {"RANK": "0"}, "torchrun --max-restarts N"),
        (["--restarts", "2", "--hostfile", "HOSTS"], {}, "--restarts: got --restarts with --hostfile"),
    ],
)
def test_who_cannot_restart_says_who_does(
    words: list[str],
    environment: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "hosts").write_text("worker-0 slots=1\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert command(["train", "switch_tiny", *(word.replace("HOSTS", str(tmp_path / "hosts")) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_a_rank_leaves_restarts_to_what_started_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert rank_main(["switch_tiny", "--restarts", "3"]) == 2
    assert "torchrun --max-restarts N" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")  # torchrun would repeat --fresh, which sets the new checkpoints aside
    assert rank_main(["switch_tiny", "--fresh"]) == 2
    assert "--fresh: got the flag with torchrun --max-restarts 3" in capsys.readouterr().err


def test_a_signal_to_a_rank_that_fails_is_no_early_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that fails gets SIGTERM from torchrun while ranks still agree on the cause. It exits with 1, not as after an early signal."""

    def asks(_: BaseException) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def fails(*_: object, **__: object) -> None:
        raise ValueError("boom")

    monkeypatch.setattr(trainer, "train", fails)
    monkeypatch.setattr(watchdog, "ended_by", asks)
    if not (pid := os.fork()):
        code = 99
        try:
            code = rank_main(["switch_tiny", "--out", str(tmp_path)])
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1


def test_torchrun_says_that_it_started_ranks_again() -> None:
    found = Restart.of({"TORCHELASTIC_RESTART_COUNT": "2"})
    assert found is not None and found.number == 2 and found.since == pytest.approx(psutil.Process(os.getppid()).create_time())
    assert Restart.of({"TORCHELASTIC_RESTART_COUNT": "0"}) is None and Restart.of({}) is None


def test_an_older_runs_records_are_kept_where_the_first_life_died_before_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run starts in a folder that has records but no checkpoint. The first attempt moves these records aside and dies; the second attempt
    continues the first one's records."""
    home, out, write = trained.home(tmp_path, monkeypatch), tmp_path / "run", metrics.Records.write
    recipe = trained.recipe(home, train={"steps": 2, "save_every": 0})
    trained.train(recipe, out)
    shutil.rmtree(out / "checkpoints")
    older = (out / "metrics.jsonl").read_bytes()

    def dies(self: metrics.Records, line: Any) -> None:
        write(self, line)
        raise RuntimeError("dies here")

    since = time.time()
    monkeypatch.setattr(metrics.Records, "write", dies)
    with pytest.raises(RuntimeError, match="dies here"):
        trainer.train(recipe, out=out, world=World(), display=False, restart=Restart(1, "died", since))
    assert (out / metrics.PREVIOUS).read_bytes() == older and len(trained.lines(out)) == 1
    monkeypatch.setattr(metrics.Records, "write", write)
    trainer.train(recipe, out=out, world=World(), display=False, restart=Restart(2, "died", since))
    assert (out / metrics.PREVIOUS).read_bytes() == older
    assert [(line["event"], line.get("redone_steps")) for line in trained.lines(out, "event")][0] == ("resumed", 1)


def test_records_say_how_much_was_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints are saved at steps 3 and 6. Attempts die in step 2, step 5 and step 4, and the last one finishes: its records and summary
    have the number of repeated steps and their seconds."""
    home, out = trained.home(tmp_path, monkeypatch), tmp_path / "run"
    recipe, write = trained.recipe(home), metrics.Records.write
    lost: list[float] = []

    def life(number: int, until: int | None) -> dict[str, Any] | None:
        def hooked(self: metrics.Records, line: Any) -> None:
            write(self, line)
            if line["kind"] == "train" and line["step"] == until:
                raise RuntimeError("dies here")

        monkeypatch.setattr(metrics.Records, "write", hooked)
        restart = Restart(number, "rank 0 died") if number else None
        try:
            return trainer.train(recipe, out=out, world=World(), display=False, restart=restart)
        except RuntimeError:
            saved = max(trained.checkpoints(out), default=0)
            lost.append(sum(line["step_seconds"] for line in trained.lines(out) if line["step"] > saved))
            return None

    assert life(0, 2) is None and life(1, 5) is None and life(2, 4) is None
    summary = life(0, None)  # started by the user, not by --restarts
    assert summary is not None
    events = [line for line in trained.lines(out, "event") if line["event"] == "resumed"]
    assert [(event["step"], event["redone_steps"], event.get("restart")) for event in events] == [(0, 2, 1), (3, 2, 2), (3, 1, None)]
    assert [event.get("why") for event in events] == ["rank 0 died", "rank 0 died", None]
    assert summary["redone"] == {"resumes": 3, "restarts": 2, "steps": 5, "seconds": pytest.approx(sum(lost))}
    assert ("made again", "5 steps") in [(label, text.partition(",")[0]) for label, text in summary_rows(summary)]
    assert [step for step, _ in trained.losses(out)] == list(range(1, 7))
