"""Every choice of every token is accounted for: kept + dropped = tokens * k, exactly, in each layer and step of a whole run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.data import open_data
from moe.data.token_shard import TokenShard
from moe.parallelize.build import build
from parallel.mesh.mesh import Degrees, Mesh
from tests.support import trained

STEPS = 10
MODEL = {"num_layers": 4, "moe_every": 2}
SUMMARY = {
    "recipe", "steps", "validation_loss", "bits_per_byte", "tokens_per_second", "train_seconds", "dropped_share", "peak_memory_bytes",
    "parameters_total", "parameters_active", "flops_per_token", "matmul_share", "sample", "world", "commit", "hardware",
}  # fmt: skip
LINE = {
    "kind", "step", "loss", "balance_loss", "z_loss", "grad_norm", "grad_norm_parts", "lr", "tokens", "tokens_per_second", "step_seconds",
    "memory_bytes", "loss_scale", "skipped", "skipped_total", "dropped_share", "moe", "time",
}  # fmt: skip


@pytest.fixture(scope="module", params=["switch", "gshard", "glam"])
def finished(request: pytest.FixtureRequest, home: Path) -> tuple[str, Path, dict[str, Any]]:
    """Return (preset, folder of its run, summary of the run). Two ranks with ep 2 train it in two micro-batches a step."""
    run = trained.recipe(
        home,
        model=MODEL,
        router={"preset": request.param, "capacity_factor": 1.0},
        degrees={"ep": 2},
        pipeline={"microbatches": 2},
        train={"steps": STEPS, "save_every": 0},
    )
    out = home / request.param
    summary, other = trained.train(run, out, ranks=2)
    assert {k: v for k, v in summary.items() if k != "hardware"} == {k: v for k, v in other.items() if k != "hardware"}
    return request.param, out, summary


def test_kept_and_dropped_are_tokens_times_k_in_every_layer_and_step(finished: tuple[str, Path, dict[str, Any]]) -> None:
    preset, out, _ = finished
    lines = trained.lines(out)
    k = 1 if preset == "switch" else 2
    tokens = trained.VALUES["train"]["global_batch"] * trained.VALUES["model"]["max_length"]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert {line["tokens"] for line in lines} == {tokens}
    assert all([layer["layer"] for layer in line["moe"]] == [1, 3] for line in lines)
    assert [
        (line["step"], layer["layer"]) for line in lines for layer in line["moe"] if layer["kept"] + layer["dropped"] != tokens * k
    ] == []
    assert any(layer["dropped"] for line in lines for layer in line["moe"])  # without a dropped choice, the equation above would be trivial
    assert all(type(layer[what]) is int for line in lines for layer in line["moe"] for what in ("kept", "dropped"))


def test_what_is_kept_fits_into_the_slots(finished: tuple[str, Path, dict[str, Any]]) -> None:
    preset, out, _ = finished
    k, length, experts = (1 if preset == "switch" else 2), 12, 4
    slots = trained.VALUES["train"]["global_batch"] * experts * -(-length * k // experts)  # capacity factor 1, counted for each sequence
    assert all(0 < layer["kept"] <= slots for line in trained.lines(out) for layer in line["moe"])


def test_loads_are_whole_choices_and_sum_to_one(finished: tuple[str, Path, dict[str, Any]]) -> None:
    preset, out, _ = finished
    choices = 8 * 12 * (1 if preset == "switch" else 2)
    for line in trained.lines(out):
        for layer in line["moe"]:
            counts = [round(share * choices) for share in layer["load"]]
            assert sum(counts) == choices and len(counts) == 4
            assert layer["load"] == pytest.approx([c / choices for c in counts], abs=1e-5)  # metrics have five decimals


def test_shares_and_sums_agree_with_the_layers(finished: tuple[str, Path, dict[str, Any]]) -> None:
    _, out, summary = finished
    kept = dropped = 0
    for line in trained.lines(out):
        here = [sum(layer[what] for layer in line["moe"]) for what in ("kept", "dropped")]
        kept, dropped = kept + here[0], dropped + here[1]
        assert line["dropped_share"] == here[1] / sum(here)
        assert line["balance_loss"] == pytest.approx(sum(layer["balance_loss"] for layer in line["moe"]), rel=1e-12)
        assert line["z_loss"] == pytest.approx(sum(layer["z_loss"] for layer in line["moe"]), rel=1e-12)
        parts = line["grad_norm_parts"]
        assert set(parts) == {"dense", "router", "expert"} and all(value > 0 for value in parts.values())
        assert line["grad_norm"] ** 2 == pytest.approx(sum(value**2 for value in parts.values()), rel=1e-9)
    assert summary["dropped_share"] == dropped / (kept + dropped) > 0


def test_a_line_and_the_summary_have_every_field(finished: tuple[str, Path, dict[str, Any]]) -> None:
    _, out, summary = finished
    assert set(summary) >= SUMMARY and (summary["world"], summary["steps"]) == (2, STEPS)
    assert all(set(line) == LINE for line in trained.lines(out))
    assert all(
        0 < layer["entropy"] <= 1.3863 for line in trained.lines(out) for layer in line["moe"]
    )  # at most ln 4, the entropy of four equal loads


def test_counts_of_the_first_step_equal_those_of_one_process(finished: tuple[str, Path, dict[str, Any]], home: Path) -> None:
    """Kept, dropped and load of the run's first step equal the counts of one forward pass of the whole batch on one process."""
    preset, out, _ = finished
    run = check_run(trained.recipe(home, model=MODEL, router={"preset": preset, "capacity_factor": 1.0}), 1)
    model, _ = build(run, Mesh.of(Degrees()), device=torch.device("cpu"))
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed)
    sequences = torch.from_numpy(data.train.batch(0, TokenShard.whole(run.train.global_batch, run.model.max_length)))
    from moe.nn.context import Context

    reports = model(sequences[:, :-1], Context.of(sequences[:, :-1], seed=run.train.seed, step=0)).layers
    for layer, report in zip(trained.lines(out)[0]["moe"], reports, strict=True):
        assert (layer["kept"], layer["dropped"]) == (int(report.kept), int(report.dropped))
        assert layer["load"] == pytest.approx((report.load_E / report.load_E.sum()).tolist(), abs=1e-5)


def test_a_dense_run_has_no_expert_to_account_for(home: Path, tmp_path: Path) -> None:
    run = trained.recipe(home, model={"moe_every": 0}, train={"steps": 3})
    summary, _ = trained.train(run, tmp_path / "run", ranks=2)
    for line in trained.lines(tmp_path / "run"):
        assert line["moe"] == [] and (line["dropped_share"], line["balance_loss"], line["z_loss"]) == (0, 0, 0)
        assert line["grad_norm_parts"]["dense"] == pytest.approx(line["grad_norm"], rel=1e-12)
    assert summary["dropped_share"] == 0 and set(summary) >= SUMMARY
    assert summary["parameters_total"] == summary["parameters_active"]
