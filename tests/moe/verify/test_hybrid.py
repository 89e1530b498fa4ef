"""The cases of `moe verify --kinds hybrid`: every legal pair of values occurs in a case, and each call lists the same. No rank runs."""

from __future__ import annotations

import random
from functools import cache
from itertools import combinations, product
from pathlib import Path

import pytest

from moe.checks.together import check_run
from moe.verify import hybrid
from moe.verify.cases import Case
from moe.verify.hybrid import (
    FACTORS,
    WORLD,
    Choice,
    Covering,
    Idle,
    case_of,
    cover,
    covering,
    covering_few,
    described,
    every_pair,
    few_of,
    together,
)
from moe.verify.kinds import KINDS, cases
from parallel.errors import BadInput


@cache
def made() -> Covering:
    return covering()


@cache
def rows_made() -> list[Case]:
    return [case_of(row, world=WORLD) for row in made().rows]


def values_of(case: Case) -> Choice:
    """Return feature -> value of a case, read from its fields."""
    places = {(1, 1): "whole", (2, 1): "ep2", (4, 1): "ep4", (1, 2): "etp2", (2, 2): "ep2 etp2"}
    return {
        "schedule": case.schedule if case.pp == 2 else "none",
        "sequence": case.attention if case.sp > 1 else "none",
        "tensor": case.tensor if case.tp > 1 else "none",
        "dispatch": case.rows if case.ep > 1 else "none",
        "data": case.kind,
        "experts": places[case.ep, case.etp],
        "model": case.model,
        "recompute": case.recompute,
        "precision": case.precision,
    }


def test_every_pair_is_in_a_row_or_refused() -> None:
    rows = [values_of(case) for case in rows_made()]
    met = {pair for row in rows for pair in combinations([(factor, row[factor]) for factor in FACTORS], 2)}
    wanted = {
        ((one, a), (other, b)) for one, other in combinations(FACTORS, 2) for a, b in product(FACTORS[one], FACTORS[other])
    }  # fmt: skip
    assert met == wanted - set(made().refused) and met == set(made().met)
    assert len(rows) >= 100 and len({tuple(row.items()) for row in rows}) == len(rows)


def test_rows_are_legal_and_have_eight_processes() -> None:
    for case in rows_made():
        check_run(case.run(), case.world)
        assert case.world == case.dp * case.pp * case.tp * case.sp == WORLD
        assert case.kind == "ddp" or case.dp * case.sp > 1 or case.tp == WORLD, "sharded states lie on several ranks"


def test_rows_are_the_same_each_time() -> None:
    again = covering.__wrapped__()  # without its cache
    assert again.rows == made().rows and list(again.met.items()) == list(made().met.items())


def test_no_legal_row_contains_a_refused_pair() -> None:
    """A pair is refused if the simplest row with it is refused. Then no other row with it is legal, as random rows show."""
    draw, legal = random.Random(3), 0
    for _ in range(1500):
        row = {factor: draw.choice(values) for factor, values in FACTORS.items()}
        if row["schedule"] != "none" and row["sequence"] != "none" and draw.random() < 0.9:
            row[draw.choice(["schedule", "sequence", "tensor"])] = "none"
        try:
            case = case_of(row, world=WORLD)
            check_run(case.run(), case.world)
        except BadInput:
            continue
        legal += 1
        assert not set(combinations([(factor, row[factor]) for factor in FACTORS], 2)) & set(made().refused), row
    assert legal > 30


def test_only_eight_processes_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of few sequences are legal too, differ from each other, and have micro-batches of one and of three sequences a rank."""
    few = covering_few()
    monkeypatch.setattr(hybrid, "covering", made)
    monkeypatch.setattr(hybrid, "covering_few", lambda: few)
    found = [few_of(row) for row in few.rows]
    assert cases(8, kinds=("hybrid",)) == cases(9, kinds=("hybrid",)) == [*rows_made(), *found]
    assert len({case.in_full for case in found}) == len(found) >= 60
    assert {case.batch // (case.dp * case.microbatches * case.grid.sequences) for case in found} == {1, 3}
    for case in found:
        check_run(case.run(), WORLD)
    assert {case.world for case in cases(4)} == {1, 2, 3, 4}
    page = (Path(__file__).resolve().parents[3] / "docs/use/verify.md").read_text(encoding="utf-8")
    for kind in KINDS:
        assert f"{len(cases(8 if kind in ('tensor', 'hybrid') else 4, kinds=(kind,))):,} " in page[page.index("the kinds have") :], kind
    for words in (f"{len(made().rows)} rows", f"({len(made().met):,} pairs)", f"{len(few.rows)} more", f"({len(few.met):,} pairs)"):
        assert words in page
    for kinds in (("hybrid",), ("data", "hybrid")):
        with pytest.raises(BadInput, match="--nproc: got 4 with --kinds hybrid, needed 8"):
            cases(4, kinds=kinds)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"dispatch": "padded", "experts": "whole"}, "one rank holds every expert"),
        ({"dispatch": "none", "experts": "ep2"}, "needed a dispatcher"),
        ({"dispatch": "hierarchical", "experts": "ep2"}, "one of the two steps"),
    ],
)
def test_a_value_without_effect_raises_idle(values: Choice, reason: str) -> None:
    plain = {factor: values[0] for factor, values in FACTORS.items()} | {"model": "switch"}
    with pytest.raises(Idle, match=reason):
        case_of(plain | values, world=None)


def test_case_of_names_the_number_of_processes_that_a_row_needs() -> None:
    plain = {factor: values[0] for factor, values in FACTORS.items()}
    with pytest.raises(BadInput, match="at least 16 processes"):
        case_of(plain | {"tensor": "3d", "schedule": "1f1b"}, world=WORLD)
    assert case_of(plain | {"tensor": "3d", "schedule": "1f1b"}, world=None).world == 32  # tp 8, pp 2, dp 2


# --- cover ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 4, 2, 5), (6, 2, 3, 3, 2)])
def test_pairs_without_refusals_take_few_rows(sizes: tuple[int, ...]) -> None:
    """All pairs need as many rows as the product of the two largest factors' numbers of values; `cover` takes at most 1.5 times as many."""
    factors = {f"f{n}": tuple(f"v{v}" for v in range(size)) for n, size in enumerate(sizes)}
    found = cover(factors, complete=lambda chosen: {f: values[0] for f, values in factors.items()} | chosen, refuse=lambda _: None)
    met = {pair for row in found.rows for pair in every_pair({factor: (value,) for factor, value in row.items()})}
    assert met == set(every_pair(factors)) and not found.refused
    largest, next_largest = sorted(sizes)[:-3:-1]
    assert largest * next_largest <= len(found.rows) <= 1.5 * largest * next_largest


def test_a_refused_pair_is_in_no_row_and_keeps_its_reason() -> None:
    factors = {"a": ("1", "2"), "b": ("x", "y"), "c": ("p", "q", "r")}

    def refuse(row: Choice) -> BadInput | None:
        return BadInput("b", got="y", needed="x with 2", fix="x") if (row["a"], row["b"]) == ("2", "y") else None

    found = cover(factors, complete=lambda chosen: {f: values[0] for f, values in factors.items()} | chosen, refuse=refuse)
    assert {pair: str(reason) for pair, reason in found.refused.items()} == {(("a", "2"), ("b", "y")): "b: got y, needed x with 2; fix: x"}
    assert set(found.met) == set(every_pair(factors)) - set(found.refused)
    assert "  a 2 x b y: b: needed x with 2" in described(found)


def test_together_joins_pairs_of_the_same_factors_into_lines() -> None:
    pairs = [(("a", a), ("b", b)) for a, b in ("1x", "1y", "2x", "2y", "3x")]
    assert together(pairs) == ["a 1, 2 x b x, y", "a 3 x b x"]
