"""Lost seconds of a run that is killed and started again, as `shares` computes them from its records."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.campaigns import restarts
from tests.campaigns.restarts import shares


def test_seconds_from_the_checkpoint_to_the_first_new_step_are_lost() -> None:
    """Steps take 1 s and are recorded at their end. Saved at second 3, killed; step 4 ends at second 13: 13 - 3 - 1 = 9 s are lost."""
    steps = {1: 1.0, 2: 2.0, 3: 3.0, 4: 13.0, 5: 14.0}
    lines = [{"kind": "train", "step": step, "time": at, "step_seconds": 1.0} for step, at in steps.items()]
    lines.insert(3, {"kind": "event", "event": "resumed", "step": 3})
    assert shares(lines) == (13.0, [9.0])
    assert shares(lines[:3]) == (2.0, []) and shares([]) == (0.0, [])


def test_a_run_that_ended_before_its_kill_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ended(home: Path, out: Path, **_: int) -> subprocess.Popen[bytes]:
        out.with_suffix(".log").write_text("")
        return subprocess.Popen(["true"])

    monkeypatch.setattr(restarts, "_speed", lambda _: 1.0)
    monkeypatch.setattr(restarts, "_train", ended)
    row = restarts.measured(tmp_path, "restarts", interval_s=1.0, kills=1, aim=0.0)
    assert (row.tried, row.held) == (0, 0) and "1 of 1 kills" in row.problems[0]
