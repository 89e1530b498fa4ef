"""`train.audit_every` in whole runs: it changes nothing where nothing is wrong, mends what it can, and ends in one line where it cannot.

Each fault of `moe bench faults --only corruption` once or twice, and a run whose records and checkpoints are looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.bench import corruption
from moe.checks.together import check_run
from moe.train import audit
from moe.train.executor import Single
from parallel.deterministic import deterministic
from parallel.errors import BadInput, Ended
from tests.support import trained


@pytest.mark.parametrize("fault", [f for f in corruption.FAULTS if "zero" not in f.layout and f.full >= 30], ids=str)
def test_a_flipped_bit_is_found_and_the_step_is_that_of_an_undisturbed_run(fault: corruption.Fault) -> None:
    row = corruption._row(fault, 2)
    assert row.problems == [] and row.held == 2


def test_steps_without_a_fault_raise_no_alarm() -> None:
    assert corruption._clean("", 2, corruption._EP, 3).problems == []


def test_the_bench_calls_a_step_that_nobody_audited_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else everything would be held whatever the audit does."""
    monkeypatch.setattr(audit.Auditor, "passes", lambda self, compute, *, step: compute())
    monkeypatch.setattr(audit.Auditor, "compare_copies", lambda self, step, when: ([], torch.zeros(0)))
    row = corruption._row(next(f for f in corruption.FAULTS if f.what == "product, forward"), 3)
    assert row.lost and all("missed" in problem for problem in row.problems)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return trained.home(tmp_path, monkeypatch)


def _events(out: Path) -> list[dict[str, Any]]:
    return [line for line in trained.lines(out, "event") if line["event"] == "corruption"]


def test_an_audited_run_is_the_run_without(home: Path) -> None:
    """Losses and checkpoint bit by bit, with a fault in the passes of an audited step too, which is recorded with its layer."""
    trained.train(trained.recipe(home), home / "plain")
    trained.train(trained.recipe(home, train={"audit_every": 2}), home / "audited")
    run, calls = Single.run, [0]

    def spoilt(self: Single, *args: Any) -> None:
        calls[0] += 1
        hook = lambda module, given, output: (output[0] * (1 + 1e-6), output[1])  # noqa: E731
        layer = self.model.layers[1]
        handle = layer.register_forward_hook(hook, prepend=True) if calls[0] == 2 else None  # before the audit's own
        run(self, *args)
        if handle is not None:
            handle.remove()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Single, "run", spoilt)
        trained.train(trained.recipe(home, train={"audit_every": 2}), home / "spoilt")
    for out in ("audited", "spoilt"):
        assert trained.losses(home / out) == trained.losses(home / "plain")
        assert trained.tensors(home / out / "checkpoints" / "step-6") == trained.tensors(home / "plain" / "checkpoints" / "step-6")
    assert _events(home / "audited") == []
    (event,) = _events(home / "spoilt")
    assert event["step"] == 2 and "the forward pass of layers.1 on rank 0" in event["found"]


def test_a_run_that_cannot_be_mended_ends_and_the_same_command_goes_on(home: Path) -> None:
    """One of two copies is changed between two audits: all ranks end in one line that names it and the last checkpoint."""
    recipe = trained.recipe(home, train={"audit_every": 5}, degrees={"ep": 1})

    def spoil(rank: int) -> None:
        def change() -> None:
            corruption.flip(audit_of[0].engine.state("embedding")["weight"], 7, 0.3)

        audit_of: list[audit.Auditor] = []
        made = audit.Auditor.__init__

        def noted(self: audit.Auditor, *args: Any, **more: Any) -> None:
            made(self, *args, **more)
            audit_of.append(self)

        audit.Auditor.__init__ = noted  # type: ignore[method-assign]
        if rank == 1:
            trained.on_line(4, change)

    with pytest.raises(AssertionError) as error:
        trained.train(recipe, home / "out", ranks=2, before=spoil)
    line = f"step 5: silent corruption, before the step: weight of embedding on ranks 0, 1; no copy is known to be intact; \
without --fresh the run goes on from {home / 'out' / 'checkpoints' / 'step-3'}"
    assert str(error.value).count(f"{Ended.__module__}.{Ended.__name__}: {line}") == 2
    trained.train(recipe, home / "out", ranks=2)
    trained.train(recipe, home / "undisturbed", ranks=2)
    assert trained.losses(home / "out") == trained.losses(home / "undisturbed")


def test_two_deterministic_runs_are_equal_and_the_settings_are_put_back(home: Path) -> None:
    """Losses and checkpoint bit by bit, on three ranks, also where the second was cut and resumed; threads that add are refused."""
    recipe = trained.recipe(home, train={"deterministic": True, "global_batch": 6, "eval_sequences": 6}, degrees={"ep": 1})

    def during(rank: int) -> None:
        seen: list[bool] = []
        trained.on_line(1, lambda: seen.append(torch.are_deterministic_algorithms_enabled()))
        trained.on_line(2, lambda: seen == [True] or os._exit(3))

    for name, stop in (("a", during), ("b", trained.stop_at(3))):
        trained.train(recipe, home / name, ranks=3, before=stop)
    assert trained.train(recipe, home / "b", ranks=3)
    assert trained.losses(home / "a") == trained.losses(home / "b") and len(trained.losses(home / "a")) == 6
    assert trained.tensors(home / "a" / "checkpoints" / "step-6") == trained.tensors(home / "b" / "checkpoints" / "step-6")
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(BadInput, match=r"train.deterministic: got true with sharding.kind=dp"):
        check_run(corruption.build_run({"train": {"deterministic": True}, "sharding": {"kind": "dp"}}), 1)


def test_what_cannot_be_computed_twice_is_refused() -> None:
    for sections, ranks in (
        ({"optimizer": {"kind": "kfac"}}, 1),
        ({"sharding": {"kind": "dp"}}, 1),
        (
            {
                "degrees": {"pp": 2},
                "pipeline": {"schedule": "two_bw", "microbatches": 2},
                "optimizer": {"clip_norm": None},
                "model": {"tied_embeddings": False},
            },
            2,
        ),
    ):
        run = corruption.build_run({"train": {"audit_every": 4}} | sections)
        with pytest.raises(BadInput, match=r"train.audit_every: got it with .*; fix: set train.audit_every to 0"):
            check_run(run, ranks)
