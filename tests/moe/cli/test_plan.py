"""`moe plan`: printed lines, written files, errors, and a written recipe that trains as predicted."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from moe.checks.together import check_run
from moe.cli import plan_search
from moe.cli.main import main
from moe.plan.choose.choose import described
from moe.plan.choose.predicted import Place, predict, settled
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import load_cluster, mapping_of
from moe.plan.time.stage_time import priced
from moe.recipe.load import load
from parallel.pipeline.order_file import read_order
from parallel.pipeline.schedule import Action, Op, Schedule
from parallel.pipeline.simulator.held import peak_held
from parallel.pipeline.simulator.simulate import Cost

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


def test_a_plan_is_not_written_over_its_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file with the name of the shipped recipe that it extends would extend itself."""
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: glam_tiny")
    for recipe, out, fix in ((mine, mine, "mine_plan"), ("glam_tiny", tmp_path / "glam_tiny.yaml", "glam_tiny_plan")):
        assert main(["plan", str(recipe), "--cluster", "a100-80-8", "--out", str(out)]) == 2
        assert f"the recipe itself, needed another file; fix: --out {tmp_path / fix}.yaml" in capsys.readouterr().err
    assert mine.read_text() == "extends: glam_tiny" and [*tmp_path.iterdir()] == [mine]


def test_the_plan_of_an_encoder_and_a_decoder_is_one_that_the_trainer_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, table = tmp_path / "plan.yaml", tmp_path / "plan.json"
    assert main(["plan", "switch_t5_tiny", "--cluster", "a100-80-8", "--out", str(out), "--json", str(table)]) == 0
    assert "16 sequences of 256 tokens read and 58 written a step" in capsys.readouterr().out
    written = json.loads(table.read_text())
    assert described(plan_of(check_run(load(str(out))[0], 8))) == written["chosen"]["plan"]
    assert {(row["pp"], row["sp"], row["tensor"]) for row in written["ranked"]} == {(1, 1, "1d")}
    assert any("do not divide the decoder's 58 tokens" in row["reason"] for row in written["refused"])


def test_two_recipes_own_plans_are_compared_on_a_part_of_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--compare` prints what `--as-is` predicts for each recipe, with the ratio."""
    alone = {}
    for name in ("glam_tiny", "dense_tiny"):
        table = tmp_path / f"{name}.json"
        assert main(["plan", name, "--cluster", "h100-2", "--as-is", "--degrees.ep", "1", "--json", str(table)]) == 0
        alone[name] = json.loads(table.read_text())["chosen"]
    capsys.readouterr()
    both = tmp_path / "both.json"
    words = ["plan", "glam_tiny", "--compare", "dense_tiny", "--cluster", "h100-2", "--degrees.ep", "1"]
    assert main([*words, "--json", str(both)]) == 0
    said = capsys.readouterr().out
    assert json.loads(both.read_text())["rows"] == list(alone.values())
    ratio = alone["dense_tiny"]["seconds"] / alone["glam_tiny"]["seconds"]
    assert re.search(rf"^s a step .* {ratio:.2f}$", said, flags=re.M) and "different keys: " in said and "model.moe_every" in said
    assert "A: glam_tiny, 16 sequences of 256 tokens a step: dp 2" in said and "B: dense_tiny, 16 sequences" in said
    assert main([*words, "--top", "2"]) == 2
    assert "--top: got --top with --compare" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ep", "busiest", "capacity", "share", "source"),
    [
        (4, "2.5", "null", 2.5, "by dispatch.busiest"),
        (4, "9", "null", 4, "9 by dispatch.busiest, limited by the number of tokens"),
        (4, "9", "1.25", 1.25, "9 by dispatch.busiest, limited by capacity"),
        (4, "null", "null", None, "by the router and ep"),
        (1, "9", "null", 1, None),
    ],
)
def test_it_says_the_rows_of_the_busiest_rank(
    ep: int, busiest: str, capacity: str, share: float | None, source: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of 4 ranks gets at most all rows, 4 times the mean, or as many as the capacity of its experts. Without ep no line is printed."""
    table = tmp_path / "plan.json"
    values = ["--degrees.ep", str(ep), "--dispatch.busiest", busiest, "--router.capacity_factor", capacity]
    assert main(["plan", "glam_tiny", "--cluster", "a100-80-8", "--as-is", *values, "--json", str(table)]) == 0
    written = json.loads(table.read_text())["chosen"]["busiest"]
    assert 1 < written < 2 if share is None else written == share
    line = f"rows of the busiest rank of ep {ep}: {written:.3g} times the mean ({source})"
    assert re.findall("rows of the busiest.*", capsys.readouterr().out) == ([line] if source else [])


UNEVEN = ["--model.vocab_size", "30000", "--degrees.pp", "4", "--pipeline.microbatches", "6"]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_an_order_that_is_written_is_faster_keeps_no_more_and_is_the_recipes(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An order that --order writes is set in the written recipe. In a plain simulation with the plan's predicted seconds, it is faster than
    the plan's schedule, and keeps no more activations."""
    order, out = tmp_path / "a new folder" / "order.csv", tmp_path / "plan.yaml"
    words = [
        *UNEVEN,
        "--model.num_layers",
        "9" if schedule == "zb_v" else "5",
        "--train.global_batch",
        "12",
        "--pipeline.schedule",
        schedule,
    ]
    assert main(["plan", "dense_tiny", "--cluster", "a100-80-8", "--as-is", "--order", str(order), "--out", str(out), *words]) == 0
    run = check_run(load(str(out))[0], 8)
    assert run.pipeline.schedule == str(order) and f"wrote {order}" in capsys.readouterr().out
    before = check_run(load("dense_tiny", dict(zip((w[2:] for w in words[::2]), words[1::2], strict=True)))[0], 8)
    own, cost, transfer = priced(network_of(before), plan_of(before), load_cluster("a100-80-8"))
    found = read_order(order)
    assert replayed(found, cost, transfer) < replayed(own, cost, transfer)
    assert max(peak_held(found)) <= max(peak_held(own)) and found.homes == own.homes


def replayed(schedule: Schedule, cost: Cost, transfer: float) -> float:
    """Return the seconds until the last action ends, if each starts as soon as its rank is free and its inputs have arrived."""
    ends: dict[tuple[str, int, int], float] = {}  # (kind of pass, stage, micro-batch) -> time of its end
    last, free = schedule.num_stages - 1, [0.0] * schedule.num_ranks
    left = [deque(order) for order in schedule.orders]

    def read(action: Action) -> list[tuple[str, int, int]]:
        s, n = action.stage, action.microbatch
        if action.op is Op.F:
            return [("F", s - 1, n)] if s else []
        if action.op in (Op.B, Op.I):
            return [("F", s, n), *([("back", s + 1, n)] if s < last else [])]
        return [("back", s, n)] if action.op is Op.W else []

    while any(left):
        rank = next(r for r, order in enumerate(left) if order and all(one in ends for one in read(order[0])))
        action = left[rank].popleft()
        come = [ends[one] + (0.0 if schedule.homes[one[1]][0] == rank else transfer) for one in read(action)]
        free[rank] = max([free[rank], *come]) + cost(rank, action)
        kind = {Op.F: "F", Op.B: "back", Op.I: "back"}.get(action.op, "")
        ends[kind, action.stage, action.microbatch] = free[rank]
    return max(free)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--degrees.pp", "1"], "the best plan has no stages"),
        (["--degrees.pp", "2", "--pipeline.schedule", "chimera", "--pipeline.microbatches", "4"], "chimera cannot be written as an order"),
    ],
)
def test_where_no_order_is_searched_it_says_why(words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    order = tmp_path / "order.csv"
    assert main(["plan", "dense_tiny", "--cluster", "a100-80-8", "--as-is", "--order", str(order), *words]) == 0
    assert reason in capsys.readouterr().out and not order.exists()


@pytest.mark.parametrize(("devices", "cores"), [(8, 0), (3, 2)], ids=["without bf16", "a host"])
def test_the_recipe_needs_what_the_plan_said(devices: int, cores: int, tmp_path: Path) -> None:
    """The plan's seconds and bytes equal the prediction of `moe train` for the written recipe, also on a device without bf16 and on a host
    without GPUs (no CUDA context)."""
    file, out, table = tmp_path / "mine.yaml", tmp_path / "plan.yaml", tmp_path / "plan.json"
    cluster = replace(load_cluster("v100-8"), name="mine", devices_per_node=devices, cores=cores)
    file.write_text(yaml.safe_dump(mapping_of(cluster)))
    words = ["--train.global_batch", "24", "--model.max_length", "240", "--out", str(out), "--json", str(table)]
    assert main(["plan", "dense_tiny", "--cluster", str(file), *words]) == 0
    chosen, asked = json.loads(table.read_text())["chosen"], load(str(out))[0]
    assert asked.precision.compute == "auto"
    found = predict(check_run(settled(asked, cluster), devices), Place.of(cluster, devices))
    assert found.time is not None and found.time.step == pytest.approx(chosen["seconds"]) and found.fits
    assert (found.rank_bytes if cores else found.needed_bytes) == pytest.approx(chosen["held_bytes"])


def test_ranks_that_do_not_divide_an_evaluation_read_a_few_sequences_more(tmp_path: Path) -> None:
    """With 6 ranks, which do not divide train.eval_sequences 64, the plan evaluates 66 sequences. Without dp 6 it would be 65 % slower."""
    file, out = tmp_path / "six.yaml", tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(mapping_of(replace(load_cluster("a100-80-8"), devices_per_node=6))))
    assert main(["plan", "dense_tiny", "--cluster", str(file), "--train.global_batch", "24", "--out", str(out)]) == 0
    run = load(str(out))[0]
    assert run.degrees.dp == 6 and run.train.eval_sequences == 66


@pytest.mark.parametrize(
    ("words", "fixes"),
    [
        (["dense_8b", "--cluster", "v100-8", "--train.global_batch", "16"], 2),
        (["glam_8b_64e", "--cluster", "a100-40-8", "--train.global_batch", "32", "--model.num_layers", "8"], 2),
        (["dense_tiny", "--cluster", "gb200-72"], 1),
    ],
)
def test_a_fix_of_what_does_not_fit_works(words: list[str], fixes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    found = re.findall(r"(?:add|take) ([^,(]*)", capsys.readouterr().err.partition("fix: ")[2])
    assert len(found) == fixes
    for fix in found:
        more = fix.split()
        kept = [words[0], *words[3:]] if more[0] == "--cluster" else words
        assert main(["plan", *kept, *more, "--top", "1"]) == 0, fix


@pytest.mark.parametrize("search", ["alpa", "flexflow", "mesh-tf", "gspmd"])
def test_a_search_ends_in_a_recipe(
    search: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_search, "flexflow", partial(plan_search.flexflow, budget=50))  # 50 proposals instead of 2,000
    out, more = tmp_path / "plan.yaml", ["--recompute.kind", "full", "--recompute.loss_chunks", "2"]
    assert main(["plan", "dense_tiny", "--cluster", "a100-80-8", "--search", search, "--out", str(out), *more]) == 0
    chosen = plan_of(check_run(load(str(out))[0], 8))
    assert chosen.loss_chunks == 2 and (chosen.recompute == "full" or search in ("alpa", "flexflow"))  # which choose recompute themselves
    assert described(chosen) in capsys.readouterr().out


def test_the_guide_says_each_rule_with_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "glam_tiny", "--cluster", "a100-80-8x2", "--explain"]) == 0
    said = capsys.readouterr().out
    for rule in ("One device holds the model", "One node of 8", "Many nodes, a fast network", "A pipeline goes with DDP or ZeRO-1"):
        assert rule in said
    assert "The device has bf16" in said


def test_links_of_a_node_decide_whether_tensor_parallelism_and_a_pipeline_are_to_be_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--explain predicts both plans. It prints "confirmed here" if they are equally fast with fast links, or if the pipeline is faster with
    slow links; otherwise "not so here"."""
    known = load_cluster("h100-8")
    slow = replace(known, inside=replace(known.inside, bus_gb_s={8: 10.0}, sum_bus_gb_s=None, pair_gb_s=10.0, times={}))
    (tmp_path / "pcie.yaml").write_text(yaml.safe_dump(mapping_of(slow)))
    for name, rule in (("h100-8", "Fast links"), (str(tmp_path / "pcie.yaml"), "Slow links")):
        assert main(["plan", "dense_8b", "--cluster", name, "--explain", "--top", "1"]) == 0
        title, numbers = re.search(rf"{rule} .*\[(.*)\]\n(.*)", capsys.readouterr().out).groups()  # type: ignore[union-attr]
        apart = float(re.search(r"\(([+-]\d+)%\)", numbers)[1])  # type: ignore[index]
        holds = abs(apart) < 10 if rule == "Fast links" else apart > 0
        assert title == ("confirmed here" if holds else "not so here")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["plan", "glam_tiny"], "moe plan: got no --cluster, needed one of a100-40-8"),
        (["plan", "glam_tini"], "recipe: got glam_tini"),
        (["plan", "glam_tiny", "--cluster", "h1000"], "cluster: got h1000, needed one of a100-40-8"),
        (["plan", "--nccl", "x"], "fix: moe plan --calibrate --nccl FOLDER --cluster h100-8x4 --out mine.yaml"),
        (["plan", "--calibrate", "--runs", "x", "--out", "m.yaml"], "--runs: got no --cluster, needed"),
        ([*WORDS, "--out", "plan.txt"], "--out: got plan.txt, needed a recipe, *.yaml; fix: --out plan.yaml"),
        ([*WORDS, "--out", f"{__file__}/plan.yaml"], "is no folder, needed a file that can be written"),
        (["plan", "dense_tiny", "--cluster", "a100-80-8", "--out", "/proc/plan.yaml"], "--out: got /proc/plan.yaml: "),
        (["plan", "dense_tiny", "--cluster", "a100-80-8", "--json", "/proc/plan.json"], "--json: got /proc/plan.json: "),
        (["plan", "dense_tiny", "--cluster", "a100-80-8", "--as-is", "--pictures", __file__], "--pictures: got"),
        (["plan", "dense_8b", "--cluster", "v100-8", "--train.global_batch", "7"], "plan: got"),
        ([*WORDS, "--order", "order.txt"], "--order: got order.txt, needed a file of actions, *.csv; fix: --order order.csv"),
        ([*WORDS, "--as-is", "--search", "alpa"], "--as-is: got --as-is with --search alpa, needed one of the two"),
        (["plan", "dense_8b", "--cluster", "v100-8", "--train.global_batch", "16"], "GiB a device too much for the smallest plan"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err.strip()
    assert line in said and "fix:" in said and "\n" not in said
