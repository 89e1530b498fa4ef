"""A sample of `python -m tests.campaigns kills`: all ranks and their launcher are killed; the resumed run gives the same bits.

Kills inside a save and on other layouts: tests/laws/test_kill.py; from layout to layout: tests/laws/test_resume.py.
"""

from __future__ import annotations

from pathlib import Path

from tests.campaigns import hangs, kills, lives
from tests.campaigns.faults import Row


def test_a_run_whose_launcher_was_killed_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    hangs.warm_up(tmp_path, deepspeed=False)
    killed = kills.Kills(tmp_path, "ddp")
    row = Row.of("kill", 1, lambda _: killed.once(kills.HOW.index("launcher")))
    assert row.problems == [] and (row.tried, row.held) == (1, 1)


def test_what_differs_is_named() -> None:
    run = {"steps": [(1, "0x1p0"), (2, "0x1p1")], "step-3": {"counters": "3", "w/weight": "a"}}
    assert lives.differ(run, run) == ""
    assert lives.differ(run | {"steps": run["steps"][:1]}, run) == "steps differ"
    assert lives.differ(run | {"step-3": {"counters": "3", "w/weight": "b"}}, run) == "step-3: w/weight differs"
    assert lives.differ({"steps": run["steps"]}, run) == "step-3 is in one alone"
    assert lives.differ(run | {"step-6": {}}, run) == "step-6 is in one alone"
