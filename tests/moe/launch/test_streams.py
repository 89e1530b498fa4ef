"""Output to a closed pipe or terminal, logs of ranks, and error messages for files with unusual names."""

from __future__ import annotations

import errno
import faulthandler
import io
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from moe.launch import launch, start, status
from moe.launch.processes import Rank
from moe.launch.streams import last_line, log_of, logged
from parallel.errors import BadInput
from parallel.store.files import read_text, user_path
from parallel.store.lock import HELD


def test_a_process_outlives_the_reader_of_both_its_streams(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from moe.launch.streams import outlive_readers
        outlive_readers()
        outlive_readers()
        print("begun", flush=True)
        sys.stdin.readline()  # waits until the test has closed the pipe's other end
        for _ in range(3):
            print("x" * 100_000, flush=True)
            print("y" * 100_000, file=sys.stderr, flush=True)
        Path(sys.argv[1]).write_text("went on")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "end")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert process.stdin and process.stdout and process.stdout.readline() == b"begun\n"
    process.stdout.close()
    process.stdin.write(b"go\n")
    process.stdin.close()
    assert process.wait(timeout=30) == 0 and (tmp_path / "end").read_text() == "went on"


def test_a_rank_logs_its_output_errors_and_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two attempts append to one file. BadInput leaves no file, and a log that cannot be written does not end the run."""
    monkeypatch.setattr(sys, "stdout", shown := io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(faulthandler, "is_enabled", lambda: False)  # pytest has enabled it
    log = log_of(tmp_path, 1)
    with pytest.raises(BadInput), logged(log):
        raise BadInput("x", got=1, needed="2", fix="x 2")
    assert list(tmp_path.iterdir()) == [] and last_line(log) == ""
    with logged(log):
        print("step 1")
        print("a warning", file=sys.stderr)
    print("not logged")
    with pytest.raises(ValueError, match="three"), logged(log):
        raise ValueError("three")
    assert (
        re.match(r"--- process \d+ on .+\nstep 1\na warning\n--- .+\nTraceback", log.read_text()) and last_line(log) == "ValueError: three"
    )
    said = log.read_text()
    with pytest.raises(BadInput), logged(log):
        raise BadInput("x", got=1, needed="2", fix="x 2")
    assert log.read_text() == said
    with logged(log) as attempt:
        print("nothing was trained")
        attempt.kept = False
    assert log.read_text() == said
    with logged(log):
        pass
    assert last_line(log) == ""  # of this attempt
    if not (pid := os.fork()):
        with logged(log):
            print("z" * 999)
            os.kill(os.getpid(), signal.SIGSEGV)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in log.read_text() and "test_streams.py" in log.read_text()
    with logged(tmp_path / "logs/rank-1.log/not-a-folder"):
        print("goes on")
    assert shown.getvalue() == "step 1\nnot logged\nnothing was trained\ngoes on\n"


def test_ranks_keep_logs_only_under_a_parent_that_has_locked_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> int:
        print("loaded", file=sys.stderr)
        raise ValueError("three")

    monkeypatch.setattr(launch, "_train", failing)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    words, log = ["switch_tiny", "--out", str(tmp_path)], log_of(tmp_path, 1)
    assert launch.main(words) == 1 and list(tmp_path.iterdir()) == []
    monkeypatch.setenv(HELD, str(tmp_path.resolve()))
    assert launch.main(words) == 1 and "\nloaded\nTraceback" in log.read_text() and last_line(log) == "ValueError: three"
    assert shown.getvalue().count("rank 1 failed:") == 2


def test_the_parent_names_the_log_of_the_rank_that_failed_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    attempt = start.Launch([], {}, 2, 2, "deepspeed", tmp_path, None, "rank_program", 1.0, [])
    ranks = [Rank(0, 4, ended_at=2.0, code=1), Rank(1, 5, ended_at=1.0, code=-11)]
    status.empty(tmp_path)
    assert "output of rank" not in "".join(start._end(attempt, ranks, 1, how="ended").lines)
    (log := log_of(tmp_path, 1)).parent.mkdir()
    log.write_text("step 7\n  loading\x1b expert 3  \n\n")
    lines = start._end(attempt, ranks, 1, how="ended").lines
    assert lines[-1] == f"output of rank 1: {log}, which ends with: loading expert 3" and lines[-1] in capsys.readouterr().err
    log.write_text(f"x\n{lines[0][-20:]}")
    assert start._end(attempt, ranks, 1, how="ended").lines[-1] == f"output of rank 1: {log}"  # the verdict says the rest


def test_paths_and_files_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    for text in ("~nosuchuser/x", "a" * 5000):
        with pytest.raises(BadInput, match="a path that can be looked up"):
            user_path(text, what="data.path")
    assert user_path(str(tmp_path / "none/of/it"), what="x") == tmp_path / "none/of/it"
    for name in ("Aufnahme 1.43\u202fPM", "a\u00a0b", "\u3000", "\U0001f468\u200d\U0001f469"):  # spaces and joiners of other scripts
        assert user_path(tmp_path / name, what="x") == tmp_path / name
    for name in ("a\x1b[31m", "a\0b", "a\nb", "a\u202eb", "a\u2028b", "a\udcffb"):
        with pytest.raises(BadInput, match="x: got .*, needed a path without control characters; fix: rename it"):
            user_path(f"{tmp_path}/{name}", what="x")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(bytes(11))
    for name, most_bytes in (("pipe", 10), ("large", 10), ("/dev/zero", 10)):
        with pytest.raises(OSError, match="not a regular file|more than 10"):
            read_text(tmp_path / name, most_bytes=most_bytes)
    assert read_text(tmp_path / "large", most_bytes=11) == "\0" * 11


def test_a_path_without_permission_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(path: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr(os, "lstat", denied)
    with pytest.raises(
        BadInput, match="RUN_DIR: got 'runs/a': Permission denied.*; fix: give this user permission to look into its folder"
    ):
        user_path("runs/a", what="RUN_DIR")
