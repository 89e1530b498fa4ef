"""`moe bench exchange`: every dispatcher sends the bytes of its formula, and moving experts balances the ranks' rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moe.bench.layers import exchange
from moe.bench.layers.exchange import load_of, measure, skewed
from moe.bench.layers.layers import Shape
from moe.experts.dispatch import dispatcher_of, examples
from moe.recipe import sections
from parallel.errors import BadInput
from tests.support.ranks import run_on_ranks

SMALL = Shape(tokens=24, width=6, hidden=10, experts=16, k=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_dispatcher_sends_what_theory_says(ranks: int) -> None:
    for rows in run_on_ranks(measure, ranks, ranks, 1, SMALL, timeout_s=60):
        assert len(rows) == 12 and {r["kind"] for r in rows} >= {*examples(), "etp"}
        for row in rows:
            assert row["measured_bytes"] == row["expected_bytes"] and row["error"] == 0 and row["passed"], row


def stated(ranks: int, number_bytes: int, **section: Any) -> int:
    traffic = dispatcher_of(sections.Dispatch(**section)).traffic(load_of(SMALL, ranks, number_bytes))
    return sum(message.sent for message in traffic.every)


def test_an_all_to_all_sends_two_rows_for_each_choice_that_leaves() -> None:
    """all_to_all sends 2 k T D (P - 1) / P numbers in the forward pass, as many in the backward pass, and the counts of rows."""
    for ranks in (2, 4):
        rows = 4 * 2 * 24 * 6 * 4 * (ranks - 1) // ranks
        assert stated(ranks, 4) == rows + 16 * 8 * (ranks - 1) // ranks


def test_moving_experts_evens_out_a_skewed_load() -> None:
    found = run_on_ranks(skewed, 2, 2, 1, replace(SMALL, tokens=200), timeout_s=60)[0]
    assert found["largest_rank_before"] > 1.4 and found["largest_rank_after"] < 1.1


def test_the_table_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(exchange, "SHAPE", SMALL)
    assert exchange.main(nproc=2, rounds=1, json=str(tmp_path / "e.json")) == 0
    assert "after moving" in capsys.readouterr().out
    written = json.loads((tmp_path / "e.json").read_text())
    assert written["failed"] == 0 and written["passed"] == 12
    assert {"kind", "ranks", "measured_bytes", "expected_bytes", "error", "over_plain"} <= written["rows"][0].keys()
    assert written["rebalancing"]["largest_rank_after"] < written["rebalancing"]["largest_rank_before"]


def test_ranks_must_share_the_experts() -> None:
    for nproc in (1, 3):
        with pytest.raises(BadInput, match=f"--nproc: got {nproc}, needed at least 2 ranks"):
            exchange.main(nproc=nproc)
