"""`@pytest.mark.alone`: while a marked test runs, no other worker (`pytest -n 2`) runs a test.

A marked test waits until no other test runs, and no other test begins before it has ended. There are two locks, so that no worker waits
forever: a worker that waits for the lock `machine` holds the lock `turn`, and later workers queue for `turn`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

MOST_WORKERS = 8  # each worker imports torch and collects every test, so more workers gain little


class Turns:
    """The two lock files, in a folder that all workers of a test run share. Each worker opens the files itself."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.turn, self.machine = (open(folder / name, "w") for name in ("turn", "machine"))  # noqa: SIM115 (open while the worker lives)

    @contextmanager
    def mine(self, *, alone: bool) -> Iterator[None]:
        fcntl.flock(self.turn, fcntl.LOCK_EX)
        try:
            fcntl.flock(self.machine, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self.turn, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self.machine, fcntl.LOCK_UN)


class Alone:
    def __init__(self, folder: Path) -> None:
        self.turns = Turns(folder)

    @pytest.hookimpl(wrapper=True, tryfirst=True)  # wraps the time limit, so that waiting for the turn does not count
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        with self.turns.mine(alone=item.get_closest_marker("alone") is not None):
            return (yield)


def folder_of(run: str) -> Path:
    return Path(tempfile.gettempdir()) / f"pytest-turns-{run}"


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(Alone(folder_of(config.workerinput["testrunuid"])))


def pytest_sessionfinish(session: pytest.Session) -> None:
    manager: Any = session.config.pluginmanager.get_plugin("dsession")
    if manager is not None:
        shutil.rmtree(folder_of(manager.nodemanager.testrunuid), ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: one worker more than the cores that this process may use, because tests wait for processes, files and signals."""
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) + 1)
