"""docs/parallel/combinations.md is up to date, and each refusal on it has a reason."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from moe.recipe.load import build_run
from moe.verify.hybrid import FACTORS, Pair, every_pair
from parallel.errors import BadInput
from tests.laws import combinations
from tests.laws.combinations import Judged, judge_pairs, main, page
from tests.laws.refusals import ELSEWHERE, WHY, reason_of, refusals, site_of, sites
from tests.support.verdict import verdict

PAGE = Path(__file__).resolve().parents[2] / "docs/parallel/combinations.md"
SHARDING = ("fsdp", "zero2", "zero3")


@cache
def table() -> dict[Pair, Judged]:
    return judge_pairs()


@cache
def refused() -> dict[Pair, BadInput]:
    return refusals()


def test_every_reason_on_the_page_is_of_a_refusal() -> None:
    assert [words for words in WHY if not any(words in reason.needed for reason in refused().values())] == []
    assert all(len(reason_of(reason).split()) > 1 for reason in refused().values()), "a value alone is no reason"


def test_every_refusal_of_two_values_in_the_checks_is_on_the_page() -> None:
    """A new `clash` or `check_others` needs a pair in KEYS or WITH that reaches it, or an entry of ELSEWHERE."""
    reached = {site_of(reason) for reason in refused().values()}
    lacking = {function for site, function in sites().items() if site not in reached}
    assert lacking == set(ELSEWHERE)


def test_the_page_is_what_the_code_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(table(), refused()), (
        "python -m tests.laws.combinations --out docs/parallel/combinations.md"
    )


def test_every_pair_is_judged_once() -> None:
    assert list(table()) == list(every_pair(FACTORS))
    assert {judged.status for judged in table().values()} == {"runs", "not recommended", "refused", "no effect"}
    assert all(bool(judged.reasons) == (judged.status != "runs") for judged in table().values())


def status(one: str, a: str, other: str, b: str) -> str:
    return table()[(one, a), (other, b)].status


@pytest.mark.parametrize("schedule", FACTORS["schedule"][1:])
def test_engines_that_scatter_are_not_recommended_beside_stages(schedule: str) -> None:
    """Sharded engines are refused next to continuous schedules (stages update at different times). Next to other schedules they are not
    recommended, because by default they scatter after each micro-batch."""
    streams = schedule in ("pipedream", "two_bw")
    assert {status("schedule", schedule, "data", kind) for kind in SHARDING} == {"refused" if streams else "not recommended"}
    assert status("schedule", schedule, "data", "ddp") == "runs"
    assert status("schedule", schedule, "data", "zero1") == status("schedule", schedule, "precision", "fp16")
    assert status("schedule", schedule, "precision", "fp16") == ("refused" if streams else "runs")


def test_dense_models_have_nothing_to_spread() -> None:
    assert {status("experts", places, "model", "dense") for places in FACTORS["experts"][1:]} == {"refused"}
    assert {status("dispatch", rows, "model", "dense") for rows in FACTORS["dispatch"][1:]} == {"refused"}


def test_tensor_parallelism_goes_with_everything_else() -> None:
    for (one, other), judged in table().items():
        if "tensor" in (one[0], other[0]):
            assert judged.status == "runs", (one, other, judged)


def test_what_is_not_recommended_says_what_is_better_and_runs() -> None:
    reasons = {reason for judged in table().values() if judged.status == "not recommended" for reason in judged.reasons}
    assert reasons and all("; better: " in reason for reason in reasons)
    for fixed in (
        {"sharding": {"kind": "zero", "stage": 1}},
        {"sharding": {"kind": "ddp"}},
        {"sharding": {"kind": "fsdp", "reshard": False}},
    ):
        run = build_run({"degrees": {"pp": 2, "dp": 2}, "pipeline": {"microbatches": 4}, **fixed})
        assert verdict(run, 4).status == "runs"
    slow = {"degrees": {"pp": 2, "dp": 2}, "pipeline": {"microbatches": 4}, "sharding": {"kind": "fsdp", "allow_slow": True}}
    assert verdict(build_run(slow), 4).status == "not recommended"
    slow["sharding"] = {"kind": "fsdp"}
    assert verdict(build_run(slow), 4).status == "refused"


def test_keeping_attention_ends_the_advice_to_keep_it() -> None:
    values = {"model": {"max_length": 16}, "degrees": {"sp": 2, "dp": 1}, "recompute": {"kind": "full"}}
    said = verdict(build_run(values), 2)
    assert said.status == "not recommended" and "sequence.keep_attention true" in said.advice[0]
    assert verdict(build_run(values | {"sequence": {"keep_attention": True}}), 2).status == "runs"


def test_rows_and_page_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combinations, "judge_pairs", table)
    monkeypatch.setattr(combinations, "refusals", refused)
    assert main(out=tmp_path / "page.md", json=tmp_path / "rows.json") == 0
    assert (tmp_path / "page.md").read_text() == page(table(), refused()) and capsys.readouterr().out == ""
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    ours = [row for row in rows if row["system"] == "moe-parallel"]
    assert len(ours) == len(table()) and {row["status"] for row in ours} == {judged.status for judged in table().values()}
    assert len(rows) == len(ours) + len(refused())
    with pytest.raises(BadInput, match=re.escape("--out: got")):
        main(out=tmp_path / "page.md" / "page.md")
