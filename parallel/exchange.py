"""Rows to the ranks that own them, and back.

    counts [ranks, bins]  ->  all_to_all of counts  ->  all_to_all of rows
    rank 0: 3 rows for rank 0, 2 for rank 1        rank 0 gets 3 + 1 rows
    rank 1: 1 row  for rank 0, 4 for rank 1        rank 1 gets 2 + 4 rows

Counts go first: no rank can know how many rows will arrive, and gloo answers disagreeing splits with wrong
numbers rather than an error. A rank without rows still takes part, or the others would wait for ever.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from parallel.collectives import all_to_all, count
from parallel.mesh import Axis


def exchange_counts(counts_RB: Tensor, axis: Axis) -> Tensor:
    """From "rows I send to rank r for its bin b" (int64 [ranks, bins]) to "rows rank r sends me for my bin b"."""
    if axis.size == 1:
        return counts_RB
    count(axis, "counts", counts_RB)
    out = counts_RB.new_empty(counts_RB.shape)
    dist.all_to_all_single(out, counts_RB.contiguous(), group=axis.group)
    return out


def exchange_rows(rows: Tensor, axis: Axis, *, send: list[int], receive: list[int]) -> Tensor:
    """Rows sorted by destination rank to their owners; returns the rows received, sorted by source rank. Differentiable."""
    return all_to_all(rows, axis, send=send, receive=receive)
