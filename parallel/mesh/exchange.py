"""Exchange of rows with other ranks: counts of rows, and the order of received ones. A bin is a destination on a rank, such as an expert.

    counts [ranks, bins]  ->  all_to_all of counts  ->  all_to_all of rows
    rank 0: 3 rows for rank 0, 2 for rank 1        rank 0 gets 3 + 1 rows
    rank 1: 1 row  for rank 0, 4 for rank 1        rank 1 gets 2 + 4 rows

Counts go first, because ranks cannot know how many rows will arrive. A rank without rows still takes part, or the others would wait
for ever. Rows can also be in slots, some of them empty: `spread` puts rows into slots, `collect` takes them out again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh.mesh import Axis


def exchange_counts(counts_RB: Tensor, axis: Axis) -> Tensor:
    """Send counts_RB[r, b], the number of rows for bin b of rank r, to rank r. Return [r, b]: number of rows from rank r for bin b."""
    if axis.size == 1:
        return counts_RB
    axis.count("counts", counts_RB)
    out = counts_RB.new_empty(counts_RB.shape)
    dist.all_to_all_single(out, counts_RB.contiguous(), group=axis.group)
    return out


def consecutive_indices(counts_N: Tensor, start_N: Tensor, *, total: int) -> Tensor:
    """Return the counts_N[n] indices start_N[n], start_N[n] + 1, ... of each bin n, bin after bin: int64 [total]. total: sum of counts_N,
    which a GPU's host knows already."""
    before_N = counts_N.cumsum(0) - counts_N
    return torch.repeat_interleave(start_N - before_N, counts_N, output_size=total) + torch.arange(total, device=counts_N.device)


def by_bin(counts_RB: Tensor, *, total: int, stride: int | None = None) -> Tensor:
    """Return indices, int64 [total], that sort received rows by (bin, source rank). counts_RB[r, b]: rows received from rank r for bin b.

    Received rows are sorted by (source, bin). They have no gaps, or with `stride` the rows of rank r start at row r * stride."""
    if stride is None:
        flat = counts_RB.flatten()
        start_RB = (flat.cumsum(0) - flat).view_as(counts_RB)
    else:
        start_RB = counts_RB.cumsum(1) - counts_RB + torch.arange(len(counts_RB), device=counts_RB.device).unsqueeze(1) * stride
    return consecutive_indices(counts_RB.t().flatten(), start_RB.t().flatten(), total=total)


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, slot_R: Tensor, slots: int | None) -> Tensor:
        ctx.slot_R, ctx.slots = slot_R, len(rows) if slots is None else None
        return _moved(rows, slot_R, slots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _moved(grad, ctx.slot_R, ctx.slots), None, None


def _moved(rows: Tensor, slot_R: Tensor, slots: int | None) -> Tensor:
    if slots is None:
        return rows.index_select(0, slot_R)
    return rows.new_zeros(slots, *rows.shape[1:]).index_copy_(0, slot_R, rows)


def spread(rows: Tensor, slot_R: Tensor, *, slots: int) -> Tensor:
    """Return [slots, ...] with row i in slot slot_R[i]. No slot is used twice, and unused ones are zero. Backward: `collect`."""
    out: Tensor = _Moved.apply(rows, slot_R, slots)
    return out


def collect(table: Tensor, slot_R: Tensor) -> Tensor:
    """Return the rows of `table` in the slots slot_R, of which none occurs twice. Backward: `spread`."""
    out: Tensor = _Moved.apply(table, slot_R, None)
    return out
