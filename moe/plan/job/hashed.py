"""Tools for the planner's dataclasses: hashes computed once for each instance, because caches read them often; and sums of instances, field
by field."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypeVar

KEPT = "_hash"  # name of the attribute in which an instance stores its hash
_T = TypeVar("_T")


def hashed_once(kind: type[_T]) -> type[_T]:
    """Make each instance of a frozen dataclass store its hash. Pickles omit the hash, because each process hashes strings differently."""
    full: Callable[[Any], int] = vars(kind)["__hash__"]

    def of(self: Any) -> int:
        found: int | None = self.__dict__.get(KEPT)
        if found is None:
            found = self.__dict__[KEPT] = full(self)
        return found

    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != KEPT}

    setattr(kind, "__hash__", of)  # noqa: B010 mypy knows no other way
    setattr(kind, "__getstate__", state)  # noqa: B010
    return kind


class Summed:
    """Base of frozen dataclasses whose fields are numbers or Summed: `+` and `times` work on each field. They write the fields of a new
    instance directly, because a frozen dataclass's __init__ takes several times as long."""

    def __add__(self, other: Self) -> Self:
        made = object.__new__(type(self))
        mine, more, sums = vars(self), vars(other), vars(made)
        for name in mine:
            sums[name] = mine[name] + more[name]
        return made

    def times(self, count: float) -> Self:
        made = object.__new__(type(self))
        for name, value in vars(self).items():
            vars(made)[name] = value.times(count) if isinstance(value, Summed) else count * value
        return made
