"""Counts for an exchange of rows: tells each rank how many rows it will receive, and sorts the received rows by bin.
A bin is a destination on a rank, such as an expert.

    counts [ranks, bins]  ->  all_to_all of counts  ->  all_to_all of rows
    rank 0: 3 rows for rank 0, 2 for rank 1        rank 0 gets 3 + 1 rows
    rank 1: 1 row  for rank 0, 4 for rank 1        rank 1 gets 2 + 4 rows

Counts are exchanged first, because ranks cannot know how many rows will arrive. A rank without rows still takes part, or the others would
wait forever.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh.mesh import Axis


def exchange_counts(counts_RB: Tensor, axis: Axis) -> Tensor:
    """Send counts_RB[r, b], the number of rows for bin b of rank r, to rank r. Return [r, b]: number of rows from rank r for this rank's
    bin b."""
    if axis.size == 1:
        return counts_RB
    axis.count("counts", counts_RB)
    out = counts_RB.new_empty(counts_RB.shape)
    dist.all_to_all_single(out, counts_RB.contiguous(), group=axis.group)
    return out


def by_bin(counts_RB: Tensor, *, total: int) -> Tensor:
    """Return indices, int64 [total], that bring received rows from the order of arrival, (source rank, bin), into the order (bin, source).
    counts_RB[r, b]: number of rows from rank r for bin b. total: sum of counts_RB, passed as an int so that the host need not wait for the
    GPU."""
    flat = counts_RB.flatten()
    start_BR = (flat.cumsum(0) - flat).view_as(counts_RB).t()
    counts_N, start_N = counts_RB.t().flatten(), start_BR.flatten()
    shift_N = start_N - (counts_N.cumsum(0) - counts_N)
    return torch.repeat_interleave(shift_N, counts_N, output_size=total) + torch.arange(total, device=counts_N.device)
