"""The folder in which ranks note how they ended, for the parent that started them: launchers lose exit codes.

    <run folder>/.status/<rank>.json                {"exit", "pid", "error", "of_all", "repeats"}
    <run folder>/.status/started                    the token of the launch: machines of a hostfile that see it see this folder
    <run folder>/.status/machine-<token>-<n>.json   the exit code of the launcher on the n-th of these machines, where it is not 0

The parent makes it when it holds the run's folder, and removes it at the end of each launch. Ranks of other launchers leave nothing.
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
    """Called in a rank, last of all. `of_all`: the error is what ended all ranks, and the same line on each of them; `repeats`: another
    start would end so too. If the run's folder was renamed or removed, one of its name is made, which goes when the parent has read it."""
    folder = out / NAME
    word = {"exit": code, "pid": os.getpid(), "error": error, "of_all": of_all, "repeats": repeats}
    with contextlib.suppress(OSError):
        if _is_of(folder, own_launch()):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{rank}.json").write_text(json.dumps(word))


def empty(out: Path, token: str = "") -> Path:
    """An empty folder for the ranks' files; those of an earlier run are removed. `token`: that of the launch. Raises BadInput."""
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
    """Remove the ranks' files of a launch that is over: not those of another one, for which this run's folder was renamed."""
    if _is_of(folder, token):
        shutil.rmtree(folder, ignore_errors=True)


def _is_of(folder: Path, token: str) -> bool:
    """Whether the files in it are those of this launch, as far as it says."""
    try:
        return (folder / STARTED).read_text().strip() in ("", token)
    except (OSError, ValueError):
        return True


def read(folder: Path) -> dict[int, dict[str, Any]]:
    """What each rank left; for ranks that left nothing, the exit codes that torchrun gave."""
    status: dict[int, dict[str, Any]] = {}
    with contextlib.suppress(OSError, ValueError):
        status = {int(rank): {"exit": code} for rank, code in json.loads((folder / "launcher.json").read_text()).items()}
    for path in folder.glob("*.json"):
        if path.stem.isdecimal():
            with contextlib.suppress(OSError, ValueError):
                status[int(path.stem)] = json.loads(path.read_text())
    return status


def machine(token: str, number: object) -> str:
    """The file's name for a machine: one of an earlier launch, which may end later than this begins, has another token."""
    return f"machine-{token}-{number}.json"


def machines(folder: Path, token: str) -> dict[int, int]:
    """The exit codes of the launchers on other machines that have ended otherwise than with 0."""
    codes: dict[int, int] = {}
    for path in folder.glob(machine(token, "*")):
        with contextlib.suppress(OSError, ValueError):  # or it is being written
            codes[int(path.stem.rpartition("-")[2])] = int(path.read_text())
    return codes


def wait_for(folder: Path, world: int, wait_s: float, *, no_more: Callable[[], bool]) -> None:
    """Wait until every rank has left word: what other machines write may be seen here late. `no_more`: to be asked whether to go on."""
    until = time.monotonic() + wait_s
    while time.monotonic() < until and not no_more() and sum(path.stem.isdecimal() for path in folder.glob("*.json")) < world:
        time.sleep(_POLL_S)
