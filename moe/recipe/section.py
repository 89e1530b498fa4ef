"""The base of all sections of a recipe, and questions about the types of their keys (this file needs no torch)."""

from __future__ import annotations

import re
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationInfo, field_validator

from moe.recipe.overrides import whole
from moe.recipe.plugin import GROUPS, by_name, is_plugin
from parallel.errors import harmless

_LARGEST = 2**40
_OCTAL = re.compile(r"\s*[-+]?0[0-9_]+\s*")  # 010 is 8 to YAML and C, 10 to Python
OneOrMore = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)  # a name alone is a list of one


def choices_of(annotation: Any) -> list[str]:
    """Return the names that a field takes."""
    if get_origin(annotation) is Literal:
        return [str(a) for a in get_args(annotation)]
    return [c for a in get_args(annotation) for c in choices_of(a)]


def takes_number(annotation: Any) -> bool:
    """Return whether a value of this type may be a number."""
    return annotation in (int, float) or any(takes_number(a) for a in get_args(annotation))


def takes_whole(annotation: Any) -> bool:
    """Return whether a number of this type has to be whole."""
    return takes_number(annotation) and annotation is not float and float not in get_args(annotation)


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse values that pydantic would accept: true for a number (`steps: yes` would be 1), and numbers so large that checks would
        not end.
        """
        kind = cls.model_fields[str(info.field_name)].annotation
        if takes_whole(kind):
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

    def changed(self, *keys: str) -> str | None:
        """Return the first of these keys, or of all, that differs from its default; None if none does."""
        fields = type(self).model_fields
        return next((key for key in keys or fields if getattr(self, key) != fields[key].default), None)
