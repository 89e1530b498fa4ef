"""Errors and rankings of invented predictions equal values computed by hand; rows of published tables are predicted within 10 %."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from moe.plan.time.cost import Time
from tests.planner.choice import identity, in_order, ranking, summary, time_lines
from tests.planner.read_tables import COLUMNS, Row, read_folder
from tests.planner.time import Predicted, cluster_of, errors, predictions, program_of

# two published rows: SC21 Table 1 (1.7B: TFLOP/s that count recomputation) and Korthikanti et al. Table 5 (22B, full recomputation)
SC21 = {
    **{"source": "Megatron-LM SC21 Table 1", "kind": "measured", "model": "GPT-1.7B", "family": "dense", "layers": 24, "hidden": 2304},
    **{"ffn": 9216, "heads": 24, "seq": 2048, "vocab": 51200, "gpus": 32, "gpu_type": "A100-SXM4-80GB", "tp": 1, "pp": 1, "dp": 32},
    **{"microbatch": 16, "global_batch": 512, "recompute": "full", "precision": "fp16", "measured_tflops_per_gpu": 137, "status": "ok"},
    "notes": "TFLOP/s counts recompute",
}
TWENTY_TWO = SC21 | {
    **{"source": "Korthikanti et al. 2022", "model": "GPT-22B", "layers": 48, "hidden": 6144, "ffn": 24576, "heads": 64, "gpus": 8},
    **{"tp": 8, "dp": 1, "microbatch": 4, "global_batch": 4, "recompute": "full (no SP)", "measured_tflops_per_gpu": ""},
    **{"iteration_time_s": 1.42, "notes": ""},
}


def rows_of(folder: Path, *lines: dict[str, object]) -> Sequence[Row]:
    text = [",".join(COLUMNS), *(",".join(str(line.get(name, "")) for name in COLUMNS) for line in lines)]
    (folder / "t.csv").write_text("\n".join(text) + "\n")
    return read_folder(folder)[0].rows


def invented(rows: Sequence[Row], seconds: Sequence[float]) -> list[Predicted]:
    return [Predicted(row, Time(forward=s), "a100-80-8", "p") for row, s in zip(rows, seconds, strict=True)]


def test_published_rows_are_predicted_within_a_tenth(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, SC21, TWENTY_TWO)
    assert [program_of(row).name for row in rows] == ["megatron-2021", "megatron-2022"]
    assert all((cluster := cluster_of(row)) and cluster.name == "a100-80-8" and cluster.world == row.gpus for row in rows)
    made = predictions(rows)
    assert len(made) == 2 and all(0.9 < one.ratio < 1.1 for one in made)


def test_errors_and_their_calibration_by_other_rows(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, *(TWENTY_TWO | {"iteration_time_s": s, "global_batch": 4 * s} for s in (1, 2, 4)))
    found = errors(invented(rows, (1.1, 2.2, 3.6)))
    assert found is not None and found.rows == 3
    assert found.mean == pytest.approx(0.1) and found.bias == pytest.approx(0.1 / 3) and found.largest == pytest.approx(0.1)
    others = (1.1 / 1.0 - 1, 1.1 / 1.0 - 1, 1 - 0.9 / 1.1)  # each row's ratio over the median of the other rows' ratios, minus 1
    assert found.calibrated == pytest.approx(sum(others) / 3)
    assert errors([]) is None


def test_a_row_is_calibrated_by_runs_with_its_layer_and_never_by_its_own_run(tmp_path: Path) -> None:
    """Times of micro-batches of 4 are predicted twice too long, of micro-batches of 2 exactly. The last row repeats the run of the
    first."""
    cases = [(4, 4, 1), (4, 8, 2), (2, 4, 1), (2, 8, 2), (4, 4, 1)]  # micro-batch, batch, seconds
    rows = rows_of(tmp_path, *(TWENTY_TWO | {"microbatch": b, "global_batch": g, "iteration_time_s": s} for b, g, s in cases))
    found = errors(invented(rows, (2.0, 4.0, 1.0, 2.0, 2.0)))
    assert found is not None and found.same_layer == 5 and found.by_layer == pytest.approx(0)
    medians = (1.0, 1.5, 2.0, 2.0, 1.0)  # for each row the median of predicted / measured of the other runs: (2, 1, 1), (2, 1, 1, 2), ...
    assert found.calibrated == pytest.approx(sum(abs(r / m - 1) for r, m in zip((2, 2, 1, 1, 2), medians, strict=True)) / 5)
    alone = errors(invented(rows[:1] + rows[-1:], (2.0, 3.0)))
    assert alone is not None and alone.same_layer == 0 and alone.calibrated == alone.by_layer == alone.mean


def test_regret_is_the_chosen_plans_time_over_the_best_plans(tmp_path: Path) -> None:
    lines = [
        TWENTY_TWO | {"global_batch": batch, "iteration_time_s": s} for batch, s in ((4, 1.0), (4, 1.5), (4, 3.0), (8, 2), (8, 5), (16, 9))
    ]
    rows = rows_of(tmp_path, *lines)
    made = invented(rows, (2.0, 1.9, 4.0, 1, 2, 1))
    ranked = ranking(made)
    assert ranked is not None and (ranked.groups, ranked.first) == (2, 0.5)
    assert ranked.mean == pytest.approx(0.25) and ranked.largest == pytest.approx(0.5)
    assert not in_order(made) and in_order(invented(rows, (1, 2, 3, 2.5, 5, 9)))


def test_stage_times_in_notes_are_compared_with_the_step(tmp_path: Path) -> None:
    forward, backward = (100000, 200000), (200000, 400000)
    step = (0.3 + 0.6) + 7 * 0.6
    notes = f"fwd us per stage {' '.join(map(str, forward))}; bwd us per stage {' '.join(map(str, backward))}; more"
    plan = {"tp": 4, "pp": 2, "microbatch": 1, "global_batch": 8, "schedule": "1f1b"}
    line = TWENTY_TWO | plan | {"iteration_time_s": step / 1.01, "notes": notes}
    assert identity(rows_of(tmp_path, line)) == [pytest.approx(0.01)]


def test_a_table_without_speeds_or_with_unknown_gpus_has_no_errors(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, TWENTY_TWO | {"gpu_type": "Gaudi"}, TWENTY_TWO | {"iteration_time_s": ""})
    assert predictions(rows) == [] and summary(rows)["time"] is None
    assert time_lines(read_folder(tmp_path))[0].startswith("table") and len(time_lines(read_folder(tmp_path))) == 1
