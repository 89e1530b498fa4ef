"""Runs a function on N gloo ranks on this machine, each a fork of this process: 0.2 s to start, one thread per rank.

The caller must not have started threads of its own (set torch to one thread first): a forked process inherits locks, but not
threads. A rank that raises, dies or hangs ends all ranks. Every rank's error is reported with its rank, and a deadlock with
the Python stack of each rank that was still running.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.errors import counted
from parallel.process.libc import die_with, keep_freed_memory

_GRACE_S = 3.0  # seconds to wait, after one rank has failed, for the errors of other ranks, which often show the cause


def run_on_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Call function(rank, *args) on every rank, with torch.distributed initialized. Return the ranks' results in order.

    Results may be anything that torch.load(weights_only=True) reads: numbers, strings, lists, dicts, tensors. Raises
    RuntimeError with every failed rank's traceback, or with the stacks of the ranks that did not end within timeout_s."""

    def once(rank: int, *args: Any) -> Iterator[Any]:
        yield function(rank, *args)

    (results,) = each_on_ranks(once, world_size, *args, timeout_s=timeout_s)
    return results


def each_on_ranks(function: Callable[..., Iterator[Any]], world_size: int, *args: Any, timeout_s: float = 120.0) -> Iterator[list[Any]]:
    """Yield [result of each rank] whenever the generators function(rank, *args) of all ranks have yielded a result.

    All ranks must yield equally often, and wait for each other at each result. If ranks fail, earlier results are yielded first, and then
    the error is raised. timeout_s: time limit of each result. The ranks end when the caller stops reading."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        context = multiprocessing.get_context("fork")
        ranks = [
            context.Process(target=_child, args=(function, rank, world_size, args, folder, timeout_s, os.getpid()), daemon=True)
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        try:
            numbers = count()
            while (late := _wait(ranks, parts := _parts(folder, next(numbers), world_size), timeout_s)) is None:
                results = [torch.load(part, weights_only=True) for part in parts]
                for part in parts:
                    part.unlink()
                yield results
            stacks = _stacks(ranks, late, folder)
        finally:
            for process in ranks:  # kill all, then wait, because a rank that outlives another would report a lost connection
                process.kill()
            for process in ranks:
                process.join()
        problems = [_problem(rank, process, folder, stacks) for rank, process in enumerate(ranks)]
        if any(problems):
            head = counted(world_size, "rank") + (f", {timeout_s:g} s allowed" if late else "")
            raise RuntimeError("\n".join([head, *(p for p in problems if p)]))


def _child(
    function: Callable[..., Iterator[Any]], rank: int, world_size: int, args: tuple[Any, ...], folder: Path, timeout_s: float, parent: int
) -> None:
    code = 1
    die_with(parent)
    gc.freeze()  # exclude inherited objects from garbage collection, which would copy every page that it marks
    keep_freed_memory()  # as ranks of a launcher do; otherwise timings would include the kernel's zeroing of new pages
    try:
        torch.set_num_threads(1)
        faulthandler.register(signal.SIGUSR1, file=open(folder / f"{rank}.stack", "w"), all_threads=False)  # noqa: SIM115 (open while the rank lives)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s + 60))
        dist.barrier()  # connect all ranks before one can fail; else others would report a failed connection instead of their own errors
        for number, result in enumerate(function(rank, *args)):
            torch.save(result, folder / f"{rank}.part")
            (folder / f"{rank}.part").rename(_parts(folder, number, world_size)[rank])  # so that a result is never seen incomplete
            dist.barrier()  # wait for all: a rank that ends closes connections that other ranks may still need
        (folder / f"{rank}.ended").touch()
        code = 0
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
    finally:
        os._exit(code)  # skip the parent's exit handlers: this process is a copy of it


def _wait(ranks: Sequence[BaseProcess], parts: Sequence[Path], timeout_s: float) -> list[int] | None:
    """Wait for the files `parts`, one of each rank. Return None if all exist; [] if a rank ended without writing its file; at the time
    limit, the ranks that still run."""
    deadline = time.monotonic() + timeout_s
    failed_at: float | None = None
    while True:
        running = any(p.is_alive() for p in ranks)  # read before the files, because a rank can write its result and end in between
        if all(part.exists() for part in parts):
            return None
        now = time.monotonic()
        if failed_at is None and any(p.exitcode not in (None, 0) for p in ranks):
            failed_at = now
        if not running or (failed_at is not None and now > failed_at + _GRACE_S):
            return []
        if now > deadline:
            return [rank for rank, p in enumerate(ranks) if p.is_alive()]
        time.sleep(0.01)


def _parts(folder: Path, number: int, world_size: int) -> list[Path]:
    return [folder / f"{number}.{rank}.result" for rank in range(world_size)]


def _stacks(ranks: Sequence[BaseProcess], late: list[int], folder: Path) -> dict[int, str]:
    for rank in late:
        if ranks[rank].pid is not None:
            os.kill(ranks[rank].pid or 0, signal.SIGUSR1)
    if late:
        time.sleep(0.5)
    return {rank: (folder / f"{rank}.stack").read_text() for rank in late if (folder / f"{rank}.stack").exists()}


def _problem(rank: int, process: BaseProcess, folder: Path, stacks: dict[int, str]) -> str | None:
    error = folder / f"{rank}.error"
    if rank in stacks:
        return f"rank {rank} was still running at:\n{stacks[rank]}"
    if error.exists():
        return f"rank {rank} failed:\n{error.read_text()}"
    if process.exitcode and process.exitcode < 0 and process.exitcode != -signal.SIGKILL:
        return f"rank {rank} died by {signal.Signals(-process.exitcode).name}"
    if not (folder / f"{rank}.ended").exists():
        return f"rank {rank} gave no result (ended with {process.exitcode})"
    return None
