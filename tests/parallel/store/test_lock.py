"""A folder is locked for one run at a time, also if processes start together, die, or remove or rename files and folders."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parallel.errors import BadInput
from parallel.store.lock import HELD, NAME, alone_in

ROUNDS = 50
REFUSED = 2


@pytest.fixture(autouse=True)
def _nobody_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HELD, raising=False)


def forked(work: Callable[[], int]) -> int:
    if pid := os.fork():
        return pid
    code = 99
    try:
        code = work()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def holder(folder: Path) -> int:
    """Start a process that holds the folder until it is killed. Return its id once it holds the folder."""
    up, told = os.pipe()

    def hold() -> int:
        with alone_in(folder):
            os.write(told, b".")
            time.sleep(60)
        return 0

    pid = forked(hold)
    os.close(told)
    assert os.read(up, 1) == b"."
    os.close(up)
    return pid


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    ended(pid)


def refused(folder: Path, by: int) -> None:
    with pytest.raises(BadInput, match=rf"^--out: got {re.escape(str(folder))}, in which process {by} on "), alone_in(folder):
        raise AssertionError("two runs hold it")


def test_of_starts_at_once_in_a_new_folder_one_holds_it_and_the_others_name_it(tmp_path: Path) -> None:
    """Four processes start again and again in a new folder: one holds it at a time, the others' errors name the holder. A holder removes
    the folder at its end."""
    out, alone = tmp_path / "runs" / "new", tmp_path / "alone"

    def begin(draw: random.Random) -> bool:
        """Return whether this process got the lock; if not, check that the error names the process that holds it."""
        time.sleep(draw.uniform(0, 0.004))
        try:
            with alone_in(out):
                os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
                time.sleep(draw.uniform(0, 0.004))
                alone.unlink()
        except BadInput as bad:
            assert re.search(r"in which process \d+ on \S+ trains", str(bad))
            return False
        return True

    def often(number: int) -> int:
        draw = random.Random(number)
        return min(sum(begin(draw) for _ in range(ROUNDS)), 90)

    held = [ended(pid) for pid in [forked(lambda number=number: often(number)) for number in range(4)]]  # type: ignore[misc]
    assert all(0 < count < 91 for count in held) and {*tmp_path.rglob("*")} <= {out, out.parent}


def test_a_folder_is_held_until_its_holder_ends_however_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    pid = holder(out)
    for _ in range(2):
        refused(out, pid)
    monkeypatch.setenv(HELD, str(out.resolve()))  # as in a rank whose launcher holds the lock
    with alone_in(out):
        pass
    monkeypatch.delenv(HELD)
    assert (out / NAME).exists()
    killed(pid)
    with alone_in(out):
        assert (out / NAME).read_text().startswith(f"process {os.getpid()} on ")
        refused(out, os.getpid())
        assert ended(forked(lambda: 0)) == 0
        refused(out, os.getpid())
    assert list(out.iterdir()) == []


def test_it_is_an_open_folder_that_is_held_and_no_name(tmp_path: Path) -> None:
    """The lock is on the open folder: it holds after the lock file is removed, and after the folder is renamed. If a new folder gets the
    old name, the holder removes nothing there."""
    out, moved = tmp_path / "run", tmp_path / "moved"
    pid = holder(out)
    (out / NAME).unlink()
    with pytest.raises(BadInput, match="in which another process trains"), alone_in(out):
        pass
    killed(pid)
    with alone_in(out):
        out.rename(moved)
        refused(moved, os.getpid())
        pid = holder(out)
    refused(out, pid)
    assert list(moved.iterdir()) == []
    killed(pid)


def test_only_what_the_lock_has_made_is_removed(tmp_path: Path) -> None:
    """The lock removes only its own file and empty folders that it made: no user's file named like it, no target of a link, no folder with
    files. A forked child removes nothing."""
    users = tmp_path / "users"
    users.mkdir()
    (users / NAME).write_text("a lock of something else")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / NAME).symlink_to(users / NAME)
    made = tmp_path / "made" / "run"
    for folder in (users, linked, made):
        with alone_in(folder):
            assert ended(forked(lambda folder=folder: _leaves(folder))) == REFUSED  # type: ignore[misc]
            if folder == made:
                (folder / "metrics.jsonl").touch()
    assert (users / NAME).read_text() == "a lock of something else" and (linked / NAME).is_symlink()
    assert [path.name for path in made.iterdir()] == ["metrics.jsonl"]


def _leaves(folder: Path) -> int:
    """In a forked child, leave the parent's lock. Then return REFUSED if the parent still holds the folder, else 0."""
    from parallel.store import lock

    for held in [each for each in _objects() if isinstance(each, lock._Held)]:
        held.leave()
    try:
        with alone_in(folder):
            return 0
    except BadInput:
        return REFUSED


def _objects() -> list[object]:
    import gc

    return gc.get_objects()


def test_a_folder_that_cannot_be_made_is_left_to_what_writes_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file" / "run", tmp_path / "file", Path("/proc/nowhere/run")):
        with alone_in(out):
            pass
