"""The table of docs/moe/kernels.md is that of the recorded run of `python -m tests.measured kernels`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.measured.kernels import KERNELS, TARGETS, good, table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_has_the_table_of_the_recorded_run_in_which_every_kernel_passed() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/kernels.json").read_text())["rows"]
    assert {row["target"] for row in rows} == set(TARGETS.values()) and len({row["triton"] for row in rows}) == 2
    assert all(good(row) and row["passed"] for row in rows)
    assert {row["out"] for row in rows if row["kernel"] == "weights"} == {"torch.float32", "torch.bfloat16"}
    assert not any(row["spilled"] for row in rows if row["kernel"] in KERNELS)
    assert table(rows) in (ROOT / "docs/moe/kernels.md").read_text()


def test_a_spill_a_warning_narrow_loads_and_too_much_shared_memory_fail() -> None:
    row = {"spilled": 32, "warnings": [], "narrow_loads": False, "kernel": KERNELS[0], "shared": 227 * 1024, "target": "sm_90a"}
    assert good(row)
    assert not any(good(row | fault) for fault in ({"spilled": 33}, {"warnings": ["C7515"]}, {"narrow_loads": True}, {"target": "sm_80"}))
