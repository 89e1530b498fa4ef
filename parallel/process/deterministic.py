"""The same bits from the same run: while it lasts, torch takes deterministic algorithms alone, and says so where it has none.

    CPU    sums are in a fixed order for a fixed number of threads; gloo adds in a fixed order. What is set here changes no number
    GPU    torch replaces or refuses what adds with atomics; cuBLAS gets a workspace of fixed size; cuDNN does not choose by time

Source: torch's notes on reproducibility. NCCL adds in an order that follows from the ranks and its version: not set here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Where it is asked for. The settings are the process's, and are put back."""
    if not asked:
        yield
        return
    os.environ.setdefault(_WORKSPACE, ":4096:8")  # read when CUDA's first product runs
    cudnn, fill = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    others = cudnn.deterministic, cudnn.benchmark, fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    fill.fill_uninitialized_memory = False  # every element is written before it is read: writing it twice costs time alone
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, fill.fill_uninitialized_memory = others
