"""Runs of rows: any number of rows, cut and joined with correct gradients, in messages padded to the longest run."""

from __future__ import annotations

import torch

from parallel.mesh.exchange import cut_runs, join_runs, run_lengths
from parallel.mesh.mesh import Axis, Degrees
from parallel.process import process
from parallel.process.process import World
from tests.support.ranks import run_on_ranks

ROWS, RANKS, WIDTH = (3, 4, 7, 9), 3, 5


def test_runs_are_cut_as_tensor_split_cuts() -> None:
    for rows in range(12):
        assert run_lengths(rows, RANKS) == [len(run) for run in torch.arange(rows).tensor_split(RANKS)]


def test_runs_are_cut_and_joined_with_the_gradients_of_one_process() -> None:
    def work(rank: int) -> None:
        axis = process.connect(Degrees(tp=RANKS), World(rank, RANKS)).axis("tp")
        for rows in ROWS:
            x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows)).requires_grad_()
            weight = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
            axis.communicator.reset_counts()
            mine = cut_runs(x, axis)
            assert torch.equal(mine, x.tensor_split(RANKS)[rank])
            back = join_runs(mine.sin(), axis, total=rows)
            assert torch.equal(back, x.sin())
            (back * weight).sum().backward()
            torch.testing.assert_close(x.grad, weight * x.detach().cos())
            (count,) = axis.communicator.counts().values()  # one gather forward, one backward
            assert (count.calls, count.bytes) == (2, 2 * 4 * WIDTH * -(-rows // RANKS))

    run_on_ranks(work, RANKS)


def test_an_axis_of_one_does_nothing() -> None:
    x = torch.randn(4, 3)
    assert cut_runs(x, Axis("tp")) is x and join_runs(x, Axis("tp"), total=4) is x
