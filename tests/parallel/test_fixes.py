"""The text of a Fix names its values, and `apply` sets them in a recipe."""

from __future__ import annotations

from typing import Any

import pytest

from parallel.errors import BadInput
from parallel.fixes import Fix, Nproc, Remove, Rename, Set, Words, all_of, any_of, guess, typed

ZERO = Set("sharding.kind", "zero") & Set("sharding.stage", 1)


@pytest.mark.parametrize(
    ("fix", "words"),
    [
        (Set("it", 1), "set it to 1"),
        (Set("a.b", 1, 2) | Set("c.d", None), "set a.b to one of [1, 2], or c.d to null"),
        (Set("it", 3) | Set("it", False, said="false for now"), "set it to 3, or to false for now"),
        (Set("a.b", ["x", "y"]) | Remove("a.b"), "set a.b to [x, y], or remove a.b"),
        (ZERO | Set("sharding.allow_slow", True), "set sharding.kind to zero and sharding.stage to 1, or sharding.allow_slow to true"),
        (Set("a.b", 2) & Nproc(4) | "add layers", "set a.b to 2, and add --nproc 4, or add layers"),
        ("change it" | Set("a.b", 2), "change it, or set a.b to 2"),
        (Rename("it", "a.b"), "did you mean a.b?"),
        (guess("ring") | Set("a.b", 1), "did you mean ring?, or set a.b to 1"),
        (typed({"a.b": 2, "c.d": None}), "add --a.b 2 --c.d null"),
        (typed({"a.b": ["x", "y"]}), "add --a.b '[x, y]'"),
        (any_of([Set("a.b", 1), Set("a.b", 4, said="4 or more")]), "set a.b to one of [1, 4]"),
        (any_of([Set("a.b", 1), Set("c.d", 4)]), "set a.b to 1, or c.d to 4"),
    ],
)
def test_words_are_made_from_values(fix: Fix, words: str) -> None:
    assert str(fix) == words
    assert str(BadInput("a.b", got=1, needed="2", fix=fix)) == f"a.b: got 1, needed 2; fix: {words}"


@pytest.mark.parametrize(
    ("fix", "made"),
    [
        (Set("it", 5, 6, said="5 or more"), [{"a": {"b": 5, "c": 2}}, {"a": {"b": 6, "c": 2}}]),
        (Remove("it") | Set("x.y", 3), [{"a": {"c": 2}}, {"a": {"b": 1, "c": 2}, "x": {"y": 3}}]),
        (Rename("a", "x"), [{"x": {"b": 1, "c": 2}}]),
        (Set("a.b", 7, 8) & Set("a.c", 9), [{"a": {"b": 7, "c": 9}}, {"a": {"b": 8, "c": 9}}]),
        (typed({"a.b": 7, "a.c": 9}), [{"a": {"b": 7, "c": 9}}]),
        (guess(4) | "check the spelling", [{"a": {"b": 4, "c": 2}}]),
        (Words("check the spelling") & Set("it", 1), []),
        (Nproc(3), [{"a": {"b": 1, "c": 2}}]),
    ],
)
def test_each_way_is_applied_to_nested_values(fix: Fix, made: list[dict[str, Any]]) -> None:
    found = []
    for way in fix.ways("a.b"):
        values: dict[str, Any] = {"a": {"b": 1, "c": 2}}
        way.apply(values)
        found.append(values)
    assert found == made


def test_equal_fixes_are_equal() -> None:
    assert all_of({"a.b": 1, "c.d": 2}) == Set("a.b", 1) & Set("c.d", 2) != Set("a.b", 1) & Set("c.d", 3)
