"""Splits recipe values off a command line: `--section.key value` and `--section.key=value`, in any position."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from parallel.errors import BadInput

_POWER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE]\+?[0-9]{1,2}")


def take_overrides(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return (the other words of a command line, {"section.key": its value as text}). Dashes in a key are read as underscores.
    Raises BadInput for a key without a value, or given twice. `moe.recipe.load.load` checks later whether a key exists."""
    rest: list[str] = []
    overrides: dict[str, str] = {}
    following = iter(enumerate(words))
    for at, word in following:
        name, equals, value = word.partition("=")
        if not name.startswith("--") or "." not in name:
            rest.append(word)
            continue
        key = name[2:].replace("-", "_")
        if not equals:
            if at + 1 == len(words) or words[at + 1].startswith("--"):
                raise BadInput(name, got="no value", needed="a value", fix=f"{name} VALUE, or {name}=VALUE")
            value = next(following)[1]
        if key in overrides:
            raise BadInput(name, got="two values", needed="one value", fix="remove one of the two")
        overrides[key] = value
    return rest, overrides


def whole(value: Any) -> Any:
    """Return 1000 for the text "1e3", and likewise for other whole numbers with an exponent; any other value unchanged."""
    if not isinstance(value, str) or _POWER.fullmatch(value) is None or not float(value).is_integer():
        return value
    return int(float(value))
