"""`python -m tests.counted initial` on small sizes, with rows that must fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe.recipe.sections import Model
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Degrees
from tests.counted import initial


def test_a_rank_draws_only_its_shards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank with a quarter of a matrix draws a quarter of its bytes. A rank with two matrices draws one if MOST_BYTES is one matrix."""
    whole = Layout((2048, 8192))  # large enough that malloc maps it, so that it counts in the process's peak memory
    cases = [
        ("whole", Model(), {"a.weight": whole}, Degrees(), 0),
        ("quarter", Model(), {"a.weight": replace(whole, split={1: "tp"})}, Degrees(tp=4), 3),
        ("two", Model(), {"a.weight": whole, "b.weight": whole}, Degrees(), 0),
    ]
    monkeypatch.setattr(initial, "cases", lambda: cases)
    monkeypatch.setattr(initial, "MOST_BYTES", 4 * 2048 * 8192)
    monkeypatch.setattr(initial, "MORE_TIME", 1e9)  # in effect no limit of time, because the machine may be busy
    assert initial.main(json=str(tmp_path / "rows.json")) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["drawn_bytes"] for row in rows] == [2**26, 2**24, 2**26] and [row["drawn_share"] for row in rows] == [1, 1, 0.5]
    assert all(0.9 * row["drawn_bytes"] <= row["peak_bytes"] for row in rows if row["drawn_bytes"] == 2**26)
    for worse in ({"peak_bytes": rows[1]["drawn_bytes"] + 2**27}, {"ns_each": 2e9 * rows[0]["ns_each"]}):
        assert not initial.judged(rows[1] | worse, rows[0])["passed"]


def test_the_measured_ranks_have_the_recipes_shards() -> None:
    """A stage of glam_8b_64e has two layers with 64 experts of 2 * 4096 * 16384 weights. A rank holds 1 expert of each with ep 64, 8 with
    ep 8."""
    held = {}
    for name, _, layouts, degrees, rank in initial.cases():
        mesh = initial.Mesh.of(degrees, rank)
        held[name] = {n: initial.math.prod(layout.local_shape(mesh)) for n, layout in layouts.items()}
    for ep, each in ((64, 1), (8, 8)):
        experts = [count for n, count in held[f"glam_8b_64e, ep {ep}, pp 8"].items() if ".experts." in n]
        assert sum(experts) == 2 * each * 2 * 4096 * 16384 and len(experts) == 4
    assert held["dense_8b, tp 8"]["layers.3.ffn.w2.weight"] == 4096 * 16384 // 8
