"""The mutations fit the code: their targets exist and `moe verify` has their cases. Some of them are run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe.verify.cases import Case
from moe.verify.kinds import KINDS, cases
from tests.mutations import run
from tests.mutations.every import MUTATIONS, SUBJECTS, UNREPORTED
from tests.mutations.mutation import Edit, Mutation, applied

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE, RUN = DOCS / "inside" / "mutations.md", DOCS / "benchmarks" / "verify-mutations.json"
TYPES = DOCS / "benchmarks" / "verify-types.json"
ONE = Case("switch", "ddp", 1, 1, 1, "fp32")


def test_applied_replaces_each_mutations_targets_and_restores_them() -> None:
    for mutation in MUTATIONS:
        before = [vars(owner)[name] for owner, name in (edit.found() for edit in mutation.edits)]
        with applied(mutation, mutation.not_called()):
            inside = [vars(owner)[name] for owner, name in (edit.found() for edit in mutation.edits)]
            assert all(new is not old for new, old in zip(inside, before, strict=True)), mutation.name
        after = [vars(owner)[name] for owner, name in (edit.found() for edit in mutation.edits)]
        assert all(new is old for new, old in zip(after, before, strict=True)), mutation.name


def test_every_mutation_has_a_case_of_verify_and_a_source() -> None:
    assert len(MUTATIONS) >= 60 and len({m.name for m in MUTATIONS}) == len(MUTATIONS)
    listed: dict[str, set[Case | str]] = {kind: set(cases(8, kinds=(kind,))) for kind in KINDS if kind in {m.kind for m in MUTATIONS}}
    listed["test"] = {m.case for m in MUTATIONS if isinstance(m.case, str) and _there(m.case)}
    assert [m.name for m in MUTATIONS if m.case not in listed[m.kind]] == []
    assert [m.name for m in MUTATIONS if not re.search(r"[\w-]+/[\w-]+(#\d+|: )|arXiv \d{4}\.\d{5}", m.source)] == []
    reported = re.compile(r"[\w-]+/[\w-]+#\d+|arXiv \d{4}\.\d{5}")
    assert [m.name for m in MUTATIONS if not (m.source.startswith(UNREPORTED) or reported.search(m.source))] == []


def _there(test: str) -> bool:
    """Whether the file of this pytest id has its function."""
    file, _, name = test.partition("::")
    return f"def {name}(" in (DOCS.parent / file).read_text(encoding="utf-8")


def test_the_docs_page_and_the_recorded_run_have_every_mutation() -> None:
    """docs/inside/mutations.md has the number of each subject and names only mutations of it; the JSON has every mutation, found."""
    rows = re.findall(r"^\| (.+) \| (\d+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert [(subject, int(number)) for subject, number, _ in rows] == [(subject, len(some)) for subject, some in SUBJECTS.items()]
    for subject, _, examples in rows:
        assert set(re.findall(r"`(\w+)`", examples)) <= {m.name for m in SUBJECTS[subject]}
    run = [row for row in json.loads(RUN.read_text(encoding="utf-8"))["rows"] if row["mutation"] != "none"]
    assert [(row["mutation"], row["passed"]) for row in run] == [(m.name, True) for m in MUTATIONS]
    types = json.loads(TYPES.read_text(encoding="utf-8"))
    silent = [row["passed"] for row in types["rows"] if row["mutation"] == "none"]
    said = rf"\[It finds {types['found']}\].+and {sum(silent)} of {len(silent)} layouts without a fault pass"
    assert re.search(said, PAGE.read_text(encoding="utf-8")) and all(silent) and 2 * types["found"] >= types["all"] == len(MUTATIONS)


def test_the_list_has_a_row_with_its_source_for_every_mutation() -> None:
    said = list[str]()
    assert run.main(list=True, say=said.append) == 0
    rows = re.findall(r"^\| `(\w+)`: .+ \| (.+) \| \w+ \|$", said[0], flags=re.M)
    assert [name for name, _ in rows] == [m.name for m in MUTATIONS] and all(
        "](https://" in source or "none; " in source for _, source in rows
    )


def _nothing(real: Any) -> Any:
    return real


def _stale(real: Any) -> Any:
    """Return a replacement with a wrong signature, so that its calls raise TypeError."""
    return lambda x: real(x)


CHOSEN = {
    "one_slot_too_many": ("found", "layers.1.router"),  # a fault in the forward pass
    "routers_decay": ("found", "layers.1.router.weight"),  # a fault in the optimizer's update
    "expert_gradients_times_ep": ("found", "layers.1.experts.0.w2"),  # a fault in the backward pass, on two ranks
    "harmless": ("MISSED", ""),
    "elsewhere": ("NOT EXERCISED", ""),
    "stale": ("FAILED", "after layers.1.router of step 0"),
}
JOIN = "moe.experts.layer:join"
HARMLESS = Mutation("harmless", "Nothing is wrong", "nobody/nothing#1", "data", ONE, (Edit(JOIN, _nothing),))
NOT_CALLED = Edit("parallel.mesh.collectives:_wide_scattered_sum", _nothing)  # never called on one rank
ELSEWHERE = Mutation("elsewhere", "What is wrong is not called", "nobody/nothing#2", "data", ONE, (HARMLESS.edits[0], NOT_CALLED))
STALE = Mutation("stale", "What stands there was written for other code", "nobody/nothing#3", "data", ONE, (Edit(JOIN, _stale),))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Any], list[str]]]:
    """Return (exit code, JSON, printed lines) of a run of six mutations, which share one reference run to save time."""
    path, said = tmp_path_factory.mktemp("mutations") / "m.json", list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "MUTATIONS", (*(m for m in MUTATIONS if m.name in CHOSEN), HARMLESS, ELSEWHERE, STALE))
        code = run.main(json=str(path), say=said.append)
    yield code, json.loads(path.read_text()), said


@pytest.mark.parametrize("name", CHOSEN)
def test_the_verdict_of_each_mutation(whole: tuple[int, dict[str, Any], list[str]], name: str) -> None:
    _, written, said = whole
    verdict, layer = CHOSEN[name]
    row = next(row for row in written["rows"] if row["mutation"] == name)
    assert row["passed"] is (verdict == "found") and row["layer"] == layer
    by = {"found": "data: ", "MISSED": "", "NOT EXERCISED": f"not exercised: {NOT_CALLED.target}", "FAILED": "its ranks failed"}
    assert row["found_by"].startswith(by[verdict])
    assert next(line for line in said if line.startswith(name)).endswith(verdict)


def test_controls_run_first_and_missed_faults_give_exit_code_1(whole: tuple[int, dict[str, Any], list[str]]) -> None:
    code, written, said = whole
    controls = written["rows"][:2]  # the six mutations have two different cases
    assert [(row["mutation"], row["found_by"], row["layer"], row["passed"]) for row in controls] == [("none", "", "", True)] * 2
    assert code == 1 and written["verb"] == "mutations" and (written["passed"], written["failed"]) == (5, 3)
    assert said[-1].startswith("3 of 6 faults found and named")


def test_a_missing_target_is_an_error_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = Mutation("gone", "Nothing is wrong", "nobody/nothing#4", "data", ONE, (Edit("moe.experts.layer:joined", _nothing),))
    monkeypatch.setattr(run, "MUTATIONS", (HARMLESS, gone))
    said: list[str] = []
    with pytest.raises(AttributeError, match="moe.experts.layer:joined: .* has no joined of its own"):
        run.main(say=said.append)
    assert said == []
