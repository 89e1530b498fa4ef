"""Laws of exchanging rows: counts are transposed, every row arrives once at its destination, and the reverse exchange restores the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.mesh.collectives import all_to_all
from parallel.mesh.exchange import by_bin, exchange_counts
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

WIDTH, BINS = 3, 2


def tables(world: int) -> list[Tensor]:
    """Return tables of row counts [source rank, bin]: random, all zero, all rows to one bin, one rank without rows. BINS bins a rank."""
    generator = torch.Generator().manual_seed(world)
    found = [torch.randint(0, 5, (world, world * BINS), generator=generator) for _ in range(4)]
    found.append(torch.zeros(world, world * BINS, dtype=torch.int64))
    found.append(torch.zeros(world, world * BINS, dtype=torch.int64))
    found[-1][:, -1] = 3
    found[0][world - 1] = 0
    return found


def rows_of(table: Tensor, rank: int) -> Tensor:
    """Return a rank's rows in the order of their bins: each row is [source rank, bin, number]."""
    bins = torch.repeat_interleave(torch.arange(table.shape[1]), table[rank])
    return torch.stack([torch.full_like(bins, rank), bins, torch.arange(len(bins))], 1).double()


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_arrive_once_and_come_back(world: int) -> None:
    def work(rank: int) -> list[Any]:
        axis = process.connect(Degrees(dp=world, ep=world), World(rank, world)).axis("ep")
        found = []
        for table in tables(world):
            theirs = exchange_counts(table[rank].view(world, BINS), axis)
            send, receive = table[rank].view(world, BINS).sum(1).tolist(), theirs.sum(1).tolist()
            rows = rows_of(table, rank).requires_grad_()
            there = all_to_all(rows, axis, send=send, receive=receive)
            back = all_to_all(there, axis, send=receive, receive=send)
            (there.sum() + (back * rows.detach()).sum()).backward()
            assert rows.grad is not None
            found.append([theirs, there.detach(), torch.equal(back, rows), torch.equal(rows.grad, rows.detach() + 1)])
        return found

    results = run_on_ranks(work, world, timeout_s=60)
    for number, table in enumerate(tables(world)):
        for rank in range(world):
            theirs, there, returned, graded = results[rank][number]
            assert torch.equal(theirs, table[:, rank * BINS : (rank + 1) * BINS])  # counts by [source rank, this rank's bin]
            sent = torch.cat([rows_of(table, source) for source in range(world)])
            assert torch.equal(there, sent[sent[:, 1].long() // BINS == rank])  # all rows for this rank, by source, in the order sent
            assert returned and graded


def test_counts_cost_their_bytes_and_one_rank_asks_nobody() -> None:
    def work(rank: int) -> list[int]:
        axis = process.connect(Degrees(dp=2, ep=2), World(rank, 2)).axis("ep")
        exchange_counts(torch.ones(2, 5, dtype=torch.int64), axis)
        count = axis.communicator.counts()["ep", "counts"]
        return [count.calls, count.bytes]

    assert run_on_ranks(work, 2, timeout_s=60) == [[1, 80], [1, 80]]
    alone, axis = torch.tensor([[3, 4]]), Axis("ep")
    assert exchange_counts(alone, axis) is alone
    rows = torch.randn(7, WIDTH)
    assert all_to_all(rows, axis, send=[7], receive=[7]) is rows and axis.communicator.counts() == {}


def test_arrived_rows_are_sorted_by_bin_then_source() -> None:
    """`by_bin` equals a plain sort of all arrived rows by (bin, source, number)."""
    counts_RB = torch.randint(0, 4, (3, 2), generator=torch.Generator().manual_seed(4))
    counts_RB[1] = 0
    arrived = [(bin_, source, number) for source, row in enumerate(counts_RB.tolist()) for bin_, n in enumerate(row) for number in range(n)]
    want = sorted(range(len(arrived)), key=arrived.__getitem__)
    assert by_bin(counts_RB, total=len(arrived)).tolist() == want
    assert by_bin(torch.zeros(3, 2, dtype=torch.int64), total=0).tolist() == []
