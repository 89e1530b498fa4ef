"""Laws of parallel.process.fork: results are in rank order, every error names its rank, and all ranks end by the time limit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from parallel.process.fork import each_on_ranks, run_on_ranks


@pytest.fixture(autouse=True)
def nothing_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if a process or file remains after the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) <= processes
    assert list(tmp_path.iterdir()) == []


def failure(function: Callable[..., Any], world_size: int, *, timeout_s: float = 30.0) -> tuple[str, float]:
    """Return (message of the error that run_on_ranks must raise, seconds until it came)."""
    started = time.monotonic()
    with pytest.raises(RuntimeError) as failed:
        run_on_ranks(function, world_size, timeout_s=timeout_s)
    return str(failed.value), time.monotonic() - started


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_are_in_order_of_rank_whoever_ends_first(world_size: int) -> None:
    def work(rank: int, factor: int, name: str) -> dict[str, Any]:
        time.sleep(0.05 * (world_size - rank))
        x = torch.tensor(rank)
        dist.all_reduce(x)
        return {"name": name, "rank": rank * factor, "sum": int(x), "one": torch.full((rank, 2), 0.5, dtype=torch.bfloat16)}

    results = run_on_ranks(work, world_size, 7, "a", timeout_s=30)
    assert [(r["name"], r["rank"], r["sum"]) for r in results] == [("a", 7 * i, sum(range(world_size))) for i in range(world_size)]
    assert [tuple(r["one"].shape) for r in results] == [(i, 2) for i in range(world_size)]


def test_an_exception_is_shown_with_its_rank_while_the_others_wait() -> None:
    def work(rank: int) -> None:
        if rank == 1:
            raise ZeroDivisionError("expert 17")
        dist.all_reduce(torch.ones(3))

    text, seconds = failure(work, 3)
    assert "rank 1 failed:" in text and "ZeroDivisionError: expert 17" in text and 'raise ZeroDivisionError("expert 17")' in text
    assert seconds < 15


def test_the_limit_ends_a_deadlock_and_shows_where_each_rank_stood() -> None:
    def half_way(rank: int) -> None:
        if rank == 0:
            dist.all_reduce(torch.ones(1))
        else:
            while True:
                time.sleep(0.1)

    text, seconds = failure(half_way, 2, timeout_s=1.5)
    assert 1.5 <= seconds < 10 and text.startswith("2 ranks, 1.5 s allowed")
    first, second = text.split("rank 1 was still running at:")
    assert "rank 0 was still running at:" in first and "all_reduce" in first and "in half_way" in first
    assert "all_reduce" not in second and "in half_way" in second


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM], ids=lambda n: n.name)
def test_a_rank_killed_by_a_signal_is_named(number: signal.Signals) -> None:
    def work(rank: int) -> None:
        if rank == 1:
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        dist.barrier()

    text, seconds = failure(work, 2)
    line = next(line for line in text.splitlines() if line.startswith("rank 1"))
    assert (f"ended with {-number}" in line or f"died by {number.name}" in line) and seconds < 15


def test_a_rank_that_leaves_without_a_word_is_an_error() -> None:
    def work(rank: int) -> None:
        if rank == 0:
            os._exit(0)

    for ranks, head in ((1, "1 rank\n"), (2, "2 ranks\n")):
        text, _ = failure(work, ranks)
        assert text.startswith(head) and "rank 0 gave no result" in text


def test_ranks_that_ignore_every_signal_are_gone_all_the_same() -> None:
    def work(rank: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if rank == 0:
            raise KeyError("gone")
        time.sleep(600)

    text, seconds = failure(work, 2)
    assert "KeyError: 'gone'" in text and seconds < 15


def test_each_result_is_there_before_the_ranks_make_the_next(tmp_path_factory: pytest.TempPathFactory) -> None:
    """each_on_ranks yields the first results before ranks have computed the second: here they wait until the first are read."""
    read = tmp_path_factory.mktemp("read") / "first"

    def work(rank: int, factor: int) -> Iterator[torch.Tensor]:
        yield torch.full((rank + 1,), factor)
        while not read.exists():
            time.sleep(0.01)
        total = torch.tensor(rank)
        dist.all_reduce(total)
        yield total

    results = each_on_ranks(work, 3, 7, timeout_s=30)
    assert [part.tolist() for part in next(results)] == [[7], [7, 7], [7, 7, 7]]
    read.touch()
    assert list(results) == [[torch.tensor(3)] * 3]


@pytest.mark.parametrize("end", ["raise", "SIGKILL", "hang"])
def test_ranks_that_fail_half_way_lose_nothing_of_what_they_handed_over(end: str) -> None:
    """If rank 1 fails at its third result, the first two results of both ranks are yielded, and then the error is raised. Rank 0, which
    does not wait for rank 1, may be further by then."""

    def work(rank: int) -> Iterator[int]:
        for number in range(5):
            if rank == 1 and number == 2:
                time.sleep(0.3)
                if end == "raise":
                    raise ZeroDivisionError("expert 17")
                if end == "hang":
                    time.sleep(600)
                os.kill(os.getpid(), signal.SIGKILL)
            yield 10 * number + rank

    started, results = time.monotonic(), each_on_ranks(work, 2, timeout_s=1.5)
    got = [next(results)]
    time.sleep(1)
    with pytest.raises(RuntimeError) as failed:
        got += results
    assert got == [[0, 1], [10, 11]] and time.monotonic() - started < 15
    assert {"raise": "ZeroDivisionError: expert 17", "SIGKILL": "rank 1 gave no result", "hang": "rank 1 was still running"}[end] in str(
        failed.value
    )


def test_ranks_end_when_nobody_reads_on() -> None:
    def work(rank: int) -> Iterator[int]:
        yield os.getpid()
        time.sleep(600)

    results = each_on_ranks(work, 2, timeout_s=30)
    started, processes = time.monotonic(), next(results)
    del results
    assert time.monotonic() - started < 5 and not any(psutil.pid_exists(process) for process in processes)


def test_the_parent_is_untouched() -> None:
    held = torch.zeros(2)

    def work(rank: int) -> int:
        held.fill_(rank + 1.0)
        os.environ["A_RANK_WAS_HERE"] = "1"
        return os.getpid()

    assert len({os.getpid(), *run_on_ranks(work, 2, timeout_s=30)}) == 3
    assert not held.any() and "A_RANK_WAS_HERE" not in os.environ and not dist.is_initialized()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux ends a process with its parent")
def test_ranks_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    """Ranks end if their parent gets SIGKILL, as from a cluster's scheduler."""
    words = f"import sys, time; sys.path.insert(0, {str(Path(__file__).resolve().parents[3])!r}); "
    words += "from parallel.process.fork import run_on_ranks; "
    words += "run_on_ranks(lambda rank: (print(flush=True), time.sleep(60)), 2)"
    with subprocess.Popen([sys.executable, "-c", words], stdout=subprocess.PIPE, env=os.environ | {"TMPDIR": str(tmp_path)}) as parent:
        assert parent.stdout is not None
        for _ in range(2):  # each rank prints a line when it has started
            parent.stdout.readline()
        ranks = psutil.Process(parent.pid).children()
        parent.kill()
        assert len(ranks) == 2 and psutil.wait_procs(ranks, timeout=10)[1] == []
    shutil.rmtree(next(tmp_path.iterdir()))
