"""The small costs can still be measured: figures of the log come from them, and nothing else calls these functions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe.bench.small_costs import losses, main, pieces


def test_every_small_cost_is_a_row_with_its_unit_and_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(rounds=1, only="products", json=str(tmp_path / "costs.json")) == 0
    rows = json.loads((tmp_path / "costs.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["bf16 product, new shape", "bf16 product, known shape"]
    assert all(row["milliseconds"] > 0 and row["what"] in capsys.readouterr().out for row in rows[:1])
    for work in (pieces() | losses(vocabulary=99)).values():  # 99 tokens are not a multiple of the tiles and chunks
        work()
