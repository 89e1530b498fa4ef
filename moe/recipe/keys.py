"""Looks up a recipe's key by its dotted name, such as "model.rope.base": its field, choices, conditions, and value in a run."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache, reduce
from typing import Any, get_args, get_origin

from moe.recipe.plugin import WORDS, Plugin, registered
from moe.recipe.router_spec import RouterSpec
from moe.recipe.section import Alters, Key, Section, TokenizerFile, choices_of, facts_of, takes_number
from moe.recipe.sections import Run
from parallel.errors import BadInput, did_you_mean, some

ALL = "all"  # in `moe show --keys all`: every section
ABOVE_0 = "above 0"  # in `settings`: stands for the values of a numeric key that switch a feature on, which are all but 0 and null


@cache
def known_keys() -> tuple[str, ...]:
    """Return every dotted key of a recipe, as `section.key`, or `section.inner.key` if a section contains another."""
    return tuple(_within(Run, ""))


def keys_named(name: str, value: Any = None) -> list[str]:
    """Return the keys whose last part is `name`. Keys that accept `value` as a choice come first; among equals, keys of outer sections come
    first."""
    found = [key for key in known_keys() if key.rpartition(".")[2] == name]
    return sorted(found, key=lambda key: (value not in choices(key), key.count(".")))


def field_of(key: str) -> Any:
    """Return pydantic's FieldInfo of a dotted key; None if there is no such key."""
    return field_at(key.split("."))


def choices(key: str) -> list[str]:
    """Return the names that a key accepts as values: built-in names, then names registered by packages. [] if it accepts no names."""
    section, _, name = key.partition(".")
    field = field_of(key)
    names = [] if field is None else choices_of(field.annotation)
    if section == "router" and name in RouterSpec.model_fields:
        names = [*names, "preset"] if takes_number(field.annotation) else ["preset", *names]
    return [*names, *registered(key)]


def further_values(field: Any) -> list[str]:
    """Return descriptions of the values that a field accepts in addition to `choices`: a plugin, a tokenizer's file. [] for None."""
    kinds = {Plugin: WORDS, TokenizerFile: "FILE.json, a tokenizer.json"}
    return [words for kind, words in kinds.items() if field is not None and kind in get_args(field.annotation)]


def flat(run: Run) -> dict[str, Any]:
    """Return dotted key -> value, in JSON's types, for every key of a recipe."""
    values = run.model_dump(mode="json")
    return {key: reduce(lambda held, name: held[name], key.split("."), values) for key in known_keys()}


def _within(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field)
        yield from [f"{prefix}{name}"] if inner is None else _within(inner, f"{prefix}{name}.")


def section_of(field: Any) -> type[Section] | None:
    """Return the class of a field that holds a section; None for a field that holds a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def field_at(path: Sequence[Any]) -> Any:
    """Return the field at the end of a path of names, such as (model, rope, base); None if there is no such field."""
    section: type[Section] | None = Run
    field = None
    for name in path:
        field = None if section is None else section.model_fields.get(str(name))
        if field is None:
            return None
        section = section_of(field)
    return field


@cache
def facts(key: str) -> Key:
    """Return a key's `Key`, merged with the `Key`s of the sections that contain it: all conditions, and the innermost `alters`
    (what a change of the key alters in a resumed run)."""
    path = key.split(".")
    sections = [section for n in range(1, len(path)) if (section := section_of(field_at(path[:n]))) is not None]
    held = [*(section.all_keys for section in sections), facts_of(field_of(key))]
    alters = next((each.alters for each in reversed(held) if each.alters is not None), None)
    return Key(alters, tuple(c for each in held for c in each.of), tuple(c for each in held for c in each.off_without))


def keys_of(alters: Alters) -> list[str]:
    """Return the keys with this value of `Key.alters`, such as "function"."""
    return [key for key in known_keys() if facts(key).alters == alters]


def not_met(run: Run, conditions: Sequence[str]) -> str | None:
    """Return the first of these conditions (from `Key.of` or `Key.off_without`) that the run does not meet; None if it meets all."""
    return next((condition for condition in conditions if not any(_holds(run, *setting) for setting in settings(condition))), None)


def settings(condition: str) -> list[tuple[str, list[str]]]:
    """Split a condition such as `a=x|*.y or b` into its alternatives, each as (key, values of the key that meet the condition). `*.y`: each
    value that ends in .y."""
    parts = (setting.partition("=") for setting in condition.split(" or "))
    return [(key, names.split("|") if names else _values_that_switch_on(key)) for key, _, names in parts]


def in_words(condition: str) -> str:
    """Return "optimizer.kind adamw, kfac or muon" for optimizer.kind=adamw|kfac|muon."""
    listed = ((key, names[:-1], names[-1]) for key, names in settings(condition))
    return " or ".join(f"{key} {', '.join(names)}{' or ' * bool(names)}{last}" for key, names, last in listed)


@cache
def _values_that_switch_on(key: str) -> list[str]:
    """Return the values that meet a condition without `=` (only the key): all but null, 0, false and none."""
    annotation = field_of(key).annotation
    return [name for name in choices_of(annotation) if name != "none"] or ["true" if annotation is bool else ABOVE_0]


def value_of(run: Run, key: str) -> Any:
    return reduce(getattr, key.split("."), run)


def _holds(run: Run, key: str, names: Sequence[str]) -> bool:
    value = value_of(run, key)
    if names[0] in (ABOVE_0, "true"):
        return bool(value)
    said = "null" if value is None else str(value)
    return said in names or any(name.startswith("*") and said.endswith(name[1:]) for name in names)


# --- moe show --keys SECTION -----------------------------------------------------------------------------------------------

_WIDTH = 110
_RESUMED: dict[str | None, str] = {
    "shape": "cannot be changed when a run is resumed",
    "function": "a resumed run needs --allow-change for it",
}
_INDENT: dict[str, Any] = {"initial_indent": "    ", "subsequent_indent": "      "}


def keys_of_section(section: str, run: Run | None) -> list[str]:
    """Return lines of text on each key of a section (model, model.rope, ... or all): its value in `run` or its default, choices, meaning.
    Raises BadInput for a section that does not exist."""
    name = section.replace("-", "_")
    keys = [key for key in known_keys() if name == ALL or key.startswith(f"{name}.") or key == name]
    if not keys:
        near = did_you_mean(name, Run.model_fields)
        fix = f"did you mean {near}?" if near else f"moe show --keys {ALL}"
        needed = f"a section of a recipe: {some(Run.model_fields, rest=f'moe show --keys {ALL}')}"
        raise BadInput("--keys", got=section, needed=needed, fix=fix)
    values = flat(run or Run())
    return [line for key in keys for line in _lines(key, values[key])]


def _lines(key: str, value: Any) -> list[str]:
    field, names = field_of(key), choices(key)
    kinds = [*names, "a number"] if names and takes_number(field.annotation) else names
    kinds = [*kinds, *further_values(field), *(["text"] if names and str in get_args(field.annotation) else [])]
    notes = [f"{'any' if get_origin(field.annotation) in (list, tuple) else 'one'} of {', '.join(kinds)}"] if kinds else []
    notes += [field.description] if field.description else []
    own = facts_of(field)
    notes += [f"read only with {in_words(condition)}" for condition in (*own.of, *own.off_without)]
    notes += [_RESUMED[alters]] if (alters := facts(key).alters) in _RESUMED else []
    return [f"{key}: {json.dumps(value)}", *(line for text in notes for line in textwrap.wrap(text, _WIDTH, **_INDENT))]
