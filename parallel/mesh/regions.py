"""Named regions of a step for torch's profiler: a trace shows them as bars around their operations.

    @in_region("route")                       every call of the function
    with region("all_to_all over ep"): ...    a block of code

Without a running profiler, a region only checks a flag. moe/train/parts/profile.py reads the names.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import ParamSpec, TypeVar

from torch.autograd import _profiler_enabled
from torch.profiler import record_function

P = ParamSpec("P")
R = TypeVar("R")

PREFIX = "region: "
_NONE: AbstractContextManager[None] = nullcontext()


def region(name: str) -> AbstractContextManager[object]:
    """Return a context manager that marks the operations of its block as a region of this name in the profiler's trace."""
    return record_function(PREFIX + name) if _profiler_enabled() else _NONE  # type: ignore[no-untyped-call]


def in_region(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that makes every call of a function a region of this name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            with region(name):
                return function(*args, **kwargs)

        return run

    return decorate
