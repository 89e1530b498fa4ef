"""Inputs of `python -m tests.campaigns hostile` that once did harm: none is executed, printed without escaping, or waited for."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from parallel.errors import plain
from tests.campaigns.hostile import carry_out, once
from tests.campaigns.hostile_inputs import CANARY, Input, inputs

SAMPLE = (
    "aliases that grow, as a section",
    "lists in lists",
    "terminal codes as a key",
    "a parent of 5,000 letters",
    "a recipe's name with a line end",
    "terminal codes as a flag",
    "a run's folder of 5,000 letters",
    "a host with words of a shell",
    "slots of 5,000 digits",
    "a deep cluster",
    "a cluster of a trillion nodes",
    "a stage of 2^60",
    "a trace whose keys take for ever to hash",
    "a deep header",
    "text: a pipe",
)


@functools.cache
def named() -> dict[str, Input]:
    """Return all inputs by name. They take half a second, which a worker that runs none of these tests need not spend."""
    return {each.name: each for each in inputs()}


@pytest.mark.parametrize("name", SAMPLE)
def test_hostile_input_is_one_line(name: str, tmp_path: Path) -> None:
    given = named()[name]
    problem, seconds = once(given, tmp_path / "tried", None)
    assert not problem
    assert seconds < 10


def test_the_bench_sees_what_is_executed_printed_or_waited_for(tmp_path: Path) -> None:
    given = named()["text: a pipe"]

    def harm(place: Path) -> None:
        given.make(place)
        (place / CANARY).touch()

    problem, _ = once(type(given)(given.kind, "harm", given.words, harm), tmp_path / "tried", None)
    assert problem == "harm: it was executed"
    (tmp_path / "here").mkdir()
    os.mkfifo(tmp_path / "here" / "hangs")
    code, _, seconds, _ = carry_out(("show", "\x1b"), tmp_path / "here", limit_s=0.0)
    assert code is None and seconds < 5


def test_plain_text_keeps_letters_and_escapes_codes() -> None:
    assert plain("straße 漢字 \x1b[2J\x9b\u202e\udcff\n") == "straße 漢字 \\x1b[2J\\x9b\\u202e\\udcff\\n"
