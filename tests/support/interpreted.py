"""Triton's interpreter in half of its time: import this module before kernels run.

A launch replaces what is in triton.language by what runs on a CPU, and puts it back at its end. Triton 3.7 does so again for every
call of one kernel by another within the launch, where all of it is replaced already: 40 % of the time of these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


class _Launch:
    """What has been replaced since the launch began; its `restore` is called when it ends."""

    def __init__(self, replace: Callable[[Any], Any]) -> None:
        self.replace = replace
        self.scopes: list[Any] = []
        self.modules: set[str] = set()

    def __call__(self, function: Any) -> _Launch | _Inside:
        """Where a kernel begins, or one that it calls: a module of the language that this one sees and none before it did."""
        seen = {m.__name__ for m in (language, language.core) if any(value is m for value in function.__globals__.values())}
        first = not self.scopes
        if not seen <= self.modules:
            self.scopes.append(self.replace(function))
            self.modules |= seen
        return self if first else _Inside()

    def restore(self) -> None:
        while self.scopes:
            self.scopes.pop().restore()
        self.modules = set()


class _Inside:
    def restore(self) -> None: ...


if not isinstance(interpreter._patch_lang, _Launch):
    interpreter._patch_lang = _Launch(interpreter._patch_lang)
