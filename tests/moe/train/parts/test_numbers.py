"""metrics.jsonl has each layer's selection biases before the step's update: on every layout, as the loads of earlier lines say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import trained

RATE, STEPS, EXPERTS = 0.01, 5, 4
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "experts over ranks": (2, {"degrees": {"ep": 2}}),
    "two stages": (2, {"degrees": {"pp": 2}, "pipeline": {"microbatches": 2}}),
    "delayed updates": (2, {"degrees": {"pp": 2}, "pipeline": {"schedule": "two_bw", "microbatches": 2}}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_line_has_the_biases_before_its_update(layout: str, home: Path, tmp_path: Path) -> None:
    """The twin sums the loads of earlier lines: a bias falls by the rate after a step with more than a fair share, and rises after less."""
    ranks, sections = LAYOUTS[layout]
    model: dict[str, dict[str, Any]] = {"model": {"moe_every": 1, "tied_embeddings": layout != "delayed updates"}}
    model |= {"optimizer": {"clip_norm": None}} if layout == "delayed updates" else {}
    values: dict[str, dict[str, Any]] = {"train": {"steps": STEPS, "save_every": 0}, "router": {"bias_rate": RATE, "balance_weight": 0.0}}
    (found, *_) = trained.train(trained.recipe(home, **model, **values, **sections), tmp_path / "run", ranks=ranks)
    assert isinstance(found, dict), found
    lines = trained.lines(tmp_path / "run")
    assert len(lines) == STEPS and len(lines[0]["moe"]) == 2
    for number in range(2):
        bias_E = np.zeros(EXPERTS)
        for line in lines:
            layer = line["moe"][number]
            want = (bias_E.min(), bias_E.max(), np.abs(bias_E).mean())
            assert (layer["bias_min"], layer["bias_max"], layer["bias_mean_abs"]) == pytest.approx(want, abs=2e-6)
            bias_E += RATE * np.sign(1 / EXPERTS - np.array(layer["load"]))
        assert np.ptp(bias_E) > 0


def test_a_router_without_a_bias_has_none_in_its_lines(home: Path, tmp_path: Path) -> None:
    trained.train(trained.recipe(home, train={"steps": 1, "save_every": 0}), tmp_path / "run")
    assert not [key for line in trained.lines(tmp_path / "run") for layer in line["moe"] for key in layer if key.startswith("bias")]
