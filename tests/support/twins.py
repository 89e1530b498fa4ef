"""Numbers of the plain twin after three steps, computed once in a test process for all layouts of equal recipes."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from moe.verify.cases import Case
from moe.verify.twin import Result, reference


def three_steps_of(twin: Case) -> Result:
    """Return a copy of the plain twin's result for a case."""
    return deepcopy(_result(twin))


@cache
def _result(twin: Case) -> Result:
    return reference(twin, steps=3)
