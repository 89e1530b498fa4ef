"""Preemption, for `python -m tests.campaigns preemption`: a signal at any moment of a tiny run, which saves if it has made a step.

    SIGTERM, SIGINT, SIGUSR1, SIGHUP   x   starting, tokenizing, first step, forward, evaluation, saving, ending

A try passes if all of these are true. All ranks end within LIMIT_S with a documented exit code (75; 130 for Ctrl-C before training; 0 at
the end). They leave no process behind. No recorded step is repeated. A second start ends bitwise as the undisturbed run: losses, weights
and moments. The signal goes to all ranks, as `moe train` sends it; in every second try during training to one rank only. Before training,
a signal to one rank is not tested, because the other ranks wait for that rank.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from moe.launch import status
from moe.launch.exit_codes import DONE, INTERRUPTED, STOPPED
from moe.launch.verdict import verdict
from moe.records.metrics import read
from parallel.mesh.record import Record
from tests.campaigns.faults import Row
from tests.campaigns.hangs import warm_up
from tests.campaigns.lives import Attempt, Before, differ, left_behind, whole

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
MANY = 15  # tries for each of the 7 moments at which the signal comes: 105 in all
LIMIT_S = 60.0
EARLY = ("starting", "tokenizing")
MOMENTS = {
    "starting": "",
    "tokenizing": "preparing",
    "in the first step": "the forward pass",
    "in a step": "the backward pass",
    "in an evaluation": "evaluation",
    "in a save": "saving",
    "at the end": "ending",
}


def rows(*, full: bool, rounds: int | None, only: str) -> Iterator[Row]:
    """Yield a row for each moment at which a signal is sent."""
    torch.set_num_threads(1)
    tries = rounds or (MANY if full else 1)
    with tempfile.TemporaryDirectory(prefix="preemption-") as name:
        home = Path(name)
        warm_up(home, deepspeed=False)
        signals = Preemptions(home)
        for place, moment in enumerate(MOMENTS):
            row = f"signal: {moment}"
            if only in row:
                yield Row.of(row, tries, lambda number, moment=moment, place=place: signals.once(moment, number + place))  # type: ignore[misc]


class Preemptions:
    """Signals to a run on two ranks. The undisturbed run to compare with is made at the first signal."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.reference: dict[str, object] = {}

    def once(self, moment: str, number: int) -> tuple[str, float]:
        """Preempt one run at this moment. number: selects the signal. Return (problem or "", seconds until all ranks end)."""
        if not self.reference:
            if problem := whole(self.home, self.home / "whole", {}):
                return problem, 0.0
            self.reference = left_behind(self.home / "whole")
        asked = SIGNALS[number % len(SIGNALS)]
        out = self.home / f"{moment.replace(' ', '-')}-{number}"
        problem, took = self._stopped(out, moment, number, asked)
        problem = problem or whole(self.home, out, {}) or _redone(out) or differ(left_behind(out), self.reference)
        shutil.rmtree(out)
        return f"{asked.name}, number {number}: {problem}" if problem else "", took

    def _stopped(self, out: Path, moment: str, number: int, asked: signal.Signals) -> tuple[str, float]:
        draw, home = random.Random(f"{moment} {number}"), self.home
        alone = moment not in EARLY and number % 2 == 1
        heard, told = os.pipe()
        before = None if moment == "starting" else _at_phase(MOMENTS[moment], lambda: os.write(told, b"."), draw.uniform(0, 0.03))
        if moment == "tokenizing":  # a new cache folder, because an earlier run has cached the tokens
            home = out.with_suffix(".home")
            home.mkdir()
            shutil.copy(self.home / "text.txt", home)
        attempt = Attempt(home, out, {"data.path": str(self.home / "text.txt")}, before=before)
        os.close(told)
        if moment == "starting":
            time.sleep(draw.uniform(0, 0.3))
        else:
            os.read(heard, 1)
        os.close(heard)
        began = time.monotonic()
        attempt.send(asked, [draw.randrange(2)] if alone else None)
        stuck = attempt.end(LIMIT_S)
        took = time.monotonic() - began
        codes = attempt.codes()
        for rank, code in zip(attempt.ranks, codes, strict=True):
            rank.code = code
        worst = max((code or 0 for code in codes), key=abs)
        code, lines = verdict(
            status.read(out / status.NAME), attempt.ranks, attempt.world, worst, asked=asked, how="killed" if stuck else "ended"
        )
        if stuck:
            return f"ranks {stuck} had not ended after {LIMIT_S:g} s: {attempt.said()!r}", took
        allowed = {STOPPED, *((INTERRUPTED,) if moment in EARLY else ()), *((DONE,) if moment not in EARLY else ())}
        if code not in allowed:
            return f"exit code {code}: {lines}, {attempt.said()!r}", took
        left = attempt.orphans()
        return (f"processes {left} are left" if left else ""), took


def _at_phase(phase: str, act: object, delay_s: float) -> Before:
    """Return a `before` function that makes rank 0 call `act`, `delay_s` seconds after it first enters the phase of a step."""

    def before(rank: int) -> None:
        real, done = Record.enter, [rank != 0]

        def enter(self: Record, name: str, **kwargs: object) -> None:
            real(self, name, **kwargs)  # type: ignore[arg-type]
            if name.startswith(phase) and not done[0]:
                done[0] = True
                assert callable(act)
                threading.Timer(delay_s, act).start()

        Record.enter = enter  # type: ignore[method-assign, assignment]

    return before


def _redone(out: Path) -> str:
    """Return a line about recorded steps that the second start repeated; "" if none."""
    again = [line for line in read(out) if line.get("event") == "resumed" and line["redone_steps"]]
    return f"{again[0]['redone_steps']} steps were lost" if again else ""
