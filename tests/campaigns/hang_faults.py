"""The faults of tests/campaigns/hangs.py. Each changes the process in which it is called, one rank of a run, until that process ends.

`install(number, mark)`: `number` of the try, so that tries differ; the time of the fault is written to the file `mark`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from parallel.mesh import collectives
from parallel.mesh.record import Record
from parallel.watch import watchdog

STEP = 3  # step of the fault; the first step has five times the limit, so a fault in it would take longer
Install = Callable[[int, Path], None]


def nothing(number: int, mark: Path) -> None:
    """No fault."""


def noted(number: int, mark: Path) -> None:
    """Only write the time to `mark`: the campaign itself makes the fault, from outside the rank."""
    _at_a_collective(number, mark, lambda: None)


def stopped(number: int, mark: Path) -> None:
    """Stop the process with SIGSTOP."""
    _at_a_collective(number, mark, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def killed(number: int, mark: Path) -> None:
    """Kill the process with SIGKILL."""
    _at_a_collective(number, mark, lambda: os.kill(os.getpid(), signal.SIGKILL))


def holding_python(number: int, mark: Path) -> None:
    """Hang in C while holding the interpreter's lock, so that no thread of this process runs."""
    _at_a_collective(number, mark, lambda: ctypes.PyDLL(None).sleep(600))


def busy(phase: str) -> Install:
    """Return a fault: the rank enters an endless computation in this phase of the step."""

    def spin() -> None:
        while True:
            sum(range(10_000))

    return lambda number, mark: _in_phase(phase, mark, spin)


def slow(share: float) -> Install:
    """Return a fault: the rank sleeps once in the forward pass, for this share of the watchdog's time limit."""

    def sleep() -> None:
        watching = watchdog.current()
        assert watching is not None
        time.sleep(share * watching.limit_s)

    return lambda number, mark: _in_phase("the forward pass", mark, sleep)


def raising(phase: str) -> Install:
    """Return a fault: the rank raises an exception in this phase of the step."""

    def fail() -> None:
        raise ValueError("boom")

    return lambda number, mark: _in_phase(phase, mark, fail)


def lost_message(number: int, mark: Path) -> None:
    """Announce a pipeline message to the next rank, but do not send it."""
    real, sent = dist.isend, [0]

    def isend(tensor: torch.Tensor, dst: int, *args: Any, **kwargs: Any) -> Any:
        watching = watchdog.current()
        if watching is not None and watching.record.step == STEP and dst > watching.record.rank:
            sent[0] += 1
            if sent[0] == 2 + number % 2:
                _mark(mark)
                return _Done()
        return real(tensor, dst, *args, **kwargs)

    dist.isend = isend  # type: ignore[assignment]


def another(how: str) -> Install:
    """Return a fault: the rank calls an all-reduce of the third step "twice", omits it ("none"), or changes its "shape" or "dtype"."""

    def install(number: int, mark: Path) -> None:
        real, made = collectives._reduce, [0]

        def reduce(tensor: torch.Tensor, axis: Any, op: Any) -> torch.Tensor:
            watching = watchdog.current()
            if watching is None or watching.record.step != STEP or axis.size == 1:
                return real(tensor, axis, op)
            made[0] += 1
            if made[0] != 1 + number % 3:
                return real(tensor, axis, op)
            _mark(mark)
            if how == "twice":
                real(tensor.clone(), axis, op)
            elif how == "none":
                return tensor
            elif how == "shape":
                real(torch.cat((tensor.flatten(), tensor.flatten())), axis, op)
                return tensor
            elif how == "dtype":
                real(tensor.to(torch.float16), axis, op)
                return tensor
            return real(tensor, axis, op)

        collectives._reduce = reduce

    return install


def split(number: int, mark: Path) -> None:
    """In an all-to-all of the third step, send one row to another rank than the ranks agreed."""
    real, made = collectives._start_exchange, [0]

    def exchange(rows: torch.Tensor, axis: Any, *, send: list[int], receive: list[int]) -> Any:
        watching = watchdog.current()
        if watching is not None and watching.record.step == STEP:
            made[0] += 1
            if made[0] == 1 + number % 2:
                _mark(mark)
                most = max(range(len(send)), key=send.__getitem__)
                send = list(send)
                send[most] -= 1
                send[(most + 1) % len(send)] += 1
        return real(rows, axis, send=send, receive=receive)

    collectives._start_exchange = exchange


class _Done:
    def wait(self) -> bool:
        return True


def _mark(mark: Path) -> None:
    mark.write_text(str(time.time()))


def _at_a_collective(number: int, mark: Path, fault: Callable[[], Any]) -> None:
    """Call `fault` before one of the third step's collectives. number: of the try, which selects the collective."""
    real, made = Record.announce, [0]

    def announce(self: Record, *args: Any, **kwargs: Any) -> None:
        if self.step == STEP:
            made[0] += 1
            if made[0] == 1 + number % 3:
                _mark(mark)
                fault()
        real(self, *args, **kwargs)

    Record.announce = announce  # type: ignore[method-assign]


def _in_phase(phase: str, mark: Path, fault: Callable[[], Any]) -> None:
    real, done = Record.enter, [False]

    def enter(self: Record, name: str, **kwargs: Any) -> None:
        real(self, name, **kwargs)
        if name.startswith(phase) and self.step >= STEP and not done[0]:
            done[0] = True
            _mark(mark)
            fault()

    Record.enter = enter  # type: ignore[method-assign, assignment]
