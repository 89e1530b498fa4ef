"""`python -m tests.measured small-costs` still runs, with small sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.measured import small_costs


def test_every_small_cost_is_a_row_with_its_unit_and_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = small_costs.TINY | {"d_model": 16, "d_ff": 24, "num_layers": 2}
    sizes = {"TINY": tiny, "SHAPES": 3, "SEQUENCES": 1, "VOCABULARY": 99, "GROUPS": (1,), "IDLE_RANKS": 2, "IDLE_S": 0.05}
    for name, small in sizes.items():
        monkeypatch.setattr(small_costs, name, small)  # 99 tokens are not a multiple of the tiles and chunks
    assert small_costs.main(rounds=1, json=str(tmp_path / "costs.json")) == 0
    rows, printed = json.loads((tmp_path / "costs.json").read_text())["rows"], capsys.readouterr().out
    assert {row["set"] for row in rows} == {"idle groups", "products", "pieces", "steps", "losses", "bytes of losses", "recomputed"}
    assert all(row["what"] in printed for row in rows) and len(rows) == len(printed.splitlines()) > 20
    units = {"idle groups": "processors", "bytes of losses": "MiB"}
    assert all(units.get(row["set"], "milliseconds") in row for row in rows)
