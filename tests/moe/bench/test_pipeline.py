"""`moe bench pipeline` and `tests.measured delay` with small sizes: time and memory agree with the simulator, results with torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from moe.bench.grids import pipeline
from moe.bench.grids.pipeline import WITHIN, times_rows
from moe.model.transformer import Transformer
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.simulator.held import peak_activations, peak_held, peak_kept
from tests.counted.alive import Alive
from tests.counted.pipeline import memory_rows
from tests.measured import delay
from tests.measured.delay import VARIANTS, ages_of, losses_of, values_of
from tests.measured.torchs_pipelines import SAME, peers_row


@pytest.mark.alone
def test_a_step_takes_the_simulated_time() -> None:
    rows = times_rows(2, ["1f1b", "chimera", "zb_v", "two_bw"], microbatches=4, steps=3)
    assert [row["schedule"] for row in rows if abs(row["error"]) > WITHIN] == []
    assert all(row["measured_seconds"] > 0.2 for row in rows)


def test_ranks_keep_the_memory_that_the_schedule_predicts() -> None:
    chimera, zb_h2, pipedream = rows = memory_rows(2, ["chimera", "zb_h2", "pipedream"], microbatches=4, width=32, size=2)
    assert [(row["schedule"], row["errors"]) for row in rows if not row["passed"]] == []
    assert zb_h2["measured_bytes"][1] > 1.3 * chimera["measured_bytes"][1] and pipedream["weight_versions"] == [2, 1]


def test_torchs_pipelining_gives_the_same_losses_and_gradients() -> None:
    row = peers_row("interleaved", microbatches=4, width=32, size=1, rounds=1)
    assert row["losses_apart"] <= SAME and row["gradients_apart"] <= SAME and row["ratio"] > 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_bytes_kept_have_the_peaks_of_the_counts(name: str) -> None:
    schedule = make_schedule(name, ranks=4, microbatches=8)
    assert peak_kept(schedule, lambda _: 1, lambda _: 0) == peak_activations(schedule)
    assert peak_kept(schedule, lambda _: 3, lambda _: 3) == tuple(3 * n for n in peak_held(schedule))


def test_storages_count_once_and_until_they_go() -> None:
    weight = torch.randn(6, 5, requires_grad=True)
    with Alive([weight]) as alive:
        y = (torch.randn(7, 5) @ weight.t()).exp()  # autograd keeps the input, for the weight's gradient, and the result of exp
        edge = torch.autograd.graph.get_gradient_edge(y)
        del y
        assert alive.now == 4 * (7 * 5 + 7 * 6) < alive.most
        torch.autograd.backward(edge, torch.ones(7, 6))
        del edge
        assert alive.now == 4 * 6 * 5  # only the weight's gradient
        weight.grad = None
        assert alive.now == 0


# --- delay ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_are_as_old_as_the_papers_say(variant: str) -> None:
    values = values_of("dense", 0, 2)
    run = Run(**values)
    ages = ages_of(variant, values, Transformer(run.model))
    by_layer = [ages.get(f"layers.{layer}.ffn.w1.weight", 0) for layer in range(8)]
    assert (
        by_layer
        == {
            "none": [0] * 8,
            "two_bw": [1] * 8,
            "pipedream, 4 stages": [3, 3, 2, 2, 1, 1, 0, 0],
            "pipedream, 8 stages": [7, 6, 5, 4, 3, 2, 1, 0],
            "pipedream, 8 stages, vertical sync": [7] * 8,
        }[variant]
    )
    assert ages.get("embedding", 0) == by_layer[0] and ages.get("head.weight", 0) == by_layer[-1]


def test_a_delay_of_one_reads_the_first_weights_twice() -> None:
    plain, late = (losses_of(variant, values_of("sparse", 3, 3))[0] for variant in ("none", "two_bw"))
    assert plain[0] == late[0] and plain[1] != late[1] and plain[2] != late[2]


# --- printed table and refusals -------------------------------------------------------------------------------------------


@pytest.mark.alone
def test_rows_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "pipeline.json"
    assert pipeline.main(nproc=2, kinds="1f1b", json=str(target)) == 0
    found = json.loads(target.read_text())
    (row,) = found["rows"]
    assert {"schedule", "stages", "microbatches", "measured_seconds", "simulated_seconds", "error"} <= row.keys()
    assert found["verb"] == "bench pipeline" and found["passed"] == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("1f1b")


def test_bad_flags_are_refused() -> None:
    for wrong in ({"kinds": "1f1c"}, {"nproc": 3}):
        with pytest.raises(BadInput):
            pipeline.main(**wrong)  # type: ignore[arg-type]
    with pytest.raises(BadInput):
        delay.main(only="mixed")
