"""Hostile input, for `python -m tests.campaigns hostile`: malicious files and words, each given to the command.

    an input (hostile_inputs.py) -> its own process with limits on time and memory -> the command -> its effects are examined

A try passes if no part of the input was executed (that would create a file), and if the command ended within its limits: with one line and
exit code 2, or with success if the input is harmless. Output must have no control characters; a page must show the input escaped.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from moe.cli.main import main as moe
from moe.launch import exit_codes
from tests.campaigns.faults import Row
from tests.campaigns.hostile_inputs import CANARY, MARKUP, Input, inputs

LONGEST_S = 20.0
MOST_BYTES = 2**30  # bytes of memory in addition to the process's memory at the beginning
TINY = """
model: {num_layers: 2, d_model: 16, num_heads: 2, d_ff: 24, max_length: 12, moe_every: 2}
experts: {num_experts: 4}
router: {min_capacity: 2}
train: {steps: 2, global_batch: 4, eval_every: 0, eval_sequences: 4, save_every: 2, sample_tokens: 8, measure_speed: false, report: false}
optimizer: {warmup_steps: 0}
data: {path: text.txt}
"""


def rows(*, full: bool = False, rounds: int | None = None, only: str = "") -> Iterator[Row]:
    """Yield a row for each kind of input. `full`: files of full size, up to a gigabyte, which takes minutes."""
    import torch._dynamo  # noqa: F401  (the optimizer imports it, for seconds: here once, not in every fork)

    import moe.report.plots
    import moe.train.loop.trainer  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        given = [each for each in inputs(full=full) if only in each.kind or only in each.name]
        run = _trained(home) if any(each.run for each in given) else None
        for kind in dict.fromkeys(each.kind for each in given):
            of_kind = [each for each in given if each.kind == kind] * (rounds or 1)
            yield Row.of(kind, len(of_kind), partial(_numbered, of_kind, home, run))


def _trained(home: Path) -> Path:
    """Train a run of two steps, which some inputs modify. Return its folder."""
    place = home / "trained"
    place.mkdir()
    _surroundings(place)
    code, said, _, _ = carry_out(("train", "tiny.yaml", "--out", "run"), place, limit_s=120)
    if code:
        raise RuntimeError(f"the run that hostile inputs change did not train: {said}")
    return place / "run"


def _numbered(given: list[Input], home: Path, run: Path | None, number: int) -> tuple[str, float]:
    return once(given[number], home / "tried", run)


def once(given: Input, place: Path, run: Path | None) -> tuple[str, float]:
    """Give one input to the command, in the temporary folder `place`. run: the run to copy. Return (problem or "", seconds)."""
    place.mkdir()
    try:
        _surroundings(place)
        if run is not None and given.run:
            shutil.copytree(run, place / "run")
        given.make(place)
        code, said, seconds, grown = carry_out(given.words, place, limit_s=LONGEST_S * given.times, terminal=given.terminal)
        problem = _problem(given, place, code, said) or (f"{grown >> 20} MiB of memory" if grown > given.bytes else "")
        if code is None:
            problem = f"did not end in {LONGEST_S * given.times:g} s"
        return (f"{given.name}: {problem}" if problem else ""), seconds
    finally:
        shutil.rmtree(place)


def _surroundings(place: Path) -> None:
    (place / "tiny.yaml").write_text(TINY)
    (place / "text.txt").write_text("a text of some words\n" * 200)


def carry_out(
    words: tuple[str, ...],
    place: Path,
    *,
    limit_s: float,
    terminal: bool = False,
    cache: Path | None = None,
    tell: Callable[[int], object] = lambda pid: None,
) -> tuple[int | None, str, float, int]:
    """Run `moe *words` in a process in folder `place`. Return (exit code, or None after the time limit; output; seconds; peak bytes).

    `terminal`: its output is a terminal. `tell` is called with its process id.
    """
    output = place / ".output"
    started = time.perf_counter()
    reads, writes = pty.openpty() if terminal else (-1, os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644))
    pid = os.fork()
    if not pid:
        code = exit_codes.FAILED
        try:
            os.setsid()
            _enter(place, writes, cache or place.parent / "cache")
            code = moe(words)
            sys.stdout.flush()
        except BaseException as error:
            sys.stderr.write(f"Traceback: {type(error).__name__}: {error}\n")
        finally:
            os._exit(code)
    tell(pid)
    ended, status, usage = _wait(pid, limit_s)
    os.close(writes)
    if terminal:
        said = os.read(reads, 1 << 16).decode(errors="surrogateescape").replace("\r\n", "\n")
        os.close(reads)
    else:
        said = output.read_bytes().decode(errors="surrogateescape")
    grown = usage.ru_maxrss * 1024 - _resident()
    return (os.waitstatus_to_exitcode(status) if ended else None), said, time.perf_counter() - started, max(grown, 0)


def _enter(place: Path, output: int, cache: Path) -> None:
    """Set this forked process's working folder, output (a file descriptor), token cache and resource limits."""
    os.chdir(place)
    os.environ |= {"XDG_CACHE_HOME": str(cache), "HOME": str(place), "CUDA_VISIBLE_DEVICES": ""}
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, errors="backslashreplace")  # noqa: SIM115 (until it ends)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if Path("/proc/self/statm").exists() else 0
    if size:  # an input that would use all memory fails at this limit
        resource.setrlimit(resource.RLIMIT_AS, (size + 8 * MOST_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _wait(pid: int, limit_s: float) -> tuple[bool, int, resource.struct_rusage]:
    until = time.perf_counter() + limit_s
    while True:
        found, status, usage = os.wait4(pid, os.WNOHANG)
        if found:
            return True, status, usage
        if time.perf_counter() > until:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
            return False, status, usage
        time.sleep(0.005)


def _resident() -> int:
    """Return the resident bytes of this process. A forked child begins with them, so they are subtracted from the child's peak."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * resource.getpagesize() if statm.exists() else 0


def _problem(given: Input, place: Path, code: int | None, said: str) -> str:
    """Return the problem with the command's exit code, output and files after this input; "" if none."""
    lines = said.splitlines()
    if (place / CANARY).exists():
        return "it was executed"
    raw = next((c for c in said if not c.isprintable() and c not in "\n\t"), None)
    if raw is not None:
        return f"{raw!r} was printed as it is: {said[max(0, said.index(raw) - 60) :][:120]!r}"
    if "Traceback" in said:
        return lines[-1][:200]
    errors = [line for line in lines if line.startswith("error")]
    if code == exit_codes.BAD_INPUT and len(errors) == 1 and lines[-1] == errors[0] and len(errors[0]) < 2000:
        ended = not given.runs
    else:
        ended = code == exit_codes.DONE and given.runs is not False
    if not ended:
        return f"exit code {code}: {' | '.join(lines)[-300:]}"
    for page in place.rglob("*.html"):
        if re.search(MARKUP, page.read_text(errors="replace")):
            return f"{page.name} has the input's markup as it is"
    return ""
