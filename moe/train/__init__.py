"""The training loop. The package can be called: `from moe import train; train(run)` is `moe.train.loop.trainer.train(run)`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Train(ModuleType):
    def __call__(self, *args: Any, **named: Any) -> dict[str, Any]:
        from moe.train.loop.trainer import train  # not at the top, because it loads torch

        return train(*args, **named)


sys.modules[__name__].__class__ = _Train
