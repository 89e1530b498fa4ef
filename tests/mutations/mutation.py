"""A fault as data: which functions are replaced by what, where it happened, and the cheapest layout that must notice.

    with applied(mutation, called):     in a forked rank: the functions are replaced, and put back afterwards; no file changes

A target is "module:name" or "module:Class.name": as the code that runs looks it up, which for a function that was imported by name
is the module that imported it. Code moves, and a target can be left where nothing calls it any more; so each replacement notes that
it was called, and a fault whose replacement was not is never taken for one that was found or missed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from moe.verify.cases import Case


@dataclass(frozen=True)
class Edit:
    """`make` gives what stands in the place of the function at `target`, from that function."""

    target: str
    make: Callable[[Any], Any]

    def found(self) -> tuple[Any, str]:
        """The module or class, and the name in it. Raises AttributeError where there is none."""
        module, _, path = self.target.partition(":")
        *outer, name = path.split(".")
        owner: Any = import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        if name not in vars(owner):
            raise AttributeError(f"{self.target}: {owner!r} has no {name} of its own")
        return owner, name


@dataclass(frozen=True)
class Mutation:
    """`fault`: what is wrong, in a sentence; `source`: owner/repo#number of the issue or change, or a paper, or that no report is known and
    what it was reasoned from; `kind`: of `moe verify`, in whose layouts `case` is."""

    name: str
    fault: str
    source: str
    kind: str
    case: Case
    edits: tuple[Edit, ...]

    def not_called(self) -> Tensor:
        """For each edit, that no rank has called it yet; the forks of this process share it."""
        called = torch.zeros(len(self.edits), dtype=torch.bool)
        called.share_memory_()  # type: ignore[no-untyped-call]
        return called


@contextmanager
def applied(mutation: Mutation, called: Tensor) -> Iterator[None]:
    """While it lasts, in this process; `called`, of `not_called`, is set for each edit that is."""
    with ExitStack() as undo:
        for number, edit in enumerate(mutation.edits):
            owner, name = edit.found()
            raw = vars(owner)[name]
            real = raw.__func__ if isinstance(raw, staticmethod) else raw
            made = _noting(edit.make(real), called, number)
            undo.callback(setattr, owner, name, raw)
            setattr(owner, name, staticmethod(made) if isinstance(raw, staticmethod) else made)
        yield


def _noting(made: Callable[..., Any], called: Tensor, number: int) -> Callable[..., Any]:
    @wraps(made)  # torch looks at the parameters of a hook
    def noted(*args: Any, **kwargs: Any) -> Any:
        called[number] = True
        return made(*args, **kwargs)

    return noted
