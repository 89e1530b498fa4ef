"""Keys of a recipe by their dotted names: every key, its field, its facts, the names that it takes, and its value in a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, reduce
from typing import Any, get_args

from moe.recipe.plugin import Plugin, registered
from moe.recipe.router_spec import RouterSpec
from moe.recipe.section import Alters, Key, Section, choices_of, facts_of, takes_number
from moe.recipe.sections import Run

ABOVE_0 = "above 0"  # in words, the value of a number that switches something on


def known_keys() -> list[str]:
    """Return every dotted key of a recipe, as `section.key`, or `section.inner.key` if a section contains another."""
    return list(_keys())


def field_of(key: str) -> Any:
    """pydantic's description of a dotted key's field; None if there is no such key."""
    return field_at(key.split("."))


def choices(key: str) -> list[str]:
    """Return the names that a key takes, built-in and registered ones; none for a key that takes no names or does not exist."""
    section, _, name = key.partition(".")
    field = field_of(key)
    names = [] if field is None else choices_of(field.annotation)
    if section == "router" and name in RouterSpec.model_fields:
        names = [*names, "preset"] if takes_number(field.annotation) else ["preset", *names]
    return [*names, *registered(key)]


def names_beside_plugins(key: str) -> list[str]:
    """Return the names of a key that also takes a user's own part; none for any other key."""
    field = field_of(key)
    return choices(key) if field is not None and Plugin in get_args(field.annotation) else []


def flat(run: Run) -> dict[str, Any]:
    """Every value of a recipe by its dotted key, in JSON form."""
    values = run.model_dump(mode="json")
    return {key: reduce(lambda held, name: held[name], key.split("."), values) for key in known_keys()}


@cache
def _keys() -> tuple[str, ...]:
    return tuple(_within(Run, ""))


def _within(section: type[Section], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        inner = section_of(field)
        yield from [f"{prefix}{name}"] if inner is None else _within(inner, f"{prefix}{name}.")


def section_of(field: Any) -> type[Section] | None:
    """Return the section class of a field; None if the field is a value."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def field_at(path: Sequence[Any]) -> Any:
    """Return the field at the end of a path of names; None if there is no such field."""
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
    """Return the facts on a key: its own, then the facts that its sections state for all of their keys."""
    path = key.split(".")
    fields = [field_at(path[:n]) for n in range(1, len(path) + 1)]
    held = [facts_of(fields[-1]), *(section.all_keys for field in reversed(fields) if (section := section_of(field)) is not None)]
    alters, outer = next((each.alters for each in held if each.alters is not None), None), held[::-1]
    return Key(alters, tuple(c for each in outer for c in each.of), tuple(c for each in outer for c in each.off_without))


def keys_of(alters: Alters) -> list[str]:
    """Return the keys whose change alters this if a run is resumed."""
    return [key for key in known_keys() if facts(key).alters == alters]


def not_met(run: Run, conditions: Sequence[str]) -> str | None:
    """Return the first of a key's conditions (`Key.of`, `Key.off_without`) that does not hold in this run; None if all hold."""
    return next((condition for condition in conditions if not any(_holds(run, key, names) for key, names in settings(condition))), None)


def settings(condition: str) -> list[tuple[str, list[str]]]:
    """Return the settings of a condition, one of which must hold, each as (key, the values that it may have)."""
    parts = (setting.partition("=") for setting in condition.split(" or "))
    return [(key, names.split("|") if names else _set(key)) for key, _, names in parts]


def in_words(condition: str) -> str:
    """Return "optimizer.kind adamw, kfac or muon" for optimizer.kind=adamw|kfac|muon."""
    listed = ((key, names[:-1], names[-1]) for key, names in settings(condition))
    return " or ".join(f"{key} {', '.join(names)}{' or ' * bool(names)}{last}" for key, names, last in listed)


@cache
def _set(key: str) -> list[str]:
    """Return the values with which a key switches something on: any but null, 0, false and none."""
    annotation = field_at(key.split(".")).annotation
    return [name for name in choices_of(annotation) if name != "none"] or ["true" if annotation is bool else ABOVE_0]


def value_of(run: Run, key: str) -> Any:
    return reduce(getattr, key.split("."), run)


def _holds(run: Run, key: str, names: Sequence[str]) -> bool:
    value = value_of(run, key)
    return bool(value) if names[0] in (ABOVE_0, "true") else str(value) in names
