"""The fix that an error message names, as an object: set, remove or rename a key, or start with other flags. Programs can apply it to a
recipe.

    Set("degrees.tp", 1, 2) | Set("model.num_heads", 8)               set degrees.tp to one of [1, 2], or model.num_heads to 8
    Set("sharding.kind", "zero") & Set("sharding.stage", 1)           set sharding.kind to zero and sharding.stage to 1
    Set("it", None, said="null, for a cut by FLOPs") | Remove("it")   set it to null, for a cut by FLOPs, or remove it
    Nproc(2) | "add layers"                                           add --nproc 2, or add layers

"it" is the key that the error is about. A fix that is only a text ("check the spelling") changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, product
from operator import and_, or_
from shlex import quote
from typing import Any

IT = "it"


class Fix:
    """A change of a recipe or command line. `a | b`: alternatives. `a & b`: changes that only help together. str(fix): the fix in words."""

    @property
    def alternatives(self) -> tuple[Fix, ...]:
        return (self,)

    @property
    def parts(self) -> tuple[Fix, ...]:
        """Return the changes of single keys of which this fix consists, in the order in which they are applied."""
        return (self,)

    def ways(self, what: str) -> list[Fix]:
        """Return the alternatives that can be applied: two for `Set(key, 1, 2)`, none for a text. what: the key that "it" stands for."""
        return []

    def apply(self, values: dict[str, Any]) -> None:  # noqa: B027
        """Apply this fix, which must be one of the results of `ways`, to a recipe's nested dicts in place."""

    def __or__(self, other: Fix | str) -> Fix:
        return Either((*self.alternatives, *fix_of(other).alternatives))

    def __ror__(self, text: str) -> Fix:
        return Words(text) | self

    def __and__(self, other: Fix) -> Fix:
        return Both((*self.parts, *other.parts))


@dataclass(init=False)
class Set(Fix):
    """Set a key to a value, or to any one of several values. `said`: words printed instead of the list of values, such as "4 or less"."""

    key: str
    values: tuple[Any, ...]
    said: str

    def __init__(self, key: str, *values: Any, said: str = "") -> None:
        self.key, self.values, self.said = key, values, said

    def __str__(self) -> str:
        one_of = "one of " * (len(self.values) > 1)
        return f"set {self.key} to {self.said or one_of + written(self.values if one_of else self.values[0])}"

    def ways(self, what: str) -> list[Fix]:
        return [Set(what if self.key == IT else self.key, value) for value in self.values]

    def apply(self, values: dict[str, Any]) -> None:
        put(values, self.key, self.values[0])


@dataclass(frozen=True)
class Remove(Fix):
    """Remove a key, which then has its default."""

    key: str

    def __str__(self) -> str:
        return f"remove {self.key}"

    def ways(self, what: str) -> list[Fix]:
        return [Remove(what if self.key == IT else self.key)]

    def apply(self, values: dict[str, Any]) -> None:
        take(values, self.key)


@dataclass(frozen=True)
class Rename(Fix):
    """Move the value of the key or section `key` to the name `new`."""

    key: str
    new: str

    def __str__(self) -> str:
        return f"did you mean {self.new}?"

    def ways(self, what: str) -> list[Fix]:
        return [Rename(what if self.key == IT else self.key, self.new)]

    def apply(self, values: dict[str, Any]) -> None:
        value, held = take(values, self.key), values.get(self.new)
        put(values, self.new, held | value if isinstance(value, dict) and isinstance(held, dict) else value)


@dataclass(frozen=True)
class Nproc(Fix):
    """Start `number` processes."""

    number: int

    def __str__(self) -> str:
        return f"add --nproc {self.number}"

    def ways(self, what: str) -> list[Fix]:
        return [self]


@dataclass(frozen=True)
class Words(Fix):
    """A fix in free text ("check the spelling"). change: what it means as another fix ("did you mean 1f1b?" sets a key); None: nothing."""

    text: str
    change: Fix | None = None

    def __str__(self) -> str:
        return self.text

    def ways(self, what: str) -> list[Fix]:
        return [] if self.change is None else self.change.ways(what)


@dataclass(frozen=True)
class Both(Fix):
    """Changes that only help if all of them are applied, written `a & b`."""

    changes: tuple[Fix, ...]

    @property
    def parts(self) -> tuple[Fix, ...]:
        return self.changes

    def __str__(self) -> str:
        return _joined(self.changes, " and " if all(isinstance(each, Set) for each in self.changes) else ", and ")

    def ways(self, what: str) -> list[Fix]:
        return [reduce(and_, each) for each in product(*(change.ways(what) for change in self.changes))]

    def apply(self, values: dict[str, Any]) -> None:
        for change in self.changes:
            change.apply(values)


@dataclass(frozen=True)
class Either(Fix):
    """Alternatives, of which one is enough, written `a | b`."""

    fixes: tuple[Fix, ...]

    @property
    def alternatives(self) -> tuple[Fix, ...]:
        return self.fixes

    def __str__(self) -> str:
        return _joined(self.fixes, ", or ")

    def ways(self, what: str) -> list[Fix]:
        return [way for fix in self.fixes for way in fix.ways(what)]


def fix_of(fix: Fix | str) -> Fix:
    """Return `fix` as a Fix: a text becomes Words, which change no key."""
    return Words(fix) if isinstance(fix, str) else fix


def guess(value: Any) -> Fix:
    """Return the fix of a misspelled value: "did you mean 1f1b?"."""
    return Words(f"did you mean {value}?", Set(IT, value))


def all_of(values: Mapping[str, Any]) -> Fix:
    """Return the fix that sets several keys. values: key -> its value."""
    return Both(tuple(Set(key, value) for key, value in values.items()))


def typed(values: Mapping[str, Any]) -> Fix:
    """Return the fix that sets several keys, printed as flags quoted for a shell: "add --degrees.tp 2 --tensor.kind 1d". values: key ->
    its value."""
    return Words(f"add {' '.join(f'--{key} {quote(written(value))}' for key, value in values.items())}", all_of(values))


def any_of(fixes: Iterable[Fix | str]) -> Fix:
    """Return the fixes as alternatives. Fixes that all set the same key become one Set with several values."""
    found = [fix_of(fix) for fix in fixes]
    sets = [fix for fix in found if isinstance(fix, Set)]
    if 1 < len(sets) == len(found) and len({fix.key for fix in sets}) == 1:
        return Set(sets[0].key, *(value for fix in sets for value in fix.values))
    return reduce(or_, found)


def put(values: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted key `key` ("degrees.tp") to `value` in the nested dicts `values`. Dicts that are missing on the way are made."""
    *outer, last = key.split(".")
    for name in outer:
        if not isinstance(values.get(name), dict):
            values[name] = {}
        values = values[name]
    values[last] = value


def take(values: dict[str, Any], key: str) -> Any:
    """Remove the dotted key `key` from the nested dicts `values`. Return its value, or None if the key does not exist."""
    *outer, last = key.split(".")
    for name in outer:
        values = values.get(name) or {}
    return values.pop(last, None)


def _joined(fixes: Sequence[Fix], word: str) -> str:
    """Return the texts of several fixes, joined by `word`. The word "set" and an equal key are not repeated from one fix to the next."""
    texts = [str(fixes[0])]
    for before, fix in pairwise(fixes):
        last, first, text = before.parts[-1], fix.parts[0], str(fix)
        if isinstance(last, Set) and isinstance(first, Set):
            text = text.removeprefix("set ").removeprefix(f"{last.key} ")
        texts.append(text)
    return word.join(texts)


def written(value: Any) -> str:
    """Return a value as text in the form in which a recipe writes it."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(written, value))}]"
    return value if isinstance(value, str) else json.dumps(value, default=str)
