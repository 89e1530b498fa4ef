"""`moe plan`: what it prints and writes, the recipe that it writes trains, and bad input."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from moe.checks.together import check_run
from moe.cli import plan_search
from moe.cli.main import main
from moe.plan.job import plan_of
from moe.recipe.load import load
from parallel.plan.choose import described

WORDS = ["plan", "glam_tiny", "--cluster", "a100-80-8", "--top", "3"]


def test_the_chosen_plan_is_a_recipe_of_all_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table, drawn = tmp_path / "plan.yaml", tmp_path / "plan.json", tmp_path / "drawn"
    assert main([*WORDS, "--out", str(out), "--json", str(table), "--pictures", str(drawn)]) == 0
    said = capsys.readouterr().out
    assert sorted(path.name for path in drawn.iterdir()) == ["memory.png", "timeline.png"] and str(drawn / "timeline.png") in said
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.iterdir())
    written = json.loads(table.read_text())
    chosen = plan_of(check_run(load(str(out))[0], 8))
    assert chosen.world == 8 and described(chosen) == written["chosen"]["plan"] and described(chosen) in said
    assert out.read_text().splitlines()[1] == "extends: glam_tiny"
    times = [row["seconds"] for row in written["ranked"]]
    assert len(times) == 3 and times == sorted(times)
    assert sum(written["chosen"]["time"].values()) == pytest.approx(times[0])
    assert all(row["reason"] and row["count"] > 0 for row in written["refused"])


def test_the_plan_of_an_encoder_and_a_decoder_is_one_that_the_trainer_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "plan.yaml", tmp_path / "plan.json"
    assert main(["plan", "switch_t5_tiny", "--cluster", "a100-80-8", "--out", str(out), "--json", str(table)]) == 0
    assert "16 sequences of 256 tokens read and 58 written a step" in capsys.readouterr().out
    written = json.loads(table.read_text())
    assert described(plan_of(check_run(load(str(out))[0], 8))) == written["chosen"]["plan"]
    assert {(row["pp"], row["sp"], row["tensor"]) for row in written["ranked"]} == {(1, 1, "1d")}
    assert any("degrees.sp=2 does not go with model.kind=encoder_decoder" in row["reason"] for row in written["refused"])


@pytest.mark.parametrize("search", ["alpa", "flexflow", "mesh-tf", "gspmd"])
def test_a_search_ends_in_a_recipe(
    search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_search, "flexflow", partial(plan_search.flexflow, budget=50))  # of 2,000 proposals
    out = tmp_path / "plan.yaml"
    assert main(["plan", "dense_tiny", "--cluster", "a100-80-8", "--search", search, "--out", str(out)]) == 0
    chosen = plan_of(check_run(load(str(out))[0], 8))
    assert described(chosen) in capsys.readouterr().out


def test_the_guide_says_each_rule_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glam_tiny", "--cluster", "a100-80-8x2", "--explain"]) == 0
    said = capsys.readouterr().out
    for rule in ("One device holds the model", "One node of 8", "Many nodes, a fast network", "A pipeline goes with DDP or ZeRO-1"):
        assert rule in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plan", "glam_tiny"], "--cluster: got nothing, needed one of a100-40-8"),
        (["plan", "glam_tiny", "--cluster", "h1000"], "cluster: got h1000, needed one of a100-40-8"),
        ([*WORDS, "--out", "plan.txt"], "--out: got plan.txt, needed a recipe, *.yaml; fix: --out plan.yaml"),
        ([*WORDS, "--out", f"{__file__}/plan.yaml"], "is no folder, needed a file that can be written"),
        (["plan", "dense_tiny", "--cluster", "a100-80-8", "--out", "/proc/plan.yaml"], "--out: got /proc/plan.yaml: "),
        (["plan", "dense_tiny", "--cluster", "a100-80-8", "--as-is", "--pictures", __file__], "--pictures: got"),
        (["plan", "dense_8b", "--cluster", "v100-8", "--train.global_batch", "7"], "plan: got"),
        (["plan", "switch_t5_tiny", "--cluster", "h100-8", "--search", "alpa"], "model.kind: got encoder_decoder, needed decoder"),
        (["plan", "glam_8b_64e", "--cluster", "v100-8"], "GiB a device too much for the smallest plan"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert line in said and "fix:" in said and "\n" not in said
