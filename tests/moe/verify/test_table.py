"""`moe verify --go_on` continues an interrupted table: rows that passed are kept with their commit, all others are run again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe.verify import table as table_module
from moe.verify import verify
from moe.verify.cases import Case
from moe.verify.expected import NUMBERS
from moe.verify.kinds import KINDS, cases
from moe.verify.table import Table
from parallel.errors import BadInput


def row_of(case: Case, *, passed: bool = True, **more: Any) -> dict[str, Any]:
    named = {"layout": case.layout, "kind": case.kind, "world": case.world, "precision": case.precision, "case": case.in_full}
    return named | dict.fromkeys(NUMBERS, 1e-7) | {"of_bound": None, "passed": passed} | more


def chosen() -> list[Case]:
    """Cases of one and two processes in several precisions, of which the first is listed twice."""
    some = [case for case in cases(2, kinds=("data",)) if case.layout in ("switch dp1 ep1 m1", "switch dp2 ep2 m1")]
    return [*some, some[0]]


def test_in_full_is_unique_for_each_case() -> None:
    every = set(cases(8, kinds=tuple(KINDS)))
    assert (
        len({case.in_full for case in every}) == len(every) > len({(case.layout, case.kind, case.world, case.precision) for case in every})
    )


def test_passed_rows_of_cases_that_are_not_chosen_are_not_dropped(tmp_path: Path) -> None:
    every, file = chosen(), str(tmp_path / "verify.json")
    table = Table(every, file, go_on=False)
    for case in every:
        table.add(case, row_of(case))
    table.write()
    with pytest.raises(
        BadInput,
        match=f"--go_on: got .* with {len(every) - 3} passed rows that are not part of this run, needed a run that includes these rows",
    ):
        Table(every[:3], file, go_on=True)
    assert len(json.loads(Path(file).read_text())["rows"]) == len(every)


def test_rows_that_passed_are_kept_and_all_others_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "EVERY_S", -1.0)  # the file is written after every row
    every, file = chosen(), str(tmp_path / "verify.json")
    worlds = sorted({case.world for case in every})
    first = Table(every, file, go_on=False)
    assert [case for world in worlds for case in first.left(world)] == sorted(every, key=lambda case: case.world) and len(every) > 8
    failed = every[2]
    for case in every[:5]:
        first.add(case, row_of(case, passed=case is not failed))
    there = json.loads(Path(file).read_text())  # without a call of write()
    assert len(there["rows"]) == 5 and there["left"] == len(every) - 5 and there["failed"] == 1
    there["commit"] = "abc"
    Path(file).write_text(json.dumps(there))

    again = Table(every, file, go_on=True)
    left = [case for world in worlds for case in again.left(world)]
    # the case that is listed twice needs another row
    assert again.kept == 4 and failed in left and len(left) == len(every) - 4 and every[0] in left
    assert again.begins("abc").startswith(f"4 rows kept from {file}; ")
    assert "made at abc: they do not test later changes" in again.begins("def")
    for case in left:
        again.add(case, row_of(case))
    assert all(again.left(world) == [] for world in worlds)
    again.write()
    after = json.loads(Path(file).read_text())
    assert [row["layout"] for row in after["rows"]] == [case.layout for case in every]
    assert [row.get("commit") for row in after["rows"]].count("abc") == 4 and after["left"] == after["failed"] == 0


def test_a_finished_table_starts_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, only = str(tmp_path / "verify.json"), "switch dp2 ep2 m1 ddp"
    finished = Table(
        [case for case in cases(2, kinds=("data",)) if only in f"{case.layout} {case.kind} {case.precision}"], file, go_on=False
    )
    for case in list(finished.chosen):
        finished.add(case, row_of(case))
    finished.tolerances["switch bf16"] = {"loss": 0.5}
    finished.write()
    monkeypatch.setattr(verify, "run_world", lambda chosen, world, timeout_s: iter(() if not chosen else pytest.fail("ranks were started")))
    said: list[str] = []
    assert verify.main(nproc=2, kinds="data", only=only, json=file, go_on=True, say=said.append) == 0
    assert said[0].startswith(f"{len(finished.chosen)} rows kept") and f"{len(finished.chosen)} passed, 0 failed" in "\n".join(said)
    assert json.loads(Path(file).read_text())["tolerances"] == {"switch bf16": {"loss": 0.5}}


def test_go_on_without_a_file_runs_all_rows(tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    table = Table(chosen(), str(file), go_on=True)
    assert table.begins("abc") == f"{file} is not there yet: all {len(chosen())} rows are to be made"
    assert len([case for world in (1, 2) for case in table.left(world)]) == len(chosen())


@pytest.mark.parametrize("text", ["{", "[]", '{"verb": "bench fit"}', '{"verb": "verify", "rows": [{}], "tolerances": {}, "commit": ""}'])
def test_go_on_refuses_a_file_that_is_no_table(text: str, tmp_path: Path) -> None:
    file = tmp_path / "verify.json"
    file.write_text(text)
    with pytest.raises(BadInput, match="--go_on: got .*, needed --json FILE with the table that an interrupted run has left; fix: leave"):
        Table(chosen(), str(file), go_on=True)
    with pytest.raises(BadInput, match="--go_on: got no --json, needed .*; fix: --json docs/benchmarks/verify-hybrid.json"):
        Table(chosen(), None, go_on=True)
