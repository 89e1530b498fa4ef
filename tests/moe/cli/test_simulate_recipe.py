"""`moe simulate --recipe`: times and memory of a recipe's model equal the same numbers computed by hand; flags of single schedules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe.cli import main as cli
from moe.cli import simulate, simulate_times
from moe.plan.job.flops import size
from moe.plan.job.network import Plan
from moe.plan.job.of_recipe import network_of
from moe.plan.job.states import FP32
from moe.plan.memory.kept import ends_kept, layer_kept
from moe.plan.memory.stack import OURS
from moe.plan.pipeline import layers_of, schedule_of
from moe.recipe.load import load
from parallel.errors import BadInput
from parallel.pipeline.schedules import SCHEDULES, make_schedule
from parallel.pipeline.simulator import draw


def rows_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]  # type: ignore[no-any-return]


def test_pictures_say_what_their_times_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    units: list[str] = []
    monkeypatch.setattr(draw, "draw", lambda *_, unit, **__: units.append(unit))
    monkeypatch.setattr(draw, "draw_clocks", lambda *_, unit, **__: units.append(unit))
    out = ["--stages", "2", "--microbatches", "4", "--out", str(tmp_path / "x.png")]
    for words in (["simulate", "1f1b"], ["simulate", "1f1b", "--recipe", "dense_tiny"], ["energy", "1f1b"]):
        assert cli.main([*words, *out]) == 0
    assert units[0].startswith("1 = forward pass") and units[1:] == ["s", "s"]


def test_a_recipes_model_decides_times_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Expected for 1F1B with m micro-batches and p equal stages: (m + p - 1) (F + B) seconds, 16 bytes of states a parameter, and messages
    of B * L * D * 4 bytes."""
    words = [
        "simulate",
        "1f1b",
        "--recipe",
        "dense_tiny",
        "--stages",
        "2",
        "--microbatches",
        "4",
        "--tflops",
        "2",
        "--precision.compute",
        "fp32",
        "--json",
    ]
    alike = ["--model.num_layers=6", "--model.vocab_size=1", "--link-gb-s", "1e9"]
    assert cli.main([*words, str(tmp_path / "a.json"), *alike]) == 0
    assert "layers 0-2" in capsys.readouterr().out
    row = rows_of(tmp_path / "a.json")[0]
    run = load("dense_tiny", {"model.num_layers": "6", "model.vocab_size": "1", "precision.compute": "fp32"})[0]
    counted = size(run.model_copy(update={"model": run.model.model_copy(update={"vocab_size": 1})}))
    tokens = run.train.global_batch // 4 * run.model.max_length
    assert row["makespan"] == pytest.approx((4 + 1) * 3 * tokens * counted.forward / 2 / 2e12, rel=1e-3)
    assert row["tokens_per_second"] == pytest.approx(4 * tokens / row["makespan"], rel=1e-9)
    assert row["layers_by_stage"] == [3, 3] and sum(row["flops_by_stage"]) == pytest.approx(tokens * counted.forward)
    tied = run.model.d_model if run.model.tied_embeddings else 0  # the first and the last stage both hold the embedding table
    assert sum(row["parameters_by_rank"]) == counted.total + tied
    assert row["state_bytes_by_rank"] == [16 * n for n in row["parameters_by_rank"]]
    network, plan = network_of(run), Plan(pp=2, microbatch=run.train.global_batch // 4, compute_bytes=4, storage=FP32)
    block = layer_kept(network, plan, OURS, 0, "none")
    head = ends_kept(network, plan, OURS, first=False, last=True)
    assert row["activation_bytes_by_rank"] == pytest.approx([2 * 3 * block, 3 * block + head])  # 2 and 1 micro-batches in flight
    assert row["sent_bytes_by_rank"] == [4 * tokens * run.model.d_model * 4] * 2

    assert cli.main([*words, str(tmp_path / "b.json"), *alike[:2], "--link-gb-s", "0.1", "--overlap", "off"]) == 0
    slow = rows_of(tmp_path / "b.json")[0]
    assert slow["makespan"] > row["makespan"] + 2 * tokens * run.model.d_model * 4 / 1e8


def test_recompute_costs_time_and_saves_memory_and_the_head_moves_the_cut(tmp_path: Path) -> None:
    words = ["simulate", "1f1b", "--recipe", "dense_tiny", "--model.num_layers", "8", "--stages", "2", "--link-gb-s", "1e9", "--json"]
    rows = {}
    for name, more in {"none": [], "full": ["--recompute.kind", "full"], "head": ["--model.vocab_size", "6000"]}.items():
        assert cli.main([*words, str(tmp_path / f"{name}.json"), *more]) == 0
        rows[name] = rows_of(tmp_path / f"{name}.json")[0]
    assert rows["full"]["makespan"] / rows["none"]["makespan"] == pytest.approx(4 / 3, rel=0.02)
    assert max(rows["full"]["activation_bytes_by_rank"]) < 0.25 * max(rows["none"]["activation_bytes_by_rank"])
    assert rows["none"]["layers_by_stage"] == [4, 4] and rows["head"]["layers_by_stage"][0] > 4
    assert cli.main([*words, str(tmp_path / "listed.json"), "--pipeline.layers", "[3, 5]"]) == 0
    assert rows_of(tmp_path / "listed.json")[0]["layers_by_stage"] == [3, 5]


def test_all_schedules_of_a_recipe_and_a_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--recipe", "switch_tiny", "--model.num_layers=8", "--json", str(tmp_path / "all.json")]
    assert cli.main(["simulate", *words]) == 0
    said = capsys.readouterr().out
    rows = {row["schedule"]: row for row in rows_of(tmp_path / "all.json")}
    assert list(rows) == list(SCHEDULES) and "GB by rank" in said and "assumed: 140 TFLOP/s and 25 GB/s a rank, 2 sequences" in said
    states = {name: row["state_bytes_by_rank"] for name, row in rows.items()}
    assert states["chimera"][0] == states["1f1b"][0] + states["1f1b"][3]  # rank 0 holds stages 0 and 3
    assert states["pipedream"][0] == states["1f1b"][0] / 16 * (16 + 3 * 4) and states["two_bw"][2] == states["1f1b"][2] / 16 * (16 + 4)
    (tmp_path / "mine.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert cli.main(["simulate", str(tmp_path / "mine.csv"), *words[:2]]) == 0
    assert "8 sequences a micro-batch" in capsys.readouterr().out
    assert "not counted" not in said
    assert cli.main(["simulate", "1f1b", *words[:2], "--stages", "2", "--degrees.tp", "2", "--sharding.kind", "fsdp"]) == 0
    assert "not counted: degrees.tp 2, sharding.kind fsdp (moe plan counts them)" in capsys.readouterr().out
    assert cli.main(["simulate", str(tmp_path / "mine.csv"), *words[:2], "--model.num_layers", "1"]) == 2
    assert "stages: got 2, needed at most one stage per layer: 1; fix: --model.num_layers 2" in capsys.readouterr().err


@pytest.mark.parametrize("layers", ["[5,-1]", "[4,0,0]", "[3,2]", "[4]"])
def test_lists_of_layers_that_training_refuses_are_refused_the_same_way(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = load("switch_tiny", {"pipeline.layers": layers, "degrees.pp": "2"})[0]
    with pytest.raises(BadInput) as refused:
        layers_of(run, schedule_of(run))
    words = ["--recipe", "switch_tiny", "--stages", "2", "--pipeline.layers", layers]
    assert cli.main(["simulate", "1f1b", *words]) == 2
    assert str(refused.value) in capsys.readouterr().err
    assert cli.main(["simulate", *words]) == 0  # the table of all schedules has the error in each schedule's row
    assert str(refused.value) in capsys.readouterr().out
    assert cli.main(["simulate", "1f1b", *words[:2], "--stages", "8", *words[4:]]) == 2
    assert "fix: --stages 4 or --model.num_layers 8, and set pipeline.layers to null" in capsys.readouterr().err


def test_options_of_one_schedule(tmp_path: Path) -> None:
    for words in (["pipedream", "--vertical-sync", "on"], ["pipedream", "--vertical-sync", "off"], ["chimera", "--pipelines", "4"]):
        assert cli.main(["simulate", *words, "--json", str(tmp_path / f"{words[-1]}.json")]) == 0
    versions = {name: rows_of(tmp_path / f"{name}.json")[0]["weight_versions_by_rank"] for name in ("on", "off")}
    assert versions == {"on": [4] * 4, "off": [4, 3, 2, 1]}
    four = rows_of(tmp_path / "4.json")[0]
    assert four["bubble"] == 0 and four["peak_activations"] == [4] * 4
    assert cli.main(["simulate", "--vertical-sync", "on", "--pipelines", "4", "--json", str(tmp_path / "all.json")]) == 0
    rows = {row["schedule"]: row for row in rows_of(tmp_path / "all.json")}
    assert rows["chimera"] == four and rows["pipedream"]["weight_versions_by_rank"] == [4] * 4


def test_a_table_takes_times_of_stages_and_says_where_their_number_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--stages", "2", "--microbatches", "4", "--forward-time"]
    assert cli.main([*words, "1,3", "--json", str(tmp_path / "all.json")]) == 0
    told = json.loads((tmp_path / "all.json").read_text())
    assert {row["schedule"]: row["makespan"] for row in told["rows"]}["1f1b"] == 1 + 4 * (3 + 2) + 2
    assert "got 2 times, needed 1 time, or 4" in {row["schedule"]: row["reason"] for row in told["refused"]}["zb_v"]
    capsys.readouterr()
    assert cli.main([*words, "1,1,1"]) == 2
    assert "fix: --forward_time 1,1" in capsys.readouterr().err


def test_a_searched_order_is_written_and_read_and_has_flags_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "order.csv")
    flags = ["--stages", "2", "--microbatches", "3", "--placement", "v", "--memory", "2"]
    assert cli.main(["simulate", "search", *flags, "--out", out, "--json", str(tmp_path / "one.json")]) == 0
    assert cli.main(["simulate", out, "--json", str(tmp_path / "read.json")]) == 0
    one, read = (json.loads((tmp_path / f"{name}.json").read_text())["rows"][0] for name in ("one", "read"))
    assert one["makespan"] == read["makespan"] and one["most_kept"] <= 2 and one["chunks"] == 2
    for words, said in (
        (["1f1b", "--memory", "2"], "--memory: got --memory with 1f1b, needed moe simulate search"),
        (["--placement", "v"], "--placement: got --placement with all schedules"),
        (["search", "--memory", "0.5"], "--memory: got 0.5, needed at least 1"),
        (["search", "--chunks", "2"], "--chunks: got --chunks with --placement line"),
        (["search", "--pipelines", "2"], "--pipelines: got --pipelines with search"),
    ):
        assert cli.main(["simulate", *words]) == 2
        assert said in capsys.readouterr().err


def test_an_order_that_takes_too_long_is_refused_with_sizes_that_every_schedule_takes() -> None:
    for stages, microbatches, batches, fix in (
        (16, 32, None, "--stages 8 --microbatches 16"),
        (16, 32, 4, "--stages 4 --microbatches 8"),
        (4, 1000, None, "--microbatches 32"),
        (6, 1000, None, "--microbatches 12"),
    ):
        with pytest.raises(BadInput) as refused:
            simulate_times.check_size(stages=stages, microbatches=microbatches, batches=batches, most_actions=128)
        assert str(refused.value.fix) == fix
        words = dict(zip(fix.split()[::2], map(int, fix.split()[1::2]), strict=True))
        for name in SCHEDULES:
            make_schedule(name, ranks=words.get("--stages", stages), microbatches=words["--microbatches"], batches=batches)


@pytest.mark.parametrize(("name", "orders"), [([], len(SCHEDULES)), (["search"], simulate.SEARCHED)])
def test_a_table_of_all_schedules_and_a_search_are_allowed_as_many_passes_as_one_schedule(
    name: list[str], orders: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate, "MOST_ACTIONS", 32 * orders)
    sizes = ["--stages", "4", "--microbatches"]
    assert cli.main(["simulate", *name, *sizes, "8"]) == 0 and cli.main(["simulate", "1f1b", *sizes, "16"]) == 0
    assert cli.main(["simulate", *name, *sizes, "16"]) == 2
    assert "needed at most 32 forward passes in all; fix: --microbatches 8" in capsys.readouterr().err


def test_a_pipeline_that_takes_long_to_fill_is_refused_with_sizes_that_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_times, "MOST_ACTIONS", 128)

    def simulated(**sizes: int) -> int:
        return cli.main(["simulate", "pipedream", *(word for flag, n in sizes.items() for word in (f"--{flag}", str(n)))])

    assert simulated(stages=3, microbatches=14) == 0 and simulated(stages=3, microbatches=1, batches=40) == 0
    for sizes, fix in (
        ({"stages": 4, "microbatches": 16}, {"microbatches": 8}),
        ({"stages": 16, "microbatches": 2}, {"stages": 4, "microbatches": 4}),
        ({"stages": 9, "microbatches": 2, "batches": 7}, {"stages": 4, "microbatches": 4}),
    ):
        assert simulated(**sizes) == 2
        said = capsys.readouterr().err.rstrip()
        assert "this continuous pipeline needs" in said and "to fill" in said
        assert said.endswith("fix: " + " ".join(f"--{flag} {n}" for flag, n in fix.items()))
        assert simulated(**(sizes | fix)) == 0
