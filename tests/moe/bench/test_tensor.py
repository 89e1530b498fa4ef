"""`moe bench tensor` with small sizes: all implementations give the same results. The exposed parts of its collectives are counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moe.bench.grids import tensor
from tests.measured import hidden


def test_all_implementations_give_the_same_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor, "WIDTHS", {24: 4})
    monkeypatch.setattr(tensor, "LENGTH", 10)
    tensor.main(rounds=2, json=str(tmp_path / "tensor.json"))
    rows = json.loads((tmp_path / "tensor.json").read_text())["rows"]
    assert [row["race"] for row in rows] == [race.name for race in tensor.RACES]
    assert all(row["apart"] <= tensor.WITHIN and row["ratio"] > 0 for row in rows)


def test_only_the_stated_parts_are_exposed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, small in (("TOKENS", 8), ("LINK_S", 0.001), ("HOP_S", 0.001), ("HOPS_LENGTH", 8)):
        monkeypatch.setattr(hidden, name, small)
    assert hidden.main(rounds=2, json=str(tmp_path / "hidden.json")) == 0
    *rows, hops = json.loads((tmp_path / "hidden.json").read_text())["rows"]
    forward, backward = [1 / chunks for chunks in hidden.CHUNKS], [0.0] * len(hidden.CHUNKS)
    assert [row["expected"] for row in rows] == forward * 2 + backward * 2
    assert [row["counted"] for row in rows] == [row["expected"] for row in rows]
    assert hops["hops"] == 4
