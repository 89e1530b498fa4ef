"""`run_on_ranks` for tests: a rank's failure is a failed assertion that shows every rank's traceback, or its stack in a deadlock.

    def work(rank: int, width: int) -> Tensor: ...      # torch.distributed is initialised here, with gloo
    first, second = run_on_ranks(work, 2, 8)

`work` may be a closure, and what it prints is captured with the test's output. See parallel/process/fork.py for how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parallel.process import fork


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """function(rank, *args) on `world_size` gloo processes with one thread each; the results in order of rank.

    Results are plain values and tensors, nested as you like. Fails with every failed rank's traceback, or, when ranks are still
    running after `timeout_s`, with the Python stack of each; no process remains in either case.
    """
    assert torch.get_num_threads() == 1, "a test set torch to several threads: forked ranks would wait for threads that they do not have"
    try:
        return fork.run_on_ranks(function, world_size, *args, timeout_s=timeout_s)
    except RuntimeError as failed:
        raise AssertionError(str(failed)) from None
