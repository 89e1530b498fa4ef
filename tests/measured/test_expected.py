"""The numbers of docs/use/gpu.md are those of the recorded run of `python -m tests.measured expected`, and of today's formulas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measured.expected import kernel_rows, kernel_table, step_rows, step_table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_recorded_tables_and_todays_planner_agrees() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/expected.json").read_text())["rows"]
    page = (ROOT / "docs/use/gpu.md").read_text()
    assert all("\n".join(table) in page for table in (kernel_table(rows), step_table(rows)))
    kernels, steps = ([row for row in rows if key in row] for key in ("layer", "step"))
    assert [row["tf_per_s"] for row in kernels] == [pytest.approx(row["tf_per_s"]) for row in kernel_rows()]
    for then, now in zip(steps, step_rows(), strict=True):
        assert now["seconds"] == pytest.approx(then["seconds"], rel=0.03) and now["gib"] < 80, now
