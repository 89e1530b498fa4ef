"""Laws of exchanging rows: counts are transposed, every row arrives once at its destination, and the reverse exchange restores the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.mesh.collectives import all_to_all
from parallel.mesh.exchange import by_bin, collect, consecutive_indices, exchange_counts, spread
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


# --- rows in slots ----------------------------------------------------------------------------------------------------


def test_runs_are_the_indices_bin_after_bin() -> None:
    assert consecutive_indices(torch.tensor([2, 0, 3]), torch.tensor([10, 5, 1]), total=5).tolist() == [10, 11, 1, 2, 3]
    assert consecutive_indices(torch.zeros(4, dtype=torch.int64), torch.arange(4), total=0).tolist() == []


@pytest.mark.parametrize("stride", [None, 9])
def test_arrived_rows_are_sorted_by_bin_then_source(stride: int | None) -> None:
    """`by_bin` equals a plain sort of all arrived rows by (bin, source, number)."""
    generator = torch.Generator().manual_seed(4)
    counts_RB = torch.randint(0, 4, (3, 2), generator=generator)
    counts_RB[1] = 0
    arrived: list[tuple[int, int, int]] = []
    where: list[int] = []
    for source, row in enumerate(counts_RB.tolist()):
        at = len(arrived) if stride is None else source * stride
        mine = [(bin_, source, number) for bin_, n in enumerate(row) for number in range(n)]
        arrived += mine
        where += range(at, at + len(mine))
    want = [place for _, place in sorted(zip(arrived, where, strict=True))]
    assert by_bin(counts_RB, total=len(arrived), stride=stride).tolist() == want


def test_spread_and_collect_undo_each_other_in_both_passes() -> None:
    slot_R = torch.tensor([4, 0, 3])
    rows = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    table = spread(rows, slot_R, slots=6)
    assert torch.equal(table[slot_R], rows) and torch.equal(table[[1, 2, 5]], torch.zeros(3, WIDTH))
    assert torch.equal(collect(table, slot_R), rows)
    assert torch.autograd.gradcheck(lambda r: spread(r, slot_R, slots=6), rows)
    assert torch.autograd.gradcheck(lambda t: collect(t, slot_R), table.detach().requires_grad_())
