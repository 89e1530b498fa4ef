"""wandb, trackio and mlflow receive the scalars of each step once, also over a resume; one that fails does not stop training.

The tests replace these packages by modules that record their calls.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from moe.records.tracker import scalars
from tests.support import trained


def module(name: str, **functions: Any) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(functions)
    return made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Return {"wandb", "mlflow": list of calls}, which fake packages fill. The fake trackio fails: its server cannot be reached."""
    heard: dict[str, list[Any]] = {"wandb": [], "mlflow": []}
    w, m = heard["wandb"].append, heard["mlflow"].append
    monkeypatch.setitem(
        sys.modules,
        "wandb",
        module("wandb", init=lambda **k: w(k), log=lambda values, step: w((step, values)), finish=lambda: w("end")),
    )
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"))
    monkeypatch.setitem(
        sys.modules,
        "mlflow",
        module(
            "mlflow",
            set_experiment=lambda name: None,
            start_run=lambda **k: m(k) or run,
            log_params=lambda values: m(("params", values)),
            log_metrics=lambda values, step: m((step, values)),
            end_run=lambda: m("end"),
        ),
    )

    def unreachable(**_: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "trackio", module("trackio", init=unreachable))
    return heard


def test_trackers_get_each_step_once_in_one_run(
    told: dict[str, list[Any]], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run = trained.recipe(home, train={"steps": 2, "trackers": ["wandb", "trackio", "mlflow"]})
    trained.train(run, tmp_path / "run")
    trained.train(run.model_copy(update={"train": run.train.model_copy(update={"steps": 3})}), tmp_path / "run")
    lines = [line for line in trained.lines(tmp_path / "run")]
    for name in ("wandb", "mlflow"):
        logged = [call for call in told[name] if isinstance(call, tuple) and call[0] != "params"]
        assert [values for step, values in logged if "loss" in values] == [dict(scalars(line)) for line in lines]
        assert [step for step, values in logged if "loss" in values] == [1, 2, 3]
        assert told[name].count("end") == 2
    first, second = (call for call in told["wandb"] if isinstance(call, dict))
    assert first["id"] == second["id"] and (first["project"], first["name"]) == ("mine", "run")
    assert first["config"]["experts.num_experts"] == 4
    assert [call["run_id"] for call in told["mlflow"] if isinstance(call, dict)] == [None, "r1"]


def test_one_that_is_not_installed_or_named_twice_is_refused_before_anything(home: Path, tmp_path: Path) -> None:
    for trackers, said in ((["mlflow"], "pip install mlflow"), (["wandb", "wandb"], "wandb")):
        (line,) = trained.train(trained.recipe(home, train={"trackers": trackers}), tmp_path / "run")
        assert line.startswith("train.trackers: got ") and said in line
    assert not (tmp_path / "run").exists()


def test_it_is_the_first_rank_that_must_have_it(told: dict[str, list[Any]], home: Path, tmp_path: Path) -> None:
    def without(missing: int) -> list[Any]:
        lose = lambda rank: sys.modules.pop("wandb") if rank == missing else None  # noqa: E731
        return trained.train(trained.recipe(home, train={"steps": 1, "trackers": ["wandb"]}), tmp_path / "run", ranks=2, before=lose)

    assert all("pip install wandb" in line for line in without(0))
    assert [summary["steps"] for summary in without(1)] == [1, 1]
