"""Builds the error for two values of a recipe that do not work together."""

from __future__ import annotations

from collections.abc import Mapping

from moe.recipe.keys import value_of
from moe.recipe.sections import Run
from parallel.errors import BadInput
from parallel.fixes import Fix, Set, any_of, written


def clash(run: Run, key: str, other: str, works: object, why: str = "", *fixes: Fix, needed: str | None = None) -> BadInput:
    """Return the error for the value of `key`, which does not work together with the value of the key `other`.

        clash(run, "tiling.ffn", "optimizer.kind", 1, "K-FAC needs whole matrices", Set("optimizer.kind", "adamw"))
            ->  tiling.ffn: got 2 with optimizer.kind=kfac, needed 1: K-FAC needs whole matrices;
                fix: set tiling.ffn to 1, or optimizer.kind to adamw

    other: a key, or the cause in words. works: a value of `key` that works. fixes: alternatives to setting `key`. needed: the text after
    "needed", instead of `works: why`."""
    cause = other if " " in other else f"{other}={written(value_of(run, other))}"
    got = f"{written(value_of(run, key))} with {cause}"
    return BadInput(key, got=got, needed=needed or f"{written(works)}{f': {why}' if why else ''}", fix=any_of([Set(key, works), *fixes]))


def check_others(run: Run, other: str, works: Mapping[str, tuple[object, str]], *fixes: Fix) -> None:
    """Raise BadInput for the first key with a value that does not work with the key `other`. works: key -> (value that works, why)."""
    for key, (value, why) in works.items():
        if value_of(run, key) != value:
            raise clash(run, key, other, value, why, *fixes)
