"""`python -m tests.measured commits`: both sides run in turn, ratios are of the shortest times, and a slower side fails."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.measured import commits

EARLIER = Path("earlier")


def test_sides_run_in_turn_and_ratios_are_of_the_shortest_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[bool, str]] = []

    def seconds(tree: Path, flags: list[str], *, clock: str) -> dict[str, float]:
        assert flags == ["step", "--rounds", "2", "--peers", "none", "--only", "fp32"]
        calls.append((tree == EARLIER, clock))
        noise = 5.0 if len(calls) in (1, 2) else 0.0  # slow runs of both sides change no ratio
        return {"ours fp32": (2.0 if tree == EARLIER else 2.0 * factor[clock]) + noise}

    monkeypatch.setattr(commits, "checked_out", lambda commit: contextlib.nullcontext(EARLIER))
    monkeypatch.setattr(commits, "seconds", seconds)
    for slower, exit_code in ((1.01, 0), (1.03, 1)):
        factor, calls[:] = {"process_time": slower, "perf_counter": 1.5}, []
        found = tmp_path / f"{slower}.json"
        assert commits.main(before="abc", only="fp32", pairs=3, rounds=2, json=str(found)) == exit_code
        (row,) = json.loads(found.read_text())["rows"]
        assert (row["processor"], row["wall"], row["noise"]) == pytest.approx((slower, 1.5, 3.5)) and row["passed"] == (exit_code == 0)
        sides = [[earlier for earlier, _ in calls[at : at + 2]] for at in range(0, len(calls), 2)]
        assert sides == [[True, False]] * 2 + [[False, True]] * 2 + [[True, False]] * 2
        assert [clock for _, clock in calls] == ["process_time", "process_time", "perf_counter", "perf_counter"] * 3
