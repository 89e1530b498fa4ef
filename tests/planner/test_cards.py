"""Cards: what does not fit needs more than its states, what fits is a plan within memory, and docs/use/models.md has the measured rows."""

from __future__ import annotations

import json
from pathlib import Path

from tests.planner.cards import CLUSTERS, GIB, MODELS, line, rows_of

ROOT = Path(__file__).resolve().parents[2]


def test_a_model_that_does_not_fit_says_its_gib_and_fits_with_adapters() -> None:
    full, adapters = rows_of("olmoe_1b_7b", "h100-1")
    states = 16 * full["parameters"] / GIB  # weight, gradient and two moments in fp32
    assert not full["fits"] and states < full["gib"] < 1.3 * states and "needs" in line(full)
    assert (
        adapters["fits"] and 2 * full["parameters"] / GIB < adapters["gib"] < 80 and line(adapters).endswith(f"LoRA: {adapters['plan']} |")
    )


def test_the_page_has_the_rows_of_the_command() -> None:
    rows = json.loads((ROOT / "docs/benchmarks/planner-cards.json").read_text(encoding="utf-8"))["rows"]
    page = (ROOT / "docs/use/models.md").read_text(encoding="utf-8")
    assert [row for row in rows if line(row) not in page] == []
    assert {(row["model"], row["devices"]) for row in rows} == {(name, gpus) for name in MODELS for gpus in (1, 8, 64)} and len(
        CLUSTERS
    ) == 3
