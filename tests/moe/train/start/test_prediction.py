"""Predicted memory and time of a run: a run that cannot fit is refused before it writes anything, and the summary compares prediction
and measurement. An error within the prediction never stops a run."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from moe.plan.machine.cluster import load_cluster, mapping_of, measured_file
from moe.records.summary import summary_rows
from moe.train.loop import trainer
from moe.train.start import prediction
from parallel.errors import BadInput
from parallel.machine import processor
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from tests.planner import runs as planner_runs
from tests.support import trained


def cluster_file(path: Path, *, memory_gib: float, name: str = "one core") -> str:
    """Write a cluster file of a host with two cores and `memory_gib` of memory. Return its path."""
    known = load_cluster("v100-8")
    host = replace(known, devices_per_node=2, cores=2, device=replace(known.device, name=name, memory_gib=memory_gib))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(mapping_of(host)))
    return str(path)


def go(run: Any, out: Path, **flags: Any) -> dict[str, Any]:
    return trainer.train(run, out=out, world=World(), **flags)


def test_what_cannot_fit_is_refused_before_anything_is_written(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, run, out = cluster_file(tmp_path / "small.yaml", memory_gib=1e-4), trained.recipe(home), tmp_path / "out"
    with pytest.raises(BadInput, match=r"too much, needed at most .*; fix: .*--force starts the run anyway"):
        go(run, out, cluster=small)
    assert not out.exists()
    summary = go(run, out, cluster=small, force=True)
    assert "--force" in capsys.readouterr().out and summary["steps"] == 6
    found = summary["predicted"]
    assert found["beside_bytes"] > 2**26 and found["memory_bytes"] > 0  # memory other than tensors: Python and torch take at least 64 MiB
    assert found["memory_ratio"] == pytest.approx(found["measured_memory_bytes"] / (found["memory_bytes"] + found["beside_bytes"]))
    assert found["step_ratio"] == pytest.approx(found["measured_step_seconds"] / found["step_seconds"])
    rows = dict(summary_rows(summary))
    assert rows["memory against its prediction"].endswith("times") and rows["step against its prediction"].endswith("times")


def test_an_evaluation_that_no_memory_holds_is_refused_before_the_first_step(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained.recipe(home)
    many = run.model_copy(update={"train": run.train.model_copy(update={"eval_sequences": 2**40})})
    with pytest.raises(BadInput, match=f"train.eval_sequences: got {2**40}, needed fewer: .*; fix: set it to {run.train.global_batch}"):
        go(many, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(prediction, "memory_limit_bytes", lambda: 1000.0)
    with pytest.raises(BadInput, match="needed fewer: .*, or --force starts the run anyway"):
        go(run, tmp_path / "out")
    assert go(run, tmp_path / "out", force=True)["steps"] == 6
    assert f"starting nevertheless (--force): train.eval_sequences: got {run.train.eval_sequences}" in capsys.readouterr().out


def test_the_smallest_rank_decides_for_all(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the run does not fit in the memory of rank 1, both ranks refuse it with the same line."""
    limits = {0: 2.0**40, 1: 2.0**10}
    known = prediction.here
    monkeypatch.setattr(prediction, "here", lambda world: replace(known(world), limit_bytes=limits[world.rank]))
    first, second = trained.train(trained.recipe(home, degrees={"dp": 2}), tmp_path / "out", ranks=2)
    assert first == second and "needed at most 1 KiB" in first


def test_limits_of_ulimit_count_as_memory(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`own_limit_bytes` is the least remainder of ulimit -v and -d: the limit minus the memory that the process has."""
    told = """
import resource
from parallel.machine import own_limit_bytes
print(own_limit_bytes())
for kind, limit in ((resource.RLIMIT_AS, 2**34), (resource.RLIMIT_DATA, 2**33)):
    resource.setrlimit(kind, (limit, limit))
    print(limit - own_limit_bytes())
"""
    free, addresses, data = subprocess.run(
        [sys.executable, "-c", told], capture_output=True, text=True, timeout=60, check=True
    ).stdout.split()
    assert free == "None" and 0 < float(data) < float(addresses) < 2**32
    monkeypatch.setattr(prediction, "own_limit_bytes", lambda: 1024.0)
    with pytest.raises(BadInput, match=r"on the fullest rank, under the ulimit of its process, .* needed at most 1 KiB"):
        go(trained.recipe(home), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_prediction_that_fails_is_a_line(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*_: Any) -> None:
        raise ZeroDivisionError("no such formula")

    monkeypatch.setattr(prediction, "predict", fails)
    assert go(trained.recipe(home), tmp_path / "out")["predicted"] is None
    assert "no prediction of memory and time (ZeroDivisionError: no such formula)" in capsys.readouterr().out


def test_time_is_predicted_where_this_machine_was_measured(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained.recipe(home, train={"steps": 2, "save_every": 0})
    assert go(run, tmp_path / "a")["predicted"]["step_seconds"] is None
    assert "time not predicted (moe plan --calibrate measures this machine)" in capsys.readouterr().out
    cluster_file(measured_file(), memory_gib=8, name="another processor")
    assert go(run, tmp_path / "b")["predicted"]["step_seconds"] is None
    cluster_file(measured_file(), memory_gib=8, name=processor())
    assert go(run, tmp_path / "c")["predicted"]["step_seconds"] > 0
    assert "a step (machine)" in capsys.readouterr().out
    measured_file().unlink()


@pytest.mark.parametrize("case", ["fsdp", "pp 2"])
def test_predicted_bytes_are_near_the_measured(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Predicted bytes of tensors are within a tenth of the measured ones, for a small model on two ranks."""
    monkeypatch.setattr(planner_runs, "MODEL", planner_runs.MODEL | {"num_layers": 2, "d_model": 96, "d_ff": 384, "vocab_size": 512})
    rows = run_on_ranks(planner_runs.measure, 2, 2, case, "fp32", timeout_s=90)
    assert all(abs(row["predicted_bytes"] / row["measured_bytes"] - 1) < planner_runs.WITHIN for row in rows)
