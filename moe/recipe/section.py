"""The base class of a recipe's sections, and `key`, which declares one of their keys.

    beta1: float = key(0.9, "decay rate of the momentum", ge=0, lt=1, alters="training", of="optimizer.kind=adamw|kfac|muon")

The declaration has all properties of the key: type, default, meaning, bounds, what a change alters in a resumed run, and the condition
under which the key is read. A section may state the last two for all of its keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo

from moe.recipe.overrides import whole
from moe.recipe.plugin import GROUPS, by_name, is_plugin
from parallel.errors import harmless

_LARGEST = 2**40  # largest absolute value of an integer in a recipe
_OCTAL = re.compile(r"\s*[-+]?0[0-9_]+\s*")  # 010 is refused, because YAML 1.1 and C read it as 8
# reads a name, or names with commas between them, as a list
OneOrMore = BeforeValidator(lambda value: tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else value)

TokenizerFile = Annotated[str, Field(pattern=r"\.json$", max_length=4096)]  # a path


Alters = Literal["shape", "function", "training", "cost", "name"]  # explained in `Key`
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Key:
    """Properties of a key in addition to its type, bounds and description.

    alters: what a change of the key alters in a resumed run. None: the section's value applies.
        "shape"     parameters' names or shapes: a checkpoint that does not fit is refused
        "function"  the model's output in evaluation, with parameters of the same shapes: refused unless --allow-change permits it
        "training"  how training continues: data, optimizer, losses, dropping, noise, dtypes
        "cost"      speed, memory, layout, checkpoints or records: losses stay equal up to rounding
        "name"      the values of other keys (router.preset): these other keys are compared instead
    of: conditions under which the key is read. If one is not met, every value but the default is refused. A condition is `key=value|value`,
        or `key` (any value but null, 0, false and none), or several of these joined by `or`.
    off_without: conditions of the same form. If one is not met, a value that the user sets is refused, but one from a parent recipe may
    stay (moe/recipe/idle.py).
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
    """Declare a key of a section: return its pydantic field, which holds the default, the description, the bounds (gt: greater than, le: at
    most, and so on) and a `Key` with alters, of and off_without."""
    extra: Any = {"key": Key.made(alters, of, off_without)}
    return Field(default, description=description, gt=gt, ge=ge, lt=lt, le=le, json_schema_extra=extra)


def facts_of(field: FieldInfo) -> Key:
    """Return the Key of a field; an empty Key for a field that was declared without `key`."""
    held: Any = field.json_schema_extra
    return held["key"] if isinstance(held, dict) and "key" in held else Key()


def choices_of(annotation: Any) -> list[str]:
    """Return the names that a field of this type accepts: the strings in the type's Literals."""
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    return [c for a in get_args(annotation) for c in choices_of(a)]


def takes_number(annotation: Any) -> bool:
    """Return whether a field of this type accepts numbers."""
    return annotation in (int, float) or any(takes_number(a) for a in get_args(annotation))


class Section(BaseModel):
    """A section of a recipe. `class Muon(Section, alters="training", of="optimizer.kind=muon")` gives all keys of
    Muon these properties (see `Key`). A key's own `alters` replaces the section's; its own `of` is a further condition."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
    all_keys: ClassVar[Key] = Key()  # properties that apply to every key of the section
    gone: ClassVar[dict[str, Any]] = {}  # removed key of an earlier version -> the value that is always used now

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
        if alters is not None:  # otherwise the class inherits its parent's all_keys
            cls.all_keys = Key.made(alters, of, off_without)

    @model_validator(mode="before")
    @classmethod
    def _without_gone(cls, values: Any) -> Any:
        """Drop a removed key (`gone`) of a recipe or checkpoint of an earlier version, if its value is the one that is always used now."""
        if not cls.gone or not isinstance(values, dict):
            return values
        return {key: value for key, value in values.items() if key not in cls.gone or value not in (cls.gone[key], str(cls.gone[key]))}

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Return the value; the text "1e3" becomes 1000 if the key takes only integers. Raise ValueError for values that pydantic would
        accept, such as true for a number (`steps: yes` would be 1) or a huge number."""
        kind, numbers, integers = _taken(cls, str(info.field_name))
        if integers:
            value = [whole(each) for each in value] if isinstance(value, list) else whole(value)
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, bool) and kind is not bool:
                raise ValueError("a number or a name, not true or false")
            if isinstance(number, int) and abs(number) > _LARGEST:
                raise ValueError(f"at most {_LARGEST}")
            if isinstance(number, str) and numbers and _OCTAL.fullmatch(number):
                raise ValueError("a number without zeros before it, which some read as octal")
            if isinstance(number, str) and not harmless(number):
                raise ValueError("text without control characters")
            if number == "":
                raise ValueError("text, or null: an empty one may come from a shell variable that is not set")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _registered(cls, value: Any, info: ValidationInfo) -> Any:
        """If the value is the name under which an installed package registers a plugin, return the plugin's `module:name` instead.
        Built-in choices and other values are returned unchanged."""
        if not isinstance(value, str) or (key := f"{cls.__name__.lower()}.{info.field_name}") not in GROUPS or is_plugin(value):
            return value
        return value if value in choices_of(cls.model_fields[str(info.field_name)].annotation) else by_name(key, value)

    @field_validator("*", mode="after")
    @classmethod
    def _in_32_bits(cls, value: Any) -> Any:
        if isinstance(value, float) and value and not 2.0**-126 <= abs(value) < 2.0**128:
            raise ValueError("a number that 32 bits hold: 0, or 1.2e-38 to 3.4e38 in absolute value")
        return value


@cache
def _taken(section: type[Section], name: str) -> tuple[Any, bool, bool]:
    """Return a key's type, whether it accepts numbers, and whether it accepts integers only."""
    kind = section.model_fields[name].annotation
    numbers = takes_number(kind)
    return kind, numbers, numbers and float not in (kind, *get_args(kind))
