"""`run_on_ranks` for tests: if a rank fails or hangs, the test fails with every rank's traceback or stack.

    def work(rank: int, width: int) -> Tensor: ...      # torch.distributed is initialized here, with gloo
    first, second = run_on_ranks(work, 2, 8)

`work` may be a closure. Its output is captured with the test's output. parallel/process/fork.py implements this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def each_case(
    function: Callable[..., Any], world_size: int, cases: Iterable[tuple[Any, ...]], *, timeout_s: float = 240.0
) -> list[list[Any]]:
    """Run function(rank, *case) for one case after another on the same ranks, because each fork of ranks takes 0.2 s of processor time.

    Return for each case the results in order of rank. An error names its case. timeout_s: time limit of all cases together."""
    listed = list(cases)

    def one_by_one(rank: int) -> list[Any]:
        found = []
        for case in listed:
            try:
                found.append(function(rank, *case))
            except BaseException as error:
                error.add_note(f"in the case {case}")
                raise
        return found

    return [list(of_ranks) for of_ranks in zip(*run_on_ranks(one_by_one, world_size, timeout_s=timeout_s), strict=True)]
