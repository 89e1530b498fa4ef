"""Seconds of steps that a known cluster makes give its constants back; what the steps do not tell stays as it was."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from moe.calibrate.own_runs import CONSTANTS, DETERMINED, Step, fitted, measured, off
from moe.cli.main import main
from moe.plan.job.network import Network, Plan
from moe.plan.machine.cluster import FOLDER, Cluster, cluster_of, load_cluster
from moe.plan.time.cost import step_time
from moe.recipe.load import load
from parallel.errors import BadInput

GIVEN = load_cluster("h100-8")
LAW = {"device.sustained": 0.75, "device.memory_share": 0.8, "program.launch_us": 2.5, "inside.bus_gb_s": 0.6}  # true / given


def true_cluster(law: dict[str, float]) -> Cluster:
    """Return the cluster of h100-8.yaml with the numbers of these constants multiplied in the file."""
    file = yaml.safe_load((FOLDER / "h100-8.yaml").read_text())
    keys = {"device.attention": ["attention"], "inside.bus_gb_s": ["bus_gb_s", "sum_bus_gb_s", "pair_gb_s"]}
    for constant, factor in law.items():
        section, key = constant.split(".")
        values = file.setdefault(section, {"launch_us": 20, "step_ms": 1})
        for name in keys.get(constant, [key]):
            old = values[name]
            if isinstance(old, dict):
                values[name] = {ranks: rate * factor for ranks, rate in old.items()}
            else:
                values[name] = [each * factor for each in old] if isinstance(old, list) else old * factor
    return cluster_of(file, name="h100-8")


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_scaled_constant_is_the_file_with_other_numbers(name: str) -> None:
    network, plan = Network(layers=2, width=1024, heads=8, hidden=4096, vocab=32000, length=512), Plan(dp=16, microbatch=2, engine="zero1")
    ways = [way.holding(16) for way in (GIVEN, CONSTANTS[name].scaled(GIVEN, 0.5), true_cluster({name: 0.5}))]
    given, scaled, written = (step_time(network, plan, way).parts for way in ways)
    assert scaled == pytest.approx(written, rel=1e-12) and scaled != given


def steps(law: dict[str, float], *, noise: float = 0.0, dp: tuple[int, ...] = (1, 8)) -> list[Step]:
    """Steps of small and large models, alone and on 8 ranks, with the seconds of GIVEN times `law` and normal noise."""
    draw, there, found = random.Random(7), true_cluster(law), []
    for ranks in dp:
        for width, layers, length, batch in (
            (512, 8, 512, 2),
            (1024, 16, 1024, 2),
            (2048, 12, 2048, 4),
            (4096, 4, 2048, 4),
            (4096, 4, 512, 1),
        ):
            network = Network(layers=layers, width=width, heads=width // 128, hidden=4 * width, vocab=32000, length=length)
            plan = Plan(dp=ranks, microbatch=batch, microbatches=2)
            seconds = step_time(network, plan, there.holding(ranks)).step * (1 + draw.gauss(0, noise))
            found.append(Step(f"{width} on {ranks}", network, plan, seconds))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_constants_of_a_known_law_are_recovered_within_their_stated_deviation(noise: float) -> None:
    found = fitted(GIVEN, steps(LAW, noise=noise))
    assert set(found.determined) == set(LAW) and max(found.determined.values()) < DETERMINED
    for name, factor in LAW.items():
        x = math.log(CONSTANTS[name].value(found.cluster) / CONSTANTS[name].value(GIVEN))
        assert x == pytest.approx(math.log(factor), abs=found.determined[name])


def test_constants_that_the_steps_do_not_tell_stay() -> None:
    """Ranks without others say nothing about links."""
    found = fitted(GIVEN, steps(LAW, dp=(1,)))
    assert {"inside.bus_gb_s", "between.share"} <= set(found.undetermined) and not set(found.determined) & set(found.undetermined)
    assert (found.cluster.inside, found.cluster.between) == (GIVEN.inside, GIVEN.between)
    assert fitted(GIVEN, []).cluster == GIVEN


def test_steps_that_no_constants_explain_tell_nothing() -> None:
    """Steps of other devices, 200 times as slow: every factor is at most 4."""
    others = [replace(step, seconds=200 * step.seconds) for step in steps({}, dp=(1,))]
    found = fitted(GIVEN, others)
    assert found.cluster == GIVEN and not found.determined and set(found.undetermined) == set(CONSTANTS)


def test_steps_that_were_left_out_are_predicted_better() -> None:
    known = steps(LAW, noise=0.03)
    for at in range(3):  # each run is left out once
        left, others = known[at::3], [step for nth, step in enumerate(known) if nth % 3 != at]
        assert off(fitted(GIVEN, others).cluster, left) < 0.3 * off(GIVEN, left)


def finished(folder: Path, name: str, recipe: str, ranks: int, seconds: float, **summary: object) -> None:
    """Write what the calibration reads of a finished run."""
    values = load(recipe, {"degrees.ep": str(ranks)})[0].model_dump(mode="json")
    about = {"recipe_values": values, "world": ranks, "hardware": "NVIDIA H100 80GB HBM3", "predicted": {"measured_step_seconds": seconds}}
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / "summary.json").write_text(json.dumps(about | summary))
    (folder / name / "metrics.jsonl").write_text(
        json.dumps({"step": 1, "moe": [{"layer": 1, "load": [0.5, 0.1, 0.1, 0.05, 0.1, 0.05, 0.05, 0.05]}]}) + "\n"
    )


def test_runs_of_a_folder_become_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs on devices whose launches take twice as long as in the cluster file."""
    for name, recipe, ranks in (("small", "dense_tiny", 1), ("experts", "switch_tiny", 2)):
        finished(tmp_path / "runs", name, recipe, ranks, 1.0)
        (step,) = measured(tmp_path / "runs" / name, GIVEN)
        there = true_cluster({"program.launch_us": 2.0}).holding(ranks)
        finished(tmp_path / "runs", name, recipe, ranks, step_time(step.network, step.plan, there).step)
    out = tmp_path / "mine.yaml"
    assert main(["plan", "--calibrate", "--runs", str(tmp_path / "runs"), "--cluster", "h100-8", "--out", str(out)]) == 0
    said, made = capsys.readouterr().out, load_cluster(str(out))
    assert made.program["launch_us"] == pytest.approx(40, rel=0.05) and "fitted: program.launch_us 20 -> " in said
    assert any("program.launch_us: replaced, fitted to steps of 2 runs (experts, small)" in source for source in made.sources)
    (experts, _) = measured(tmp_path / "runs", GIVEN)
    assert experts.network.experts is not None and experts.network.experts.busiest == 1.5


@pytest.mark.parametrize(
    ("changes", "got"),
    [
        ({"hardware": "NVIDIA H100 PCIe"}, "a run on NVIDIA H100 PCIe.* needed runs on NVIDIA H100 80GB HBM3"),
        ({"predicted": None}, "without step seconds"),
        ({"world": "2"}, "without step seconds"),
    ],
)
def test_runs_that_tell_nothing_are_refused(changes: dict[str, object], got: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no summary.json"):
        list(measured(tmp_path, GIVEN))
    finished(tmp_path, "a", "dense_tiny", 1, 0.5)
    finished(tmp_path, "b", "dense_tiny", 1, 0.5, **changes)
    with pytest.raises(BadInput, match=got):
        list(measured(tmp_path, GIVEN))


@pytest.mark.parametrize(
    ("hardware", "cluster", "same"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-8", True),
        ("NVIDIA H100 80GB HBM3", "h100-500w-8", False),  # 96 GB
        ("NVIDIA H100 80GB HBM3", "h800-8", False),
        ("NVIDIA A100-SXM4-40GB", "a100-40-8", True),
        ("NVIDIA A100-SXM4-40GB", "a100-80-8", False),
        ("NVIDIA B200", "b200-8", True),
        ("NVIDIA B200", "gb200-72", False),
        ("Intel(R) Xeon(R) Processor, 2 threads a rank", "h100-8", False),
        (None, "h100-8", False),
    ],
)
def test_runs_on_other_devices_than_the_clusters_are_refused(hardware: str | None, cluster: str, same: bool, tmp_path: Path) -> None:
    finished(tmp_path, "a", "dense_tiny", 1, 0.5, hardware=hardware)
    there = load_cluster(cluster)
    if same:
        assert len(list(measured(tmp_path, there))) == 1
        return
    with pytest.raises(BadInput, match=f"needed runs on the devices of --cluster, {there.device.name}"):
        list(measured(tmp_path, there))
    cpu = replace(there, device=replace(there.device, name=str(hardware).split(",")[0]))
    assert len(list(measured(tmp_path, cpu))) == 1
