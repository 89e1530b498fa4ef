"""`moe bench tensor` with small sizes: all implementations give the same results, and every comparison has its table row."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe.bench.grids import tensor, tensor_hidden


def test_all_implementations_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "WIDTHS", {24: 4})
    monkeypatch.setattr(tensor, "LENGTH", 10)
    monkeypatch.setattr(tensor_hidden, "TOKENS", 8)
    monkeypatch.setattr(tensor_hidden, "LINK_S", 0.001)
    tensor.main(rounds=2, json=str(tmp_path / "tensor.json"))
    rows = json.loads((tmp_path / "tensor.json").read_text())["rows"]
    races, hidden = rows[: len(tensor.RACES)], rows[len(tensor.RACES) :]
    assert [row["race"] for row in races] == [race.name for race in tensor.RACES]
    assert all(row["apart"] <= tensor.WITHIN and row["ratio"] > 0 for row in races)
    forward, backward = [1 / chunks for chunks in tensor_hidden.CHUNKS], [0.0] * len(tensor_hidden.CHUNKS)
    assert [row["expected"] for row in hidden] == forward * 2 + backward * 2
    assert [row["counted"] for row in hidden] == [row["expected"] for row in hidden]
