"""`run_on_ranks` for tests: if a rank fails or hangs, the test fails with every rank's traceback or stack.

    def work(rank: int, width: int) -> Tensor: ...      # torch.distributed is initialised here, with gloo
    first, second = run_on_ranks(work, 2, 8)

`work` may be a closure. Its output is captured with the test's output. parallel/process/fork.py implements this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallel.process import fork


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run function(rank, *args) on `world_size` gloo processes with one thread each, and return the results in order of rank.

    Results are plain values and tensors, which may be nested. Fails with every failed rank's traceback or, if ranks still run after
    `timeout_s` seconds, with the Python stack of each. No process remains in either case.
    """
    assert torch.get_num_threads() == 1, "a test set torch to several threads: forked ranks would wait for threads that they do not have"
    try:
        return fork.run_on_ranks(function, world_size, *args, timeout_s=timeout_s)
    except RuntimeError as failed:
        raise AssertionError(str(failed)) from None
