"""Records the wall and processor seconds of each test: `pytest --times FILE.json`, also with several workers.

Processor seconds count the test process and every child that it waited for, so they hardly depend on other load of the machine. A module's
import is the first line of its file, `import`, except in workers that run the whole suite. The table by file is printed after the run:

    python -m tests.support.times FILE.json [BEFORE.json]
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

KEY = "times"


@dataclass(frozen=True)
class Spent:
    """Seconds that were used: wall time, processor time of this process (here), processor time of ended child processes."""

    wall: float
    here: float
    children: float

    @classmethod
    def now(cls) -> Spent:
        here, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return cls(time.perf_counter(), here.ru_utime + here.ru_stime, children.ru_utime + children.ru_stime)

    def since(self, start: Spent) -> list[float]:
        return [round(self.wall - start.wall, 3), round(self.here - start.here, 3), round(self.children - start.children, 3)]


class Times:
    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.tests: dict[str, list[float]] = {}
        self.start = time.perf_counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[Any]:
        start = Spent.now()
        report = yield
        if isinstance(collector, pytest.Module):
            self.tests[f"{collector.nodeid}::import"] = Spent.now().since(start)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        item.stash[STARTED] = Spent.now()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":  # the last report of a test, which is sent from its worker to the process that prints
            report.user_properties.append((KEY, Spent.now().since(item.stash[STARTED])))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, spent in report.user_properties:
            if name == KEY:
                self.tests[report.nodeid] = spent

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            self.path.write_text(json.dumps({"wall": round(time.perf_counter() - self.start, 1), "tests": self.tests}, indent=0))


STARTED = pytest.StashKey[Spent]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", metavar="FILE.json", help="write each test's seconds, of the clock and of processors, to this file")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--times"):
        config.pluginmanager.register(Times(path))


def by_file(path: str) -> dict[str, list[float]]:
    """Read a file of --times. Return test file -> [number of tests, wall seconds, processor seconds]."""
    files: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for test, (wall, here, children) in json.loads(Path(path).read_text())["tests"].items():
        row = files[test.split("::")[0]]
        row[0] += not test.endswith("::import")
        row[1] += wall
        row[2] += here + children
    return files


def main(paths: list[str]) -> None:
    """Print a row for each test file, the longest first. A second file of --times gives the column `before`."""
    tables = [by_file(path) for path in reversed(paths)]
    names = sorted({name for table in tables for name in table}, key=lambda name: -max(table[name][2] for table in tables))
    print("| file |" + " tests | wall s | cpu s |" * len(tables))
    print("|---|" + "---|---|---|" * len(tables))
    sums = [[sum(row[i] for row in table.values()) for i in range(3)] for table in tables]
    for name, rows in [*((name, [table[name] for table in tables]) for name in names), ("all", sums)]:
        print(f"| {name} |" + "".join(f" {n} | {wall:.1f} | {cpu:.1f} |" for n, wall, cpu in rows))


if __name__ == "__main__":
    main(sys.argv[1:])
