"""Laws of run_on_ranks: correct results, every error with its rank, no hang, no process left."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.ranks import run_on_ranks


@pytest.fixture(autouse=True)
def nothing_remains() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_reduce_sums_over_every_rank(world_size: int) -> None:
    def work(rank: int, width: int) -> Tensor:
        x = torch.full((width,), 10.0**rank)
        dist.all_reduce(x)
        return x

    expected = torch.full((5,), sum(10.0**r for r in range(world_size)))
    results = run_on_ranks(work, world_size, 5, timeout_s=30)
    assert len(results) == world_size
    assert all(torch.equal(x, expected) for x in results)


def test_results_come_back_by_value_in_order_of_rank() -> None:
    def work(rank: int) -> dict[str, object]:
        time.sleep(0.1 * (2 - rank))  # ranks end in reverse order
        x = torch.full((2, rank), rank, dtype=torch.bfloat16)
        return {"rank": rank, "seen": dist.get_rank(), "size": dist.get_world_size(), "x": x}

    results = run_on_ranks(work, 3, timeout_s=30)
    assert [(r["rank"], r["seen"], r["size"], tuple(r["x"].shape), r["x"].dtype) for r in results] == [
        (rank, rank, 3, (2, rank), torch.bfloat16) for rank in range(3)
    ]


def test_ranks_have_one_thread_and_leave_this_process_as_it_was() -> None:
    held = torch.zeros(3)

    def work(rank: int) -> tuple[int, int]:
        held.add_(rank + 1)
        os.environ["RANK_WAS_HERE"] = "1"
        return torch.get_num_threads(), os.getpid()

    (threads_0, pid_0), (threads_1, pid_1) = run_on_ranks(work, 2, timeout_s=30)
    assert (threads_0, threads_1) == (1, 1)
    assert len({pid_0, pid_1, os.getpid()}) == 3
    assert not held.any() and "RANK_WAS_HERE" not in os.environ and not dist.is_initialized()


def test_uneven_all_to_all_with_empty_rows() -> None:
    sent = [[0, 2, 1], [0, 0, 0], [3, 0, 4]]  # [source, destination]: rank 1 sends no rows

    def work(rank: int) -> Tensor:
        rows = torch.tensor([[10.0 * rank + to] * 2 for to in range(3) for _ in range(sent[rank][to])]).reshape(-1, 2)
        takes = [sent[source][rank] for source in range(3)]
        got = torch.empty(sum(takes), 2)
        dist.all_to_all_single(got, rows, output_split_sizes=takes, input_split_sizes=sent[rank])
        return got

    results = run_on_ranks(work, 3, timeout_s=30)
    for rank, got in enumerate(results):
        assert got[:, 0].tolist() == [10.0 * source + rank for source in range(3) for _ in range(sent[source][rank])]


def test_an_error_is_shown_with_its_rank_though_the_others_wait() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ValueError("the seventh expert is missing")
        dist.barrier()

    start_s = time.monotonic()
    with pytest.raises(AssertionError) as failed:
        run_on_ranks(work, 3, timeout_s=60)
    text = str(failed.value)
    assert "rank 1 failed:" in text and "ValueError: the seventh expert is missing" in text
    assert f'File "{__file__}"' in text and 'raise ValueError("the seventh expert is missing")' in text
    assert time.monotonic() - start_s < 20


def test_errors_of_several_ranks_are_all_shown() -> None:
    def work(rank: int) -> None:
        dist.barrier()
        time.sleep(0.2)  # all ranks have left the barrier, so no rank loses a connection
        raise KeyError(f"from {rank}")

    with pytest.raises(AssertionError) as failed:
        run_on_ranks(work, 3, timeout_s=60)
    assert [f"rank {r} failed:" in str(failed.value) and f"KeyError: 'from {r}'" in str(failed.value) for r in range(3)] == [True] * 3


def test_leaving_by_exit_or_a_failed_assertion_is_an_error_too() -> None:
    def leave(rank: int) -> None:
        sys.exit(0)

    def claim(rank: int) -> None:
        pytest.fail("a claim that does not hold")

    with pytest.raises(AssertionError, match="rank 0 failed:[^$]*SystemExit: 0"):
        run_on_ranks(leave, 1, timeout_s=60)
    with pytest.raises(AssertionError, match="a claim that does not hold"):
        run_on_ranks(claim, 1, timeout_s=60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda n: n.name)
def test_a_rank_that_dies_is_named(number: signal.Signals) -> None:
    def work(rank: int) -> None:
        if rank == 0:
            os.kill(os.getpid(), number)
        dist.barrier()

    start_s = time.monotonic()
    with pytest.raises(AssertionError) as failed:
        run_on_ranks(work, 2, timeout_s=60)
    line = next(line for line in str(failed.value).splitlines() if line.startswith("rank 0"))
    assert number.name in line or f"ended with -{number.value}" in line
    assert time.monotonic() - start_s < 20


def test_a_deadlock_ends_in_time_with_the_stack_of_each_rank() -> None:
    def waits_for_a_row_that_nobody_sends(rank: int) -> None:
        dist.recv(torch.empty(1), src=1 - rank)

    start_s = time.monotonic()
    with pytest.raises(AssertionError) as failed:
        run_on_ranks(waits_for_a_row_that_nobody_sends, 2, timeout_s=2)
    text = str(failed.value)
    assert 2 <= time.monotonic() - start_s < 15
    assert "2 s allowed" in text
    assert "rank 0 was still running at:" in text and "\nrank 1 " in text
    assert text.count("in waits_for_a_row_that_nobody_sends") == 2


def test_a_rank_that_ignores_signals_is_killed() -> None:
    def work(rank: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)

    with pytest.raises(AssertionError, match="rank 0 was still running"):
        run_on_ranks(work, 1, timeout_s=1)
