"""Makes runs reproducible bit by bit: torch uses only deterministic algorithms, and raises an error if it has none for an operator.

    CPU    sums have a fixed order for a fixed number of threads, and so have gloo's sums, so these settings change nothing
    GPU    torch replaces or refuses operators that add with atomics; cuBLAS gets a workspace of fixed size; cuDNN does not autotune

Source: torch's notes on reproducibility. NCCL's order of sums depends on the ranks and on its version, and is not set in this file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Return a context in which torch is deterministic; if not `asked`, a context without effect. torch's settings are changed for the
    whole process and restored at the end. The environment variable CUBLAS_WORKSPACE_CONFIG stays set."""
    if not asked:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix product runs on CUDA
    cudnn, fill = torch.backends.cudnn, cast(Any, torch.utils.deterministic)
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    others = cudnn.deterministic, cudnn.benchmark, fill.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic, cudnn.benchmark = True, False
    fill.fill_uninitialized_memory = False  # filling only costs time, because no result depends on memory that is not set
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        cudnn.deterministic, cudnn.benchmark, fill.fill_uninitialized_memory = others
