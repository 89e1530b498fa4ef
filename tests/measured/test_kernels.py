"""The figures of docs/moe/kernels.md are those of the recorded run of `python -m tests.measured kernels`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.measured.kernels import KERNELS, TARGETS, good

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_figures_of_the_recorded_run_in_which_every_kernel_passed() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/kernels.json").read_text())["rows"]
    assert {row["target"] for row in rows} == set(TARGETS.values()) and len({row["triton"] for row in rows}) == 2
    assert all(good(row) and row["passed"] for row in rows)
    assert {row["out"] for row in rows if row["kernel"] == "weights"} == {"torch.float32", "torch.bfloat16"}
    multiply = [row for row in rows if row["kernel"] in KERNELS]
    assert max(row["spilled"] for row in multiply) == 0
    page = (ROOT / "docs/moe/kernels.md").read_text()
    assert f"need at most {max(row['registers'] for row in multiply)} of 255 registers, spill nothing" in page
    assert " and ".join(sorted({row["triton"] for row in rows})) in page


def test_a_spill_a_warning_and_narrow_loads_fail() -> None:
    row = {"spilled": 32, "warnings": [], "narrow_loads": False, "kernel": KERNELS[0]}
    assert good(row)
    assert not any(good(row | fault) for fault in ({"spilled": 33}, {"warnings": ["C7515"]}, {"narrow_loads": True}))
