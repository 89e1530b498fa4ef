"""`moe plan --calibrate`: the planner reads all numbers of the written file, fits find known constants, and ranks share a host's cores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe.calibrate import calibrate, kernels, own_step
from moe.cli.main import main
from moe.plan.job.network import Network, Plan
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.machine.cluster import Cluster, cluster_of, load_cluster
from moe.plan.time.collective_times import Group, all_reduce, all_to_all, gather, send
from moe.plan.time.cost import step_time
from moe.plan.time.stage_time import own_program
from moe.recipe.load import build_run

NETWORK = Network(layers=4, width=96, heads=3, hidden=384, vocab=512, length=64)


def host(cores: int, *, threads: dict[int, float] | None = None) -> Cluster:
    """An invented host: about 50 GFLOP/s per core, and 1 ms for every collective."""
    found = {
        "rates": {"fp32": {1e6: 0.04, 1e9: 0.06}},
        "attention": {"fp32": [30.0, 900.0, 40.0, 2500.0]},
        "memory_gb_s": 10.0,
        "launch_us": 1.5,
    }
    table = {kind: dict.fromkeys(calibrate.SIZES, 1000.0) for kind in calibrate.KINDS}
    inside = calibrate.inside(dict.fromkeys((2, 4, 8), table))
    device = calibrate.device("a processor", 8.0, 1, found)
    known = load_cluster("v100-8")
    return replace(
        known, name="machine", device=device, inside=inside, devices_per_node=8, nodes=1, cores=cores, threads=threads or {1: 1.0}
    )


def test_the_file_is_read_as_it_was_written() -> None:
    made = replace(host(3, threads={1: 1.0, 3: 2.5}), program={"launch_us": 41.5, "pointwise": 3.25})
    assert cluster_of(yaml.safe_load(calibrate.text(made)), name="machine") == made
    assert (own_program(made).launch_us, own_program(made).pointwise, own_program(made).gathers) == (41.5, 3.25, "waited")


def test_the_fit_finds_the_constants_with_which_step_times_were_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"launch_us": 37.0, "pointwise": 4.5, "step_ms": 2.25}
    there = host(2)
    there = replace(there, device=replace(there.device, launch_us=0.0))  # otherwise a step's time is not linear in the constants
    alone = replace(there, cores=1, devices_per_node=1)

    def steps(*_: Any, **__: Any) -> list[list[float]]:
        runs = [build_run(calibrate.recipe(*size)).resolve(1) for size in calibrate.STEPS]
        program = own_program(replace(alone, program=given))
        return [[step_time(network_of(run), plan_of(run), alone, program).step for run in runs]] * 2

    monkeypatch.setattr(calibrate, "run_on_ranks", steps)
    assert calibrate.program(there, 2) == pytest.approx(given, rel=1e-3)


def test_the_fit_finds_the_microseconds_that_were_added_to_each_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gathers each of 6 layers and of 2 ends twice and reduces its gradient once, in each of 4 micro-batches."""
    there = replace(host(2), program={"launch_us": 37.0, "pointwise": 4.5, "step_ms": 2.25})
    passes = 4 * (3 * (6 + 2) + (6 + 2) / 6)

    def steps(*_: Any, **__: Any) -> list[list[float]]:
        runs = [build_run(calibrate.sharded(kind)).resolve(2) for kind in ("ddp", "fsdp")]
        plain, fsdp = (step_time(network_of(run), plan_of(run), there.holding(2), own_program(there)).step for run in runs)
        return [[plain, fsdp + passes * 1750e-6]] * 2

    monkeypatch.setattr(calibrate, "run_on_ranks", steps)
    assert calibrate.gather_us(there) == pytest.approx(1750.0, rel=1e-4)


def test_products_take_the_measured_time_and_lie_between_neighbors() -> None:
    device = host(2).device
    assert device.product(100, 100, 50, kind="fp32") == pytest.approx(1e6 / 0.04e12)
    assert device.product(1000, 1000, 500, kind="fp32", count=3) == pytest.approx(3e9 / 0.06e12)
    assert 0.04e12 < 3e7 / device.product(300, 1000, 50, kind="fp32") < 0.06e12


def test_kernels_attention_finds_picoseconds_per_operation_and_per_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of two head sizes are made from known numbers. `kernels.attention` finds them, and they predict a third head size."""
    given = [30.0, 900.0, 45.0, 25_000.0]

    def seconds(shape: tuple[int, ...], *_: Any) -> tuple[float, float]:
        sequences, heads, length, channels = shape
        pairs = sequences * heads * length**2 / 2
        return tuple((given[at] * work * channels + given[at + 1]) * pairs * 1e-12 for at, work in ((0, 4), (2, 10)))  # type: ignore[return-value]

    monkeypatch.setattr(kernels, "_attention_seconds", seconds)
    found = kernels.attention(torch.device("cpu"), torch.bfloat16)
    assert found == pytest.approx(given)
    core = replace(host(2).device, attention_times={"bf16": found})
    pairs = 3 * 5 * 70**2 / 2
    forward, backward = seconds((3, 5, 70, 24))
    assert core.fused_attention(4 * 24 * pairs, pairs, kind="bf16") == pytest.approx(forward)
    assert core.fused_attention(10 * 24 * pairs, pairs, backward=True, kind="bf16") == pytest.approx(backward)


def test_bf16_changes_only_products_attention_and_messages_on_a_host() -> None:
    """With equal rates for both dtypes, the backward pass takes equal time, because a core is no faster for 16-bit activations."""
    there = host(2)
    rates, times = there.device.rates["fp32"], there.device.attention_times["fp32"]
    there = replace(
        there,
        device=replace(there.device, rates=dict.fromkeys(("fp32", "bf16"), rates), attention_times=dict.fromkeys(("fp32", "bf16"), times)),
    )
    wide, narrow = (step_time(NETWORK, Plan(microbatch=4, compute_bytes=of), there, own_program(there)) for of in (4, 2))
    assert narrow.parts["backward"] == pytest.approx(wide.parts["backward"], rel=1e-9)


@pytest.mark.parametrize(("ranks", "cores", "longer"), [(2, 2, 1.0), (6, 2, 3.0), (8, 5, 1.6)])
def test_ranks_beyond_the_cores_take_turns(ranks: int, cores: int, longer: float) -> None:
    """With equal work per rank, a step of r ranks on c cores takes r / c times as long, apart from messages."""
    plan = Plan(dp=ranks, microbatch=4, compute_bytes=4)
    one = step_time(NETWORK, replace(plan, dp=1), replace(host(cores), cores=1, devices_per_node=1), own_program(host(cores)))
    many = step_time(NETWORK, plan, host(cores), own_program(host(cores)))
    assert many.step - many.gradients == pytest.approx(longer * one.step, rel=1e-9)


def test_a_rank_with_several_cores_is_faster_by_the_measured_factor() -> None:
    plan, slow, fast = Plan(microbatch=4, compute_bytes=4), host(4), host(4, threads={1: 1.0, 2: 1.7, 4: 2.9})
    times = [step_time(NETWORK, plan, cluster, own_program(cluster)).step for cluster in (slow, fast)]
    assert times[0] / times[1] == pytest.approx(2.9, rel=1e-9)


@pytest.mark.parametrize("cores", [1, 2, 3, 4])
def test_a_pipeline_on_few_cores_waits_for_work_or_for_a_core(cores: int) -> None:
    """A step takes at least as long as with one core per stage. On one core it takes about the time of all stages' work."""
    plan = Plan(pp=4, microbatch=2, microbatches=6, compute_bytes=4)
    cluster = host(cores)
    wide = step_time(NETWORK, plan, replace(cluster, cores=4), own_program(cluster))
    found = step_time(NETWORK, plan, cluster, own_program(cluster))
    assert found.step - found.optimizer >= (wide.step - wide.optimizer) * (1 - 1e-9)
    if cores == 1:
        work = 4 * (wide.forward + wide.backward + wide.launch)  # of 4 stages, each as slow as the last one, which has the head
        assert 0.5 * work < found.step < 1.5 * work


def test_groups_of_one_host_take_turns_at_its_links() -> None:
    cluster = host(2)
    for collective in (all_reduce, gather, all_to_all):
        alone = collective(cluster, Group(2, 1, sharing=1), 65536)
        assert alone == pytest.approx(1e-3) and collective(cluster, Group(2, 1, sharing=4), 65536) == pytest.approx(4e-3)
    assert send(cluster, 65536, stride=1) == pytest.approx(1e-3)


def test_this_machine_is_measured_and_predicted_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "SECONDS", 0.01)
    monkeypatch.setattr(kernels, "PRODUCTS", ((64, 32, 32), (256, 128, 64)))
    monkeypatch.setattr(kernels, "STREAM_BYTES", 2**20)
    monkeypatch.setattr(calibrate, "SIZES", (4096, 65536))
    monkeypatch.setattr(calibrate, "STEPS", ((1, 32, 64, 2, 32, 2), (2, 64, 128, 2, 48, 4), (1, 96, 256, 2, 64, 4)))
    monkeypatch.setattr(calibrate, "SHARDED", (1, 32, 64, 2, 32, 8))
    monkeypatch.setattr(own_step, "STEPS", 2)
    monkeypatch.setattr(own_step, "WARM_UP", 1)
    path = tmp_path / "machine.yaml"
    assert main(["plan", "--calibrate", "--nproc", "1", "--out", str(path)]) == 0  # collectives always have at least two ranks
    made = load_cluster(str(path))
    assert made.devices_per_node == 2 and list(made.inside.times["all_reduce"]) == [2]
    assert made.cores > 0 and made.device.rates["fp32"] and set(made.program) == {"launch_us", "pointwise", "step_ms", "gather_us"}
    assert all(us > 0 for kind in made.inside.times.values() for row in kind.values() for us in row.values())
    assert main(["train", "dense_tiny", "--dry-run", "--cluster", str(path)]) == 0
    assert "time of a step  not predicted" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["dense_tiny", "--calibrate"], "RECIPE: got dense_tiny with --calibrate"),
        (["--calibrate", "--cluster", "a100-80-8"], "--cluster: got --cluster with --calibrate"),
        (["--calibrate", "--out", "machine.json"], "--out: got machine.json, needed a cluster file, *.yaml; fix: --out machine.yaml"),
        (["--calibrate", "--nproc", "0"], "--nproc: got 0"),
        (["dense_tiny", "--cluster", "a100-80-8", "--nproc", "2"], "--nproc: got --nproc without --calibrate"),
        (["--cluster", "a100-80-8"], "moe plan: got no RECIPE"),
    ],
)
def test_bad_input_is_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *words]) == 2
    said = capsys.readouterr().err.strip()
    assert line in said and "fix:" in said and "\n" not in said
