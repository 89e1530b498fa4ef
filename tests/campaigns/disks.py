"""Failing disks and folders, for `python -m tests.campaigns disks`: a tiny run on a full disk, in a deleted folder, or next to another run.

    tmpfs of a fixed size -> moe train -> one line about the disk -> the disk is enlarged -> moe train resumes from the newest save

A try passes if the run ends well or with one line about the folder or the cache, and if the next run resumes from the newest complete
checkpoint. Mounting disks of a fixed size needs root on Linux; those rows are skipped elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from moe.launch import exit_codes
from moe.records.metrics import METRICS, whole_lines
from parallel.errors import BadInput
from parallel.store import checkpoint, lock
from tests.campaigns.faults import Row
from tests.campaigns.hostile import TINY, carry_out

LONGEST_S = 180.0  # longest time of one run in seconds, on a busy machine
LARGEST_KIB = 640  # more than the whole run needs
FEW, MANY = 8, 64
_SIZE = "64m"


def rows(*, full: bool = False, rounds: int | None = None, only: str = "") -> Iterator[Row]:
    """Yield a row for each fault."""
    import torch._dynamo  # noqa: F401  (the optimizer imports it, for seconds: here once, not in every fork)

    import moe.train.loop.trainer  # noqa: F401

    sizes = rounds or (MANY if full else FEW)
    faults = {
        "a run's disk that fills, by size": (_fills, sizes, True),
        "a disk of the cache that fills, by size": (_cache_fills, max(4, sizes // 4), True),
        "a cache that cannot be written": (_cache_unwritable, 3, True),
        "a run's folder that vanishes while it trains": (partial(_goes, how=shutil.rmtree), 8 if full else 3, False),
        "a run's folder that is renamed while it trains": (partial(_goes, how=_rename), 8 if full else 3, False),
        "a second start in the folder of a run": (_second, 16 if full else 4, False),
        "a run submitted twice": (_twice, sizes, False),
        "a run that gets a signal and is started again": (_requeued, sizes, False),
        "two runs that tokenize the same text at once": (_together, 8 if full else 2, False),
    }
    why = why_not()
    for name, (once, tries, mounts) in faults.items():
        if only not in name:
            continue
        if mounts and why:
            yield Row(name, skipped=why)
            continue
        with tempfile.TemporaryDirectory() as folder:
            yield Row.of(name, tries, partial(_in_folder, once, Path(folder), tries))


def why_not() -> str:
    """Return the reason why this machine cannot mount a disk; "" if it can."""
    if not sys.platform.startswith("linux") or os.geteuid():
        return "it needs root on Linux"
    try:
        with tempfile.TemporaryDirectory() as folder, disk(Path(folder), "1m"):
            return ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"this system mounts no tmpfs ({error})"


@contextlib.contextmanager
def disk(place: Path, size: str, *more: str) -> Iterator[None]:
    """Mount a tmpfs of this size at `place` until the context exits. more: mount options. Raises CalledProcessError if not allowed."""
    place.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join((f"size={size}", *more)), "tmpfs", str(place)], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


def _in_folder(once: object, home: Path, tries: int, number: int) -> tuple[str, float]:
    """Call `once` in a new folder with a recipe and a text. Return its result: (problem or "", seconds)."""
    place = home / str(number)
    place.mkdir()
    (place / "tiny.yaml").write_text(TINY.replace("steps: 2,", "steps: 6,"))
    (place / "text.txt").write_text("a text of some words\n" * 2000)
    return once(place, number / tries)  # type: ignore[operator, no-any-return]


def _train(place: Path, *more: str, cache: Path | None = None) -> tuple[int | None, str, float]:
    code, said, seconds, _ = carry_out(("train", "tiny.yaml", *more), place, limit_s=LONGEST_S, cache=cache or place / "cache")
    return code, said, seconds


def _one_line(code: int | None, said: str, *about: str) -> str:
    """Return "" if a run that could not continue ended with one error line that has one of the words `about`; else the problem."""
    lines = [line for line in said.splitlines() if line.startswith("error")]
    if "Traceback" in said:
        return f"a traceback: {said.splitlines()[-1][:200]}"
    if code not in (exit_codes.BAD_INPUT, exit_codes.FAILED) or len(lines) != 1 or said.splitlines()[-1] != lines[0]:
        return f"exit code {code}: {' | '.join(said.splitlines())[-300:]}"
    return "" if any(word in lines[0] for word in about) else f"the line is about something else: {lines[0][:200]}"


def _saved(run: Path) -> int:
    """Return the newest step with a complete checkpoint; 0 if there is none."""
    for step, path in sorted(checkpoint.numbered(run / "checkpoints"), reverse=True):
        with contextlib.suppress(BadInput):
            checkpoint.verify(path)
            return step
    return 0


def _goes_on(place: Path, run: str, before: int) -> str:
    """Start the run again, now with enough space. Return "" if it resumes at step `before`, else the problem."""
    code, said, _ = _train(place, "--out", run)
    if code != exit_codes.DONE:
        return f"the next run: exit code {code}: {said[-300:]}"
    found = re.search(r"resumed from .* at step (\d+)", said)
    began = int(found[1]) if found else 0
    return "" if began == before else f"saved up to step {before}, and the next run began at {began}"


def _fills(place: Path, share: float) -> tuple[str, float]:
    size = 12 + int(LARGEST_KIB * share)
    with disk(place / "disk", f"{size}k"):
        code, said, seconds = _train(place, "--out", "disk/run")
        problem = "" if code == exit_codes.DONE else _one_line(code, said, "space", "room", "disk/run")
        before = _saved(place / "disk/run")
        subprocess.run(["mount", "-o", f"remount,size={_SIZE}", str(place / "disk")], check=True, capture_output=True)
        problem = problem or _goes_on(place, "disk/run", before)
    return (f"{size} KiB: {problem}" if problem else ""), seconds


def _cache_fills(place: Path, share: float) -> tuple[str, float]:
    size = 4 + int(200 * share)
    with disk(place / "cache", f"{size}k"):
        code, said, seconds = _train(place, "--out", "run")
        problem = "" if code == exit_codes.DONE else _one_line(code, said, "token cache")
        subprocess.run(["mount", "-o", f"remount,size={_SIZE}", str(place / "cache")], check=True, capture_output=True)
        problem = problem or _goes_on(place, "run", 6 if code == exit_codes.DONE else 0)
    return (f"{size} KiB: {problem}" if problem else ""), seconds


def _cache_unwritable(place: Path, share: float) -> tuple[str, float]:
    """Train with a token cache that is, by `share` (below 1/3, below 2/3, else), a read-only disk, a file, or a broken link. One line
    must say so. Return (problem or "", seconds of the run)."""
    cache = place / "cache"
    with contextlib.ExitStack() as stack:
        if share < 1 / 3:
            stack.enter_context(disk(cache, "1m", "ro"))
        elif share < 2 / 3:
            cache.write_text("a file")
        else:
            cache.symlink_to("/proc/nowhere")
        code, said, seconds = _train(place, "--out", "run")
    return _one_line(code, said, "token cache"), seconds


def _rename(run: Path, **_: bool) -> None:
    run.rename(run.with_name("renamed"))


def _second(place: Path, share: float) -> tuple[str, float]:
    """Start a run, and runs 2 and 3 in the same folder, run 2 share / 4 seconds after run 1 has the lock. Runs 2 and 3 must be refused, or
    find that run 1 has finished; run 1 must end well. Return (problem or "", seconds of run 1)."""
    ends: list[tuple[int | None, str, float]] = []
    first = threading.Thread(target=lambda: ends.append(_train(place, "--out", "run", "--train.steps", "40")))
    first.start()
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and not (place / "run" / lock.NAME).exists():
        time.sleep(0.002)
    time.sleep(share / 4)
    words = ("train", str(place / "tiny.yaml"), "--out", str(place / "run"))
    others = [carry_out(words, _beside(place, name), limit_s=LONGEST_S) for name in "bc"]
    first.join()
    refused = [problem for code, said, *_ in others if code != exit_codes.DONE and (problem := _one_line(code, said, "trains"))]
    if refused or ends[0][0] != exit_codes.DONE:
        return (refused or [f"the first: exit code {ends[0][0]}: {ends[0][1][-200:]}"])[0], ends[0][2]
    return "" if _saved(place / "run") == 40 else f"saved up to step {_saved(place / 'run')}", ends[0][2]


def _twice(place: Path, share: float) -> tuple[str, float]:
    """Start a run twice in a new folder, the second time share / 50 seconds after the first. One must end well; the other must be refused,
    or find that the run has finished. Return (problem or "", seconds of the longer start)."""
    words = ("train", str(place / "tiny.yaml"), "--out", str(place / "run"))
    places = [_beside(place, name) for name in "ab"]
    ends = _at_once([partial(carry_out, words, each, limit_s=LONGEST_S, cache=place / "cache") for each in places], after_s=share / 50)
    problems = [_one_line(code, said, "trains") for code, said, *_ in ends if code != exit_codes.DONE]
    if len(problems) == 2 or any(problems):
        return next(filter(None, problems), "both were refused"), max(end[2] for end in ends)
    left = [path.name for path in (place / "run").iterdir() if path.name.startswith(".")]
    problem = f"left behind: {left}" if left else "" if _saved(place / "run") == 6 else f"saved up to step {_saved(place / 'run')}"
    return problem, max(end[2] for end in ends)


def _requeued(place: Path, share: float) -> tuple[str, float]:
    """Send SIGTERM to a run `share` seconds after its first step, and start it again without waiting, as a queue may do, until it is not
    refused. It must resume from the signal's checkpoint. Return (problem or "", seconds of the second run)."""
    steps, run = ("--train.steps", "100000", "--train.save_every", "0"), place / "run"
    pids: list[int] = []
    first: list[tuple[int | None, str, float, int]] = []
    words = ("train", "tiny.yaml", "--out", "run", *steps)
    thread = threading.Thread(
        target=lambda: first.append(carry_out(words, place, limit_s=LONGEST_S, cache=place / "cache", tell=pids.append))
    )
    thread.start()
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until and not any(line.get("kind") == "train" for line in whole_lines(run / METRICS)):
        time.sleep(0.005)
    time.sleep(share)
    os.kill(pids[0], signal.SIGTERM)
    code: int | None = exit_codes.BAD_INPUT
    problem, tries, began = "", 0, time.monotonic()
    while code == exit_codes.BAD_INPUT and not problem and time.monotonic() - began < LONGEST_S:
        few = ("train", str(place / "tiny.yaml"), "--out", str(run), "--train.steps", str(_saved(run) + 3))
        code, said, *_ = carry_out(few, _beside(place, f"again-{tries}"), limit_s=LONGEST_S, cache=place / "cache")
        problem = _one_line(code, said, "trains") if code == exit_codes.BAD_INPUT else ""
        tries += 1
    thread.join()
    if problem:
        return problem, time.monotonic() - began
    if first[0][0] != exit_codes.STOPPED:
        return f"the first: exit code {first[0][0]}: {first[0][1][-200:]}", time.monotonic() - began
    if code != exit_codes.DONE:
        return f"the second: exit code {code}: {said[-200:]}", time.monotonic() - began
    stopped, resumed = (
        re.search(rf"{words} at step (\d+)", text) for words, text in (("stopped by a signal", first[0][1]), ("resumed from .*", said))
    )
    same = stopped and resumed and stopped[1] == resumed[1]
    return ("" if same else f"{stopped and stopped[0]}, then {resumed and resumed[0]}"), time.monotonic() - began


def _at_once(starts: list[Callable[[], Any]], *, after_s: float) -> list[Any]:
    """Call the functions in threads, each `after_s` seconds after the one before. Return their results."""
    ends: list[Any] = [None] * len(starts)
    threads = [threading.Thread(target=lambda at=at: ends.__setitem__(at, starts[at]())) for at in range(len(starts))]  # type: ignore[misc]
    for thread in threads:
        thread.start()
        time.sleep(after_s)
    for thread in threads:
        thread.join()
    return ends


def _beside(place: Path, name: str) -> Path:
    """Make the folder `name` in `place` with a link to the text, as the working folder of another start. Return it."""
    folder = place / name
    folder.mkdir()
    (folder / "text.txt").symlink_to(place / "text.txt")
    return folder


def _goes(place: Path, share: float, *, how: Callable[..., None]) -> tuple[str, float]:
    """Remove or rename a run's folder with `how`, `share` seconds after its first records. The run must end with one line about its
    folder, and not make it again. Return (problem or "", seconds from the removal to the end)."""
    run = place / "run"
    gone: list[float] = []

    def remove() -> None:
        until = time.monotonic() + LONGEST_S
        while time.monotonic() < until and not (run / "metrics.jsonl").exists():
            time.sleep(0.01)
        time.sleep(share)
        gone.append(time.perf_counter())
        how(run, ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    code, said, _ = _train(place, "--out", "run", "--train.steps", "100000", "--train.save_every", "20")
    ended = time.perf_counter()
    thread.join()
    left = f"{run.name} was made again" if how is _rename and run.exists() else ""
    return _one_line(code, said, str(run), "run") or left, ended - gone[0]


def _together(place: Path, _: float) -> tuple[str, float]:
    """Start two runs with the same text and token cache at the same time. Both must end well, with one set of token files."""
    ends: list[tuple[int | None, str, float]] = []
    homes = [place / "a", place / "b"]
    for home in homes:
        home.mkdir()
        shutil.copy(place / "tiny.yaml", home)
    words = ("--data.path", str(place / "text.txt"))
    threads = [threading.Thread(target=lambda h=home: ends.append(_train(h, *words, cache=place / "cache"))) for home in homes]  # type: ignore[misc]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bad = [f"exit code {code}: {said[-200:]}" for code, said, _ in ends if code != exit_codes.DONE]
    folders = [path for path in (place / "cache/moe-parallel/data").iterdir() if path.is_dir()]
    if not bad and len(folders) != 1:
        bad = [f"{len(folders)} sets of token files"]
    return (bad or [""])[0], max(seconds for _, _, seconds in ends)
