"""A fault as data: the functions to replace, the replacements, where the fault was reported, and the cheapest case that must fail.

    with applied(mutation, called):     in a forked rank: replaces the functions, and restores them afterwards; no file changes

A target is "module:name" or "module:Class.name". For a function that was imported by name, it is the module that imported it. Each
replacement records that it was called, because a fault in code that never runs is neither found nor missed.
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
    """Replaces the function at `target` by `make(function at target)`."""

    target: str
    make: Callable[[Any], Any]

    def found(self) -> tuple[Any, str]:
        """Return (module or class, name of the function in it). Raises AttributeError if the target does not exist."""
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
    """A fault in the running code. fault: one sentence on what is wrong. source: owner/repo#number of the issue or change, or a paper, or
    the reasoning if no report is known. kind: the kind of `moe verify` to which `case` belongs; or "test", and `case` is the pytest id of
    a test that must fail, if no layout of `moe verify` notices the fault."""

    name: str
    fault: str
    source: str
    kind: str
    case: Case | str
    edits: tuple[Edit, ...]

    def not_called(self) -> Tensor:
        """Return a tensor in shared memory, bool [number of edits], all False: whether each edit's replacement was called."""
        called = torch.zeros(len(self.edits), dtype=torch.bool)
        called.share_memory_()  # type: ignore[no-untyped-call]
        return called


@contextmanager
def applied(mutation: Mutation, called: Tensor) -> Iterator[None]:
    """Apply the edits in this process within the context. Sets called[i] (from `not_called`) when the replacement of edit i is called."""
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
    @wraps(made)  # keeps the signature, which torch checks for hooks
    def noted(*args: Any, **kwargs: Any) -> Any:
        called[number] = True
        return made(*args, **kwargs)

    return noted
