"""Laws of the test suite: tests marked to run alone never overlap with other tests, and each test's seconds are recorded under xdist. The
code has no type errors."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.support.alone import Turns
from tests.support.times import Spent, by_file

ROOT = Path(__file__).resolve().parents[2]


def test_who_is_alone_waits_for_those_before_and_goes_before_those_after(tmp_path: Path) -> None:
    workers = [Turns(tmp_path) for _ in range(4)]
    order: list[str] = []

    def run(worker: int, name: str, alone: bool) -> None:
        with workers[worker].mine(alone=alone):
            order.append(name)

    def begin(worker: int, name: str, alone: bool) -> threading.Thread:
        thread = threading.Thread(target=run, args=(worker, name, alone))
        thread.start()
        time.sleep(0.1)
        return thread

    with workers[0].mine(alone=False):
        begin(1, "beside", False).join(10)  # two tests that may overlap
        waiting = [begin(2, "alone", True), begin(3, "after", False)]
        assert order == ["beside"]
    for thread in waiting:
        thread.join(10)
    assert order == ["beside", "alone", "after"]


def test_seconds_are_summed_by_file(tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text('{"tests": {"a.py::import": [2, 1.5, 0], "a.py::test[x::y]": [3, 0.5, 1], "b.py::test": [1, 0.25, 0]}}')
    assert by_file(str(path)) == {"a.py": [1, 5, 3], "b.py": [1, 1, 0.25]}
    start = Spent.now()
    while time.process_time() < start.here + 0.05:
        pass
    wall, here, children = Spent.now().since(start)
    assert min(wall, here) > 0.02 and children == pytest.approx(0, abs=0.05)


def test_every_pinned_package_runs_on_the_oldest_python() -> None:
    """No package pinned in constraints.txt needs a newer Python than pyproject.toml does; otherwise `make setup` would fail."""
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["requires-python"].removeprefix(">=")
    pinned = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.M)
    needs = {name: found.metadata.get("Requires-Python") or "" for name in pinned for found in metadata.distributions(name=name)}
    assert len(needs) > 50
    assert {name: needed for name, needed in needs.items() if f"{oldest}.0" not in SpecifierSet(needed)} == {}


@pytest.mark.long
def test_the_code_has_no_type_errors() -> None:
    ran = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stdout + ran.stderr
