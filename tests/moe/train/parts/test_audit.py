"""`train.audit_every`: audits change no number, repair a corrupt tensor that has an intact copy, and else end the run with one line.

The faults are some of those of `python -m tests.campaigns corruption`.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.checks.together import check_run
from moe.train.parts import audit
from moe.train.parts.executor import Single
from parallel.errors import BadInput, Ended
from parallel.mesh.mesh import Degrees
from parallel.process import process
from parallel.process.deterministic import deterministic
from parallel.process.process import World
from parallel.watch.audit import Held, by_change, fingerprints
from tests.campaigns import corruption
from tests.support import trained
from tests.support.ranks import run_on_ranks


@pytest.mark.parametrize("fault", [f for f in corruption.FAULTS if "zero" not in f.layout and f.full >= 30][::2], ids=str)
def test_a_flipped_bit_is_found_and_repaired(fault: corruption.Fault) -> None:
    row = corruption._row(fault, 2)
    assert row.problems == [] and row.held == 2


def test_steps_without_a_fault_raise_no_alarm() -> None:
    assert corruption._clean("", 2, corruption._EP, 3).problems == []


def test_the_campaign_reports_a_flip_as_missed_without_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shows that the campaign can fail."""
    monkeypatch.setattr(audit.Auditor, "passes", lambda self, compute, *, step: compute())
    monkeypatch.setattr(audit.Auditor, "compare_copies", lambda self, step, when: ([], torch.zeros(0)))
    row = corruption._row(next(f for f in corruption.FAULTS if f.what == "product, forward"), 3)
    assert row.lost and all("missed" in problem for problem in row.problems)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return trained.home(tmp_path, monkeypatch)


def _events(out: Path) -> list[dict[str, Any]]:
    return [line for line in trained.lines(out, "event") if line["event"] == "corruption"]


def test_an_audited_run_is_bitwise_the_run_without_audits(home: Path) -> None:
    """Also if one forward pass of an audited step is wrong; metrics.jsonl then has an event that names the layer and rank."""
    trained.train(trained.recipe(home), home / "plain")
    trained.train(trained.recipe(home, train={"audit_every": 2}), home / "audited")
    run, calls = Single.run, [0]

    def spoilt(self: Single, *args: Any) -> None:
        calls[0] += 1
        hook = lambda module, given, output: (output[0] * (1 + 1e-6), output[1])  # noqa: E731
        layer = self.model.layers[1]
        handle = layer.register_forward_hook(hook, prepend=True) if calls[0] == 2 else None  # called before the audit's own hook
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


def test_a_run_that_cannot_be_repaired_ends_and_resumes_from_its_checkpoint(home: Path) -> None:
    """If one of only two copies is corrupt, all ranks end with one line that names the tensor and the checkpoint."""
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

    ended = trained.train(recipe, home / "out", ranks=2, before=spoil)
    line = f"step 5: silent corruption, before the step: weight of embedding on ranks 0, 1; no copy is known to be intact; \
without --fresh the run continues from {home / 'out' / 'checkpoints' / 'step-3'}"
    assert ended == [line, line]
    trained.train(recipe, home / "out", ranks=2)
    trained.train(recipe, home / "undisturbed", ranks=2)
    assert trained.losses(home / "out") == trained.losses(home / "undisturbed")


def _audited(rank: int, spoilt: tuple[int, ...], folder: Path, dp: int) -> tuple[list[float], list[str], str]:
    """Audit a tied embedding, copied over dp and two stages, after changing it on the ranks `spoilt`. Return (its values afterwards,
    texts of the recorded events, the error or "")."""
    ranks, events = 2 * dp, list[dict[str, Any]]()
    mesh = process.connect(Degrees(dp=dp, pp=2), World(rank, ranks, rank, ranks))
    held = [Held("embedding", "weight", torch.arange(5.0), ("dp",) if dp > 1 else (), (0, 1))]
    engine: Any = SimpleNamespace(copy_again=lambda: False)
    auditor = audit.Auditor(engine, mesh, every=1, record=events.append, note=lambda _: None, folder=folder)
    auditor._held = lambda: held  # type: ignore[method-assign]
    before, end = fingerprints(held), ""
    if rank in spoilt:
        held[0].tensor[2] = -1.0
    try:
        if dp > 1:
            auditor.compare_copies(4, "before the step")
        else:
            auditor._settle(by_change(held, before, fingerprints(held), mesh), 4, "during the step")
    except Ended as ended:
        end = str(ended)
    return held[0].tensor.tolist(), [event["found"] for event in events], end


def test_a_table_on_two_stages_is_mended_within_a_stage_or_from_the_other(tmp_path: Path) -> None:
    """A corrupt embedding is replaced by the majority of its stage's three copies. With dp 1, a copy that changed during the step is
    replaced by the other stage's. If all copies of a stage differ from the other stage's, the run ends."""
    right = torch.arange(5.0).tolist()
    for rank in (1, 5):  # a rank of the first stage, and one of the last
        place = f"weight of embedding on rank {rank}"
        for tensor, found, end in run_on_ranks(_audited, 6, (rank,), tmp_path, 3):
            assert tensor == right and len(found) == 1 and place in found[0] and end == ""
    for tensor, found, end in run_on_ranks(_audited, 2, (0,), tmp_path, 1):
        assert tensor == right and found == ["during the step: weight of embedding on rank 0"] and end == ""
    ends = [end for _, _, end in run_on_ranks(_audited, 6, (0, 1, 2), tmp_path, 3)]
    assert len(set(ends)) == 1 and "weight of embedding on ranks 0, 3" in ends[0] and "no copy is known to be intact" in ends[0]


@pytest.mark.parametrize("number", [0, 3], ids=["factor", "inverse"])
def test_kfac_counts_an_audited_step_once_and_its_factors_are_repaired(number: int, home: Path) -> None:
    """A refresh begins in every second step. Also in audited steps, it counts each row once."""
    recipe = partial(trained.recipe, home, degrees={"ep": 1}, optimizer={"kind": "kfac", "kfac": {"refresh_every": 2, "delay": 1}})
    sizes = {"global_batch": 6, "eval_sequences": 6}

    def spoil(rank: int) -> None:
        made, auditors = audit.Auditor.__init__, list[audit.Auditor]()

        def noted(self: audit.Auditor, *args: Any, **more: Any) -> None:
            made(self, *args, **more)
            auditors.append(self)

        audit.Auditor.__init__ = noted  # type: ignore[method-assign]
        held = lambda: [one for one in auditors[0].engine.tensors() if one.kind in ("factor A", "inverse G")]  # noqa: E731
        if rank == 1:
            trained.on_line(4, lambda: corruption.flip(held()[number].tensor, 7, 0.3))

    trained.train(recipe(train=sizes), home / "plain", ranks=3)
    trained.train(recipe(train=sizes | {"audit_every": 1}), home / "audited", ranks=3)
    trained.train(recipe(train=sizes | {"audit_every": 5}), home / "spoilt", ranks=3, before=spoil)
    for out in ("audited", "spoilt"):
        assert trained.losses(home / out) == trained.losses(home / "plain")
        assert trained.tensors(home / out / "checkpoints" / "step-6") == trained.tensors(home / "plain" / "checkpoints" / "step-6")
    assert _events(home / "audited") == []
    (event,) = _events(home / "spoilt")
    assert event["step"] == 5 and f"{'inverse G' if number else 'factor A'} of" in event["found"]


def test_two_deterministic_runs_are_bitwise_equal(home: Path) -> None:
    """`train.deterministic` on three ranks, also for an interrupted and resumed run; torch's setting is restored at the end."""
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


def test_replicas_in_threads_give_the_same_bits_again_and_pass_audits(home: Path) -> None:
    recipes = {name: {"deterministic": True, "global_batch": 6, "eval_sequences": 6} | audits for name, audits in
               (("a", {}), ("b", {}), ("audited", {"audit_every": 2}))}  # fmt: skip
    for name, train in recipes.items():
        dp = trained.recipe(home, train=train, sharding={"kind": "dp", "replicas": 3})
        assert isinstance(trained.train(dp, home / name, forked=True)[0], dict)
    for name in ("b", "audited"):
        assert trained.losses(home / "a") == trained.losses(home / name)
        assert trained.tensors(home / "a" / "checkpoints" / "step-6") == trained.tensors(home / name / "checkpoints" / "step-6")
    assert _events(home / "audited") == []


def test_what_cannot_be_computed_twice_is_refused() -> None:
    for sections, ranks in (
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
        with pytest.raises(BadInput, match=r"train.audit_every: got 4 with .*; fix: set train.audit_every to 0"):
            check_run(run, ranks)
