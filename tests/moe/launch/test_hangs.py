"""A sample of `python -m tests.campaigns hangs`: one of the training ranks is stopped, killed, or calls a different collective. The
watchdog must end the run, with the diagnosis in every other rank's status.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.campaigns import hangs
from tests.campaigns.faults import Row

SAMPLE = [
    "stopped (SIGSTOP) at a collective",
    "killed (SIGKILL) at a collective",
    "raising in the backward pass",
    "a message of a pipeline lost",
    "splits that disagree",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_every_rank_that_is_left_names_the_culprit(name: str, tmp_path: Path) -> None:
    hangs.warm_up(tmp_path, deepspeed=False)
    # less than 3 s could expire on busy cores
    (case,) = [replace(c, overrides=c.overrides | {"train.timeout_s": "3"}) for c in hangs.CASES if c.name == name]
    row = Row.of(case.name, 1, lambda number: hangs.once(case, number, tmp_path, slack_s=30))
    assert row.problems == [] and (row.tried, row.held) == (1, 1)
