"""The summary's measured bytes of model states equal the ZeRO paper's formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe.plan.job.states import FP32, FP32_AND_COPY, Storage, model_states
from moe.records.summary import summary_rows
from moe.train.start.prediction import PARTS
from tests.support import trained

MODEL = {"moe_every": 0, "d_model": 32, "d_ff": 64}
KINDS: list[tuple[str, dict[str, Any], int, Storage]] = [
    ("ddp", {"kind": "ddp"}, 0, FP32),
    ("fsdp", {"kind": "fsdp"}, 3, FP32),
    ("zero1", {"kind": "zero", "stage": 1}, 1, FP32_AND_COPY),
    ("zero3", {"kind": "zero", "stage": 3}, 3, FP32_AND_COPY),
]


@pytest.mark.parametrize(("kind", "sharding", "stage", "storage"), KINDS, ids=[row[0] for row in KINDS])
def test_states_of_a_rank_are_what_the_formula_says(
    kind: str, sharding: dict[str, Any], stage: int, storage: Storage, home: Path, tmp_path: Path
) -> None:
    """Up to 3000 bytes more are allowed for step counters and padding. At stage 1 a rank keeps only its shard of the gradients."""
    if sharding["kind"] == "zero":
        trained.warm_zero()
    run = trained.recipe(home, model=MODEL, experts={}, router={"preset": "switch"}, sharding=sharding, train={"steps": 2})
    first, second = trained.train(run, tmp_path / "run", ranks=2)
    assert first["state_bytes"] == second["state_bytes"]
    want = model_states(first["parameters_total"], stage=stage, copies=2, storage=storage)
    for part in PARTS:
        expected = getattr(want, part) / (2 if kind == "zero1" and part == "gradients" else 1)
        assert 0 <= first["state_bytes"][part] - expected <= 3000, (part, first["state_bytes"], want)
    said = dict(summary_rows(first))["model states, one process"]
    assert all(part in said for part in PARTS)
