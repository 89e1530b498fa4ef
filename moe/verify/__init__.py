"""`moe verify`: trains tiny models in every parallel layout, and compares each with the same training in one process.

The package can be called: `from moe import verify; verify(nproc=2)` does the same as `moe verify --nproc 2`.
`moe.verify.record` is a function that records a step of any PyTorch program (moe/verify/yours/recorder.py); it needs only torch.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe.verify.yours.recorder import record as record


class _Verify(ModuleType):
    def __call__(self, **named: Any) -> int:
        """Run `moe verify` with these options. Returns 0 if every layout computes the same numbers as one process, else 1."""
        from moe.verify.verify import main  # imported when called, because it loads torch

        return main(**named)

    def __getattr__(self, name: str) -> Any:
        if name == "record":
            from moe.verify.yours.recorder import record

            return record
        raise AttributeError(f"module 'moe.verify' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Verify
