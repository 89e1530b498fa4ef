"""Rows that ranks exchange: the counts of rows that each rank will receive, and runs, which spread any number of rows over ranks. Received
rows are sorted by bin, which is a destination on a rank, such as an expert.

    counts [ranks, bins]  ->  all_to_all of counts  ->  all_to_all of rows
    rank 0: 3 rows for rank 0, 2 for rank 1        rank 0 gets 3 + 1 rows
    rank 1: 1 row  for rank 0, 4 for rank 1        rank 1 gets 2 + 4 rows

Counts are exchanged first, because ranks cannot know how many rows will arrive. A rank without rows still takes part, or the others would
wait forever.

A run is a contiguous chunk of rows, one for each rank of an axis. Runs differ by at most one row.

7 rows on 3 ranks      0 1 2 | 3 4 | 5 6          as torch.tensor_split splits them
message of a gather    0 1 2   3 4 .   5 6 .      . = padding, which the receiver removes

         forward                                          backward
cut      all ranks have all rows: keep this rank's run    all_gather of the runs' gradients
join     all_gather of the runs                           all ranks have the same gradient: keep this rank's run of it
start    all_gather of equal runs, waited for later       reduce_scatter of the gradients in fp32, waited for later
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from parallel.mesh.collectives import StartedRows, begun, gathered, paired, start_gather, start_scatter_sum
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


def run_lengths(total: int, ranks: int) -> list[int]:
    """Return each rank's number of rows if `total` rows are divided among the ranks."""
    return [total // ranks + (rank < total % ranks) for rank in range(ranks)]


def cut_runs(rows: Tensor, axis: Axis) -> Tensor:
    """Return this rank's consecutive rows of `rows`, a tensor that all ranks have."""
    return rows if axis.size == 1 else paired(rows, axis, _own, _all, total=len(rows))


def join_runs(run: Tensor, axis: Axis, *, total: int) -> Tensor:
    """Return all `total` rows on every rank. run: this rank's consecutive rows."""
    return run if axis.size == 1 else paired(run, axis, _all, _own, total=total)


class _Runs(StartedRows):
    """A started gather of the ranks' runs (consecutive rows, equally many on each rank). Its backward sums and scatters their gradients."""

    def there(self, rows: Tensor) -> Tensor:
        self.work = start_gather(rows, self.axis)
        return self.work.result

    def back(self, grad: Tensor) -> Tensor:
        self.work = start_scatter_sum(grad.to(torch.promote_types(grad.dtype, torch.float32)), self.axis.backward())
        return self.work.result


def start_runs(run: Tensor, axis: Axis) -> StartedRows:
    """Start to gather all ranks' rows. run: this rank's rows; all ranks have equally many. `finish_rows` waits for the gathered rows. In
    the backward pass, gradients are summed in fp32 or wider: the backward of `finish_rows` starts this sum, and the backward of this
    function waits for it."""
    return begun(run, _Runs(axis, [], []))


def lengthened(rows: Tensor, length: int) -> Tensor:
    """Return the rows, padded with zero rows to [length, ...]."""
    return rows if len(rows) == length else F.pad(rows, (*(0, 0) * (rows.ndim - 1), 0, length - len(rows)))


def _own(rows: Tensor, axis: Axis, *, total: int) -> Tensor:
    return rows.tensor_split(axis.size)[axis.index].contiguous()


def _all(run: Tensor, axis: Axis, *, total: int) -> Tensor:
    lengths = run_lengths(total, axis.size)
    rows = gathered(lengthened(run, lengths[0]), axis)
    return rows if len(rows) == total else torch.cat([part[:n] for part, n in zip(rows.split(lengths[0]), lengths, strict=True)])
