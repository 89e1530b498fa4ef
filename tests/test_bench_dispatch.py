"""`moe bench dispatch` on shapes of a few rows: every layer gives the same output, the rows are as documented, bad names are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe.bench import dispatch, layers
from moe.bench.layers import Case, Shape
from moe.bench.timing import in_turn, peak_bytes, ratio
from parallel.errors import BadInput

SHAPES = (Shape(96, 24, 40, 8, 1), Shape(64, 32, 16, 16, 4))


def cases() -> list[Case]:
    return [
        Case(shape, dtype, routing) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16) for routing in ("balanced", "skewed")
    ]


@pytest.mark.parametrize("case", cases(), ids=str)
def test_inputs_are_routed_as_they_are_made_to(case: Case) -> None:
    """Balanced: every expert has the same number of rows; skewed: one has half of them, or every token once."""
    s = case.shape
    chosen_TK = (case.inputs().float() @ case.router().t()).topk(s.k).indices
    assert torch.equal(chosen_TK.sort(1).values, case.experts_of_tokens().sort(1).values)
    load_E = torch.bincount(chosen_TK.flatten(), minlength=s.experts)
    assert load_E.max() == (s.rows // s.experts if case.routing == "balanced" else min(s.tokens, s.rows // 2))


def test_every_layer_gives_the_same_output(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(dispatch, "SHAPES", {"cpu": SHAPES, "cuda": SHAPES})
    monkeypatch.setattr(dispatch, "GROWTH", {"tokens x2": (Shape(32, 8, 8, 4, 1), Shape(64, 8, 8, 4, 1))})
    code = dispatch.main(peers="all", rounds=1, json=str(tmp_path / "rows.json"))
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    judged = [row for row in rows if "passed" in row]
    assert code == 0 and len(judged) > 20 and all(row["passed"] for row in judged)
    for row in rows:
        if row["kind"] == "ours":
            assert row["seconds"] > 0 and row["over_limit"] > 0 and row["peak_bytes"] > 0
            assert (
                set(row["over_peers"]) == set(row["over_peers_bytes"]) and "dense" in row["over_peers"] or "swiglu" in row["implementation"]
            )
    assert [row["what"] for row in rows if row["kind"] == "growth"] == ["tokens x2"]


def test_a_peer_that_computes_something_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SHAPES", {"cpu": SHAPES[:1], "cuda": SHAPES[:1]})
    wrong = dict(dispatch.PEERS, relu={"grouped_mm": lambda case: layers.ours(Case(case.shape, case.dtype, "skewed"), "relu")})
    monkeypatch.setattr(dispatch, "PEERS", wrong)
    assert dispatch.main(peers="grouped_mm", only="fp32 balanced", rounds=1) == 1


def test_names_that_are_not_there_are_refused() -> None:
    with pytest.raises(BadInput, match="--peers: got deepsped, needed all, none, or of deepspeed.*did you mean deepspeed?"):
        dispatch.main(peers="deepsped")
    with pytest.raises(BadInput, match="--only: got E9, needed part of a row's text"):
        dispatch.main(only="E9")


def test_ratios_are_taken_within_a_round() -> None:
    assert ratio([2.0, 30.0, 8.0], [1.0, 10.0, 2.0]) == 3.0
    ran: list[str] = []
    seconds = in_turn({"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}, rounds=2, device=torch.device("cpu"), warmups=1)
    assert ran == ["a", "b", "a", "b", "b", "a"] and {len(s) for s in seconds.values()} == {2}


def test_peak_memory_counts_what_was_held_at_once() -> None:
    def work() -> None:
        for _ in range(3):
            torch.empty(1000, 1000)  # freed before the next

    assert 4_000_000 <= peak_bytes(work, torch.device("cpu")) < 5_000_000
