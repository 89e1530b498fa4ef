"""`python -m tests.measured environment` with fake commands: the environment they get, ratios of a round, and which results fail."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.measured import environment
from tests.support import command


def test_words_that_do_not_parse_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main(*, rounds: int = 15) -> int:
        """Return the number of rounds."""
        return rounds

    assert command.carry_out(main, "python -m tests.measured kinds", ["--rounds", "0"]) == 0
    for words in (["--rounds", "x"], ["--round", "3"]):
        assert command.carry_out(main, "python -m tests.measured kinds", words) == 2
        out, err = capsys.readouterr()
        got, needed = f"got {' '.join(words)}", "needed its flags, each with a value of its type"
        assert out == "" and err == f"python -m tests.measured kinds: {got}, {needed}; fix: see: python -m tests.measured kinds --help\n"


def test_a_command_gets_the_measured_settings_instead_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """`moe` is replaced by a program that computes for 0.2 s and records its environment."""
    given: dict[str, str] = {}
    run = subprocess.run

    def told(command: list[str], *, env: dict[str, str], **_: Any) -> Any:
        assert command[1:] == ["-m", "moe", "generate", "somewhere"]
        given.update(env)
        busy = "import time\nwhile time.process_time() < 0.2: pass\nprint('text')"
        return run([sys.executable, "-S", "-c", busy], env=env, capture_output=True, text=True)

    monkeypatch.setattr(subprocess, "run", told)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    found = environment.command(["generate", "somewhere"], {"OMP_WAIT_POLICY": "active"})
    assert given["OMP_WAIT_POLICY"] == "active" and given["PATH"] == os.environ["PATH"]
    assert not {"LRU_CACHE_CAPACITY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"} & given.keys()
    assert found["result"] == "text\n" and 0.15 < found["processor_seconds"] < 2


@pytest.mark.parametrize(
    ("bounded", "passed"),
    [
        ({}, True),
        ({"result": [2.0]}, False),  # the losses differ
        ({"peak_bytes": 1000}, False),  # smaller caches save no memory
        ({"processor_seconds": [1.0, 9.0, 4.6]}, False),  # ratios 0.5, 1.13 and 1.15: the median is above 1.10
    ],
)
def test_bounded_caches_must_save_memory_and_change_nothing(
    bounded: dict[str, Any], passed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"1024": [2.0, 8.0, 4.0], "32": bounded.get("processor_seconds", [1.0, 8.4, 4.2])}
    count = dict.fromkeys(seconds, 0)
    order: list[str] = []

    def command(words: list[str], settings: dict[str, str]) -> dict[str, Any]:
        name = settings["LRU_CACHE_CAPACITY"]
        order.append(name)
        row = {
            "seconds": 3.0,
            "processor_seconds": seconds[name][count[name]],
            "peak_bytes": {"1024": 1000, "32": 600}[name],
            "result": [1.0],
        }
        count[name] += 1
        return row | ({} if name == "1024" else {k: v for k, v in bounded.items() if k != "processor_seconds"})

    monkeypatch.setattr(environment, "command", command)
    rows = environment.compare("caches", "training", environment.CACHES, ["train"], rounds=3)
    assert order == ["1024", "32", "32", "1024", "1024", "32"]
    assert [row["passed"] for row in rows] == [True, passed]
    assert ("FAIL" in capsys.readouterr().out) is not passed
    if passed:
        assert rows[1]["processor_seconds_over_first"] == pytest.approx(1.05) and rows[1]["peak_bytes"] == 600
