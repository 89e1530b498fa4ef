"""Handles signals before training: nothing can be lost yet, so SIGTERM, SIGUSR1 and SIGHUP print one line and end a run with exit code
STOPPED.

The command and every rank install these handlers before they import the rest of the program, which takes a second. So this file imports
little.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from moe.launch.exit_codes import STOPPED

NOTHING_LOST = "nothing is lost: start it again"


def number_of_rank() -> int:
    """Return this process's rank from the launcher's variables; 0 without a launcher."""
    number = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    return int(number) if number.isdecimal() else 0  # other values are refused when process.read_environment reads them


class _TooEarly:
    """Signal handler before training begins: prints that nothing is lost (if `prints`), and ends the process with exit code STOPPED. Ctrl-C
    has its default effect, and so has each signal in a forked child, which inherits the handler. leave: called first, to write the rank's
    status file. process: id of the process that installed the handler. before_training: marks this handler, so that code which restores
    earlier handlers after training does not restore this one."""

    before_training = True

    def __init__(self, prints: bool, leave: Callable[[], None]) -> None:  # not a dataclass: importing dataclasses takes 40 ms
        self.prints, self.leave, self.process = prints, leave, os.getpid()
        self.once = threading.Lock()

    def __call__(self, number: int, _: object) -> NoReturn:
        if number == signal.SIGINT or os.getpid() != self.process:
            ctypes.CDLL(None).signal(number, 0)  # 0: SIG_DFL. C's signal(), because Python's works only in the main thread
            os.kill(os.getpid(), number)
        if not self.once.acquire(blocking=False):  # another thread (main, or that of `_called_immediately`) is ending the process
            time.sleep(1)
            os._exit(STOPPED)
        self.leave()
        if self.prints:
            os.write(2, f"exit code {STOPPED}: a signal came before training began, and {NOTHING_LOST}\n".encode())
        os._exit(STOPPED)


@contextlib.contextmanager
def early_signals(*, prints: bool, leave: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within the context, `_TooEarly(prints, leave)` handles SIGTERM, SIGUSR1, SIGHUP and Ctrl-C, until training installs its own handlers.
    The handler ends the process without an exception, because an exception during an import could leave a library in a broken state."""
    stop = _TooEarly(prints, leave)
    heard = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
    with contextlib.suppress(ValueError):  # raised outside of the main thread; then no handler is installed
        for number in heard:
            now: object = signal.getsignal(number)
            if now is signal.SIG_DFL or isinstance(now, _TooEarly):
                signal.signal(number, stop)
    try:
        with _called_immediately(stop):
            yield
    finally:
        for number in heard:
            if signal.getsignal(number) is stop:
                signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def _called_immediately(stop: _TooEarly) -> Iterator[None]:
    """Within the context, a second thread calls the handler `stop` as soon as a signal arrives. Python itself calls a handler only when the
    main thread returns from C code, in which that thread may wait minutes for missing ranks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    active = [True]

    # Makes Python write the number of each signal to the pipe `fd` (-1: to no pipe). A forked child inherits the pipe, so the child's own
    # signals would end this process. Therefore `fd` is -1 in the child.
    def write_to(fd: int) -> None:
        if active:
            with contextlib.suppress(ValueError):  # raised if the fork is made outside of the main thread
                signal.set_wakeup_fd(fd, warn_on_full_buffer=False)

    os.register_at_fork(before=lambda: write_to(-1), after_in_parent=lambda: write_to(writable), after_in_child=lambda: write_to(-1))

    def listen() -> None:
        while number := os.read(readable, 1):
            now: object = signal.getsignal(number[0])
            if now is stop:
                stop(number[0], None)
        os.close(readable)

    threading.Thread(target=listen, daemon=True, name="early-signals").start()
    before = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    try:
        yield
    finally:
        active.clear()
        signal.set_wakeup_fd(before)
        os.close(writable)
