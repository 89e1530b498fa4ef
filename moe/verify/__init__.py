"""The layout oracle: compares every layout with one process.

The package can be called: `from moe import verify; verify(nproc=2)` does the same as `moe verify --nproc 2`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Verify(ModuleType):
    def __call__(self, **named: Any) -> int:
        """Run `moe verify` with these options. Returns 0 if every layout computes the same numbers as one process, else 1."""
        from moe.verify.verify import main  # imported when called, because it loads torch

        return main(**named)


sys.modules[__name__].__class__ = _Verify
