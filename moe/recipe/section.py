"""The base of all sections of a recipe, and of their keys (this file needs no torch).

    beta1: float = key(0.9, "of momentum", ge=0, lt=1, alters="training", of="optimizer.kind=adamw|kfac|muon")

The field of a key has all of its properties: type, default, meaning, bounds, what a change alters in a resumed run, and the
setting without which nothing reads it. A section may state the last two for all of its keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from moe.recipe.overrides import whole
from moe.recipe.plugin import GROUPS, by_name, is_plugin
from parallel.errors import harmless

_LARGEST = 2**40
_OCTAL = re.compile(r"\s*[-+]?0[0-9_]+\s*")  # refused: 010 is 8 to YAML and C, 10 to Python
OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)  # a name alone is read as a list of one name


# what a change of a key alters in a resumed run:
# shape      decides names and shapes of parameters: a checkpoint that does not fit is refused, with the parameter
# function   the same shapes, but another function: a trained model would compute something else than it was trained for
# training   how training continues: its text, batches, optimizer, losses, drops, noise, dtypes
# cost       speed, memory, layout, checkpoints and records: the same losses, to rounding
# name       replaced by other keys, which are compared instead
Alters = Literal["shape", "function", "training", "cost", "name"]
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Key:
    """Properties of a key in addition to its type, bounds and description.

    `alters`: what a change alters if a run is resumed; None: as its section says. "Function" is the model's output for a text in
    evaluation, so a training capacity is training, and an evaluation capacity function.
    `of`: conditions that must all hold, or nothing reads the key, and any value but the default is refused. A condition is
    `key=value|value`, or `key` for any value but null, 0, false and none, or several of these joined by `or`.
    `off_without`: such conditions for a whole part of a recipe. If one does not hold, a parent's values may stay (moe/recipe/idle.py).
    """

    alters: Alters | None = None
    of: tuple[str, ...] = ()
    off_without: tuple[str, ...] = ()

    @staticmethod
    def made(alters: Alters | None, of: str | None, off_without: str | None) -> Key:
        return Key(alters, () if of is None else (of,), () if off_without is None else (off_without,))


def key(
    default: _Value,
    description: str | None = None,
    *,
    gt: float | None = None,
    ge: float | None = None,
    lt: float | None = None,
    le: float | None = None,
    alters: Alters | None = None,
    of: str | None = None,
    off_without: str | None = None,
) -> _Value:
    """Return the field of a section's key: its default, meaning, bounds, and what `Key` has."""
    extra: Any = {"key": Key.made(alters, of, off_without)}
    return Field(default, description=description, gt=gt, ge=ge, lt=lt, le=le, json_schema_extra=extra)


def facts_of(field: FieldInfo) -> Key:
    """Return the Key of a field; an empty one for a field without `key`."""
    held: Any = field.json_schema_extra
    return held["key"] if isinstance(held, dict) and "key" in held else Key()


def choices_of(annotation: Any) -> list[str]:
    """Return the names that a field of this type takes."""
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    return [c for a in get_args(annotation) for c in choices_of(a)]


def takes_number(annotation: Any) -> bool:
    """Return whether a value of this type may be a number."""
    return annotation in (int, float) or any(takes_number(a) for a in get_args(annotation))


class Section(BaseModel):
    """A group of keys. `class Muon(Section, alters="training", of="optimizer.kind=muon")` states this for all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    all_keys: ClassVar[Key] = Key()
    gone: ClassVar[dict[str, Any]] = {}  # keys of earlier versions that no longer exist -> the value that is built in now

    def __init_subclass__(
        cls,
        *,
        alters: Alters | None = None,
        of: str | None = None,
        off_without: str | None = None,
        gone: dict[str, Any] | None = None,
        **rest: Any,
    ) -> None:
        super().__init_subclass__(**rest)
        cls.gone = gone or {}
        if alters is not None:  # otherwise the subclass has its parent's
            cls.all_keys = Key.made(alters, of, off_without)

    @model_validator(mode="before")
    @classmethod
    def _without_gone(cls, values: Any) -> Any:
        """Drop keys that no longer exist, with their built-in values: recipes and checkpoints of earlier versions have them."""
        if not cls.gone or not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in cls.gone or value not in (cls.gone[key], str(cls.gone[key]))}

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Raise ValueError for some values that pydantic would accept: true for a number (`steps: yes` would be 1), or numbers so large
        that checks would not end.
        """
        kind = cls.model_fields[str(info.field_name)].annotation
        if takes_number(kind) and float not in (kind, *get_args(kind)):
            value = [whole(each) for each in value] if isinstance(value, list) else whole(value)
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool) and kind is not bool:
                raise ValueError("a number or a name, not true or false")
            if isinstance(number, int) and abs(number) > _LARGEST:
                raise ValueError(f"at most {_LARGEST}")
            if isinstance(number, str) and takes_number(kind) and _OCTAL.fullmatch(number):
                raise ValueError("a number without zeros before it, which some read as octal")
            if isinstance(number, str) and not harmless(number):
                raise ValueError("text without control characters")
            if number == "":
                raise ValueError("text, or null: an empty one may come from a shell variable that is not set")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _registered(cls, value: Any, info: ValidationInfo) -> Any:
        """Replace a name that is not built in by the part that an installed package registers under it."""
        key = f"{cls.__name__.lower()}.{info.field_name}"
        if key not in GROUPS or not isinstance(value, str) or is_plugin(value):
            return value
        return value if value in choices_of(cls.model_fields[str(info.field_name)].annotation) else by_name(key, value)

    @field_validator("*", mode="after")
    @classmethod
    def _in_32_bits(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not 2.0**-126 <= abs(value) < 2.0**128:
            raise ValueError("a number that 32 bits hold, as weights do")
        return value
