"""Laws of exchanging rows: counts are transposed, every row arrives once at its owner, and the way back undoes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from parallel import process
from parallel.collectives import counts, reset_counts
from parallel.exchange import exchange_counts, exchange_rows
from parallel.fork import run_on_ranks
from parallel.mesh import Axis, Degrees
from parallel.process import World

WIDTH, BINS = 3, 2


def tables(world: int) -> list[Tensor]:
    """Rows from rank (line) to bin (column, BINS a rank): random ones, none at all, all to one, one rank without."""
    generator = torch.Generator().manual_seed(world)
    found = [torch.randint(0, 5, (world, world * BINS), generator=generator) for _ in range(4)]
    found.append(torch.zeros(world, world * BINS, dtype=torch.int64))
    found.append(torch.zeros(world, world * BINS, dtype=torch.int64))
    found[-1][:, -1] = 3
    found[0][world - 1] = 0
    return found


def rows_of(table: Tensor, rank: int) -> Tensor:
    """A rank's rows in order of destination: each knows its source, its bin and its own number."""
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
            there = exchange_rows(rows, axis, send=send, receive=receive)
            back = exchange_rows(there, axis, send=receive, receive=send)
            (there.sum() + (back * rows.detach()).sum()).backward()
            assert rows.grad is not None
            found.append([theirs, there.detach(), torch.equal(back, rows), torch.equal(rows.grad, rows.detach() + 1)])
        return found

    results = run_on_ranks(work, world, timeout_s=60)
    for number, table in enumerate(tables(world)):
        for rank in range(world):
            theirs, there, returned, graded = results[rank][number]
            assert torch.equal(theirs, table[:, rank * BINS : (rank + 1) * BINS])  # the transpose: [source, my bin]
            sent = torch.cat([rows_of(table, source) for source in range(world)])
            assert torch.equal(there, sent[sent[:, 1].long() // BINS == rank])  # mine alone, by source and then in the order sent
            assert returned and graded


def test_counts_cost_their_bytes_and_one_rank_asks_nobody() -> None:
    def work(rank: int) -> list[int]:
        axis = process.connect(Degrees(dp=2, ep=2), World(rank, 2)).axis("ep")
        reset_counts()
        exchange_counts(torch.ones(2, 5, dtype=torch.int64), axis)
        return [counts()["ep", "counts"].calls, counts()["ep", "counts"].bytes]

    assert run_on_ranks(work, 2, timeout_s=60) == [[1, 80], [1, 80]]
    reset_counts()
    alone = torch.tensor([[3, 4]])
    assert exchange_counts(alone, Axis("ep")) is alone
    rows = torch.randn(7, WIDTH)
    assert exchange_rows(rows, Axis("ep"), send=[7], receive=[7]) is rows and counts() == {}
