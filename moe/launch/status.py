"""The folder in which ranks write their status at the end, for the parent that started them: launchers lose exit codes.

    <run folder>/.status/<rank>.json                {"exit", "pid", "error", "of_all", "repeats"}
    <run folder>/.status/started                    the token of the launch: machines of a hostfile that see it see this folder
    <run folder>/.status/machine-<token>-<n>.json   the exit code of the launcher on the n-th of these machines, if not 0

The parent makes it when it holds the run's folder, and removes it at the end of each launch. Ranks of other launchers write nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe.launch.processes import own_launch
from parallel.errors import BadInput

NAME, STARTED = ".status", "started"
NOTHING_LOST = "nothing is lost: start it again"
TOO_EARLY = "a signal before training"  # the error of a rank that had nothing to save
_POLL_S = 0.1


def leave(out: Path, rank: int, code: int, error: str | None, *, of_all: bool = False, repeats: bool = False) -> None:
    """Write this rank's status, as its last action. `of_all`: the error ended all ranks, with the same line on each. `repeats`: another
    start would fail too. If the run's folder was renamed or removed, a new one is made, which the parent removes after reading."""
    folder = out / NAME
    word = {"exit": code, "pid": os.getpid(), "error": error, "of_all": of_all, "repeats": repeats}
    with contextlib.suppress(OSError):
        if _is_of(folder, own_launch()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{rank}.json").write_text(json.dumps(word))


def empty(out: Path, token: str = "") -> Path:
    """Make the folder for the ranks' status, without files of an earlier run. `token`: of the launch. Raises BadInput."""
    folder = out / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.json"):
            path.unlink()
        (folder / STARTED).write_text(f"{token}\n")
    except OSError as error:
        raise BadInput(
            "--out", got=f"{out}: {error.strerror}", needed="a folder that can be written", fix="choose another --out, or free disk space"
        ) from None
    return folder


def delete(folder: Path, token: str) -> None:
    """Remove the status of a finished launch, but not of another launch, for which this run's folder was renamed."""
    if _is_of(folder, token):
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(folder: Path, token: str) -> bool:
    """Return whether the folder belongs to this launch, or names none."""
    try:
        return (folder / STARTED).read_text().strip() in ("", token)
    except (OSError, ValueError):
        return True


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """Return each rank's status; for ranks without one, the exit codes from torchrun."""
    status: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(OSError, ValueError):
        status = {int(rank): {"exit": code} for rank, code in json.loads((folder / "launcher.json").read_text()).items()}
    for path in folder.glob("*.json"):
        if path.stem.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                status[int(path.stem)] = json.loads(path.read_text())
    return status


def machine(token: str, number: object) -> str:
    """Return the name of a machine's file. A machine of an earlier launch, which may end after this one begins, has another token."""
    return f"machine-{token}-{number}.json"


def machines(folder: Path, token: str) -> dict[int, int]:
    """Return nonzero exit codes of the launchers on other machines."""
    codes: dict[int, int] = {}
    for path in folder.glob(machine(token, "*")):
        with contextlib.suppress(OSError, ValueError):  # or it is being written
            codes[int(path.stem.rpartition("-")[2])] = int(path.read_text())
    return codes


def wait_for(folder: Path, world: int, wait_s: float, *, no_more: Callable[[], bool]) -> None:
    """Wait until every rank's status is visible: files from other machines may appear late. `no_more` returns True to abort."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until and not no_more() and sum(path.stem.isdecimal() for path in folder.glob("*.json")) < world:
        time.sleep(_POLL_S)
