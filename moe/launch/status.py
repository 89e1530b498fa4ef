"""The status folder: each rank writes for its parent `moe train` how it ended, because launchers do not report all exit codes.

    <run folder>/.status/<rank>.json                {"exit": code, "pid", "error": message or null, "of_all", "repeats"}: see `leave`
    <run folder>/.status/started                    the launch's token: machines of a hostfile read it to check that they see this folder
    <run folder>/.status/launcher.json              exit codes by rank from torchrun, for ranks that wrote no file
    <run folder>/.status/machine-<token>-<n>.json   the exit code of the launcher on machine n of a hostfile, if not 0

The parent makes this folder after it has locked the run's folder, and removes it at the end of each launch. Without a parent `moe train`,
ranks write nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from moe.launch.processes import own_launch
from parallel.errors import BadInput

NAME, STARTED = ".status", "started"
TOO_EARLY = "a signal before training"  # "error" in the status file of a rank that a signal ended before training
_POLL_S = 0.1


def leave(out: Path, rank: int, code: int, error: str | None, *, of_all: bool = False, repeats: bool = False) -> None:
    """Write this rank's status file, as the rank's last action. of_all: the same error ended all ranks. repeats: the error would recur
    after a restart. If the run's folder was renamed or removed, it is made again, because the parent reads the file there. If the status
    folder belongs to another launch, nothing is written."""
    folder = out / NAME
    content = {"exit": code, "pid": os.getpid(), "error": error, "of_all": of_all, "repeats": repeats}
    with contextlib.suppress(OSError):
        if _is_of(folder, own_launch()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{rank}.json").write_text(json.dumps(content))


def empty(out: Path, token: str = "") -> Path:
    """Make the status folder for the launch `token`, or empty an earlier launch's folder. Return its path. Raises BadInput if it cannot be
    written."""
    folder = out / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            path.unlink()
        (folder / STARTED).write_text(f"{token}\n")
    except OSError as error:
        fix = "choose another --out, or free disk space"
        raise BadInput("--out", got=f"{out}: {error.strerror}", needed="a folder that can be written", fix=fix) from None
    return folder


@contextlib.contextmanager
def removed(out: Path, token: str) -> Iterator[Path]:
    """Make the status folder for the launch `token`, yield its path, and remove it at the end, also from a run's folder that was renamed
    meanwhile. Raises BadInput as `empty` does."""
    opened = os.open(out, os.O_RDONLY)
    try:
        yield empty(out, token)
    finally:
        delete(out / NAME, token)
        delete(Path(f"/proc/self/fd/{opened}", NAME), token)  # Linux: the same folder, even if renamed
        os.close(opened)


def delete(folder: Path, token: str) -> None:
    """Remove the status folder, unless it belongs to another launch than `token`."""
    if _is_of(folder, token):
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(folder: Path, token: str) -> bool:
    """Return whether the status folder belongs to the launch `token`. A folder without a token belongs to every launch."""
    try:
        return (folder / STARTED).read_text().strip() in ("", token)
    except (OSError, ValueError):
        return True


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """Return {rank: contents of its status file}. For a rank without a file, the contents are {"exit": code} if torchrun reported the
    code."""
    status: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(OSError, ValueError):
        status = {int(rank): {"exit": code} for rank, code in json.loads((folder / "launcher.json").read_text()).items()}
    for path in folder.glob("*.json"):
        if path.stem.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                status[int(path.stem)] = json.loads(path.read_text())
    return status


def machine(token: str, number: object) -> str:
    """Return the name of machine `number`'s file. It contains the token, because an earlier launch's launchers may still write files."""
    return f"machine-{token}-{number}.json"


def machines(folder: Path, token: str) -> dict[int, int]:
    """Return {machine's number: exit code of its launcher}, for the other machines with a failed launcher in the launch `token`."""
    codes: dict[int, int] = {}
    for path in folder.glob(machine(token, "*")):
        with contextlib.suppress(OSError, ValueError):  # the file is being written or has just been removed
            codes[int(path.stem.rpartition("-")[2])] = int(path.read_text())
    return codes


def wait_for(folder: Path, world: int, wait_s: float, *, no_more: Callable[[], bool]) -> None:
    """Wait for the status files of all ranks, which may appear late from other machines; at most `wait_s`, or until no_more() is True."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until and not no_more() and sum(path.stem.isdecimal() for path in folder.glob("*.json")) < world:
        time.sleep(_POLL_S)
