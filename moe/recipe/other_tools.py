"""Uses the tables of other_names.py to find the key or flag of moe that another tool's name means.

An unknown name is first looked up in these tables, and only then compared with similar names of keys: `hidden_size` is similar to head_size
but means d_model. A name that differs little from one in the tables (n_embed for n_embd) is read as that name.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from pydantic import ValidationError

from moe.recipe.keys import choices, field_at, field_of, known_keys, section_of
from moe.recipe.other_names import FLAGS, KEYS, NEEDLESS, OTHER_UNITS, OWN_FLAGS, SWITCHES, VERB_OF, WITH_OTHERS, WORDS
from moe.recipe.section import takes_number
from parallel import yaml_text
from parallel.fixes import Fix, Remove, Rename, Words, all_of, written

_SIMILAR = 0.85  # smallest similarity (difflib's ratio) at which an unknown name counts as a misspelling of another tool's name
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True)
class Meant:
    """The counterpart in moe of another tool's setting. One of the four fields is set.
    keys: a recipe's keys with their values. unit: a text "KEY, its unit or possible values" for a key that needs another value than the
    other tool's, for example "train.global_batch, in sequences". flag: a flag of `moe`. needless: why no key is needed."""

    keys: dict[str, Any] = field(default_factory=dict)
    unit: str | None = None
    flag: str | None = None
    needless: str | None = None

    @property
    def named(self) -> list[str]:
        """Return the keys that the fix names."""
        return list(self.keys) if self.unit is None else [self.unit.partition(",")[0]]

    def fix(self, value: Any, *, typed: bool) -> Fix:
        """Return the fix for a recipe that has the other tool's key (such as hidden_size) with this value. The fix names keys of a recipe
        file or, if `typed`, flags of a command line."""
        if self.flag is not None:
            return Words(f"remove it, and give moe {VERB_OF.get(self.flag, 'train')} {self.flag}", Remove("it"))
        if self.unit is not None:
            return Words(f"did you mean {'--' * typed}{self.unit}?")
        keys = {key: of if _accepted(key, of) else None for key, of in self.keys.items()}
        if not keys:
            return Words(f"remove it ({self.needless})", Remove("it")) if self.needless else Remove("it")
        if list(keys.values()) == [value] and not typed:
            return Rename("it", next(iter(keys)))
        flags = " ".join(f"--{key} {_typed(of)}" for key, of in keys.items())
        lines = " and ".join(f"{key}: {'VALUE' if of is None else written(of)}" for key, of in keys.items())
        change = None if None in keys.values() else Remove("it") & all_of({key: _value(of) for key, of in keys.items()})
        return Words(f"did you mean {flags if typed else lines}?", change)


def meant_by(name: str, value: Any = None, *, flags: Sequence[str] = ()) -> Meant | None:
    """Return the meaning of another tool's name with this value; None for an unknown name. flags: flags of the `moe` verb that
    was given the name, such as --out; (): a recipe file has the name."""
    word = name.lower().replace("-", "_")
    if word in OWN_FLAGS and not flags:
        return Meant(flag=f"--{word}")
    rows = _table().get(_nearest(word, tuple(flags)), [])
    if (flag := next((here for kind, here in rows if kind == "flag" and here in flags), None)) is not None:
        return Meant(flag=flag)
    kind, here = next((row for row in rows if row[0] != "flag"), rows[0] if rows else ("", ""))
    if kind == "key":
        ours = in_our_words(here, value)
        names = [] if takes_number(field_of(here).annotation) else choices(here)
        unknown = names and isinstance(ours, str) and ours not in (*names, "[]")
        return Meant(unit=f"{here}, one of {', '.join(names)}") if unknown else Meant({here: ours})
    if kind == "switch":
        return Meant(needless="it is off without a key") if str(value).lower() in _FALSE else Meant(_pairs(here))
    if kind == "others":
        return Meant({key: in_our_words(key, value) if of == "{}" else of for key, of in _pairs(here).items()})
    return {"unit": Meant(unit=here), "needless": Meant(needless=here), "flag": Meant(flag=here)}.get(kind)


def in_our_words(key: str, value: Any) -> Any:
    """Translate another tool's value of a key to a recipe's value by WORDS. A word that WORDS[key] lacks is put into lower case. All other
    values, and values of keys that WORDS lacks, stay unchanged."""
    if key not in WORDS or not isinstance(value, str | int):
        return value
    lower = str(value).lower()
    return WORDS[key].get(lower, lower if isinstance(value, str) and re.fullmatch(r"\w+", value) else value)


@cache
def _nearest(word: str, flags: tuple[str, ...]) -> str:
    """Return the name in the tables that `word` means: `word` itself, or the most similar name. Return "" if no name is similar, or if a
    key or flag of moe is more similar. A word with a dot is only looked up: as it is, then with _ for the dot (checkpoint.every:
    checkpoint_every) unless a recipe has a key or section with the name before the dot. If it is not found, it is returned unchanged."""
    joined = word.replace(".", "_")
    if word in _table() or "." in word:
        return joined if word not in _table() and joined in _table() and field_at(word.split(".")[:1]) is None else word
    own = {key.rpartition(".")[2] for key in known_keys()} | {flag[2:] for flag in flags}
    near = next(iter(difflib.get_close_matches(word, [*_table(), *own], n=1, cutoff=_SIMILAR)), "")
    return "" if near in own else near


@cache
def _table() -> dict[str, list[tuple[str, str]]]:
    """Return name in another tool -> its rows in other_names.py: (kind of table, what the name corresponds to: a key, settings, ...)."""
    table: dict[str, list[tuple[str, str]]] = {}
    tables = {"key": KEYS, "switch": SWITCHES, "others": WITH_OTHERS, "unit": OTHER_UNITS, "needless": NEEDLESS, "flag": FLAGS}
    for kind, rows in tables.items():
        for here, names in rows.items():
            for name in names.split():
                table.setdefault(name.partition("=")[0], []).append((kind, here))
    return table


def _pairs(here: str) -> dict[str, Any]:
    """Return {"a": "1", "b": "2"} for the settings "a=1 b=2"."""
    return {key: of for key, _, of in (pair.partition("=") for pair in here.split())}


def _accepted(key: str, value: Any) -> bool:
    """Return whether the recipe's section accepts this value of `key`. Return False if no section has this key."""
    outer, _, name = key.rpartition(".")
    section = section_of(field_at(outer.split("."))) if outer and field_of(key) is not None else None
    try:
        return section is not None and section.model_validate({name: _value(value)}) is not None
    except ValidationError as error:
        return all(each["loc"][:1] != (name,) for each in error.errors())


def _value(of: Any) -> Any:
    try:
        return yaml_text.load(of) if isinstance(of, str) else of
    except yaml_text.NOT_YAML:
        return of


def _typed(value: Any) -> str:
    return "VALUE" if value is None else shlex.quote(written(value).replace(", ", ","))
