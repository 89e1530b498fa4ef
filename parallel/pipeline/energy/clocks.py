"""Profiles: time and energy of an action at each clock, measured (read from a file) or computed by an assumed power model.

    {"idle_w": 40, "stages": [{"F": {"1530": {"s": 0.010, "j": 3.0}, "1080": {...}}, "B": {...}}, ...]}      s: seconds, j: joules

A file has F and B of each stage at each clock (MHz). If it has no I and W, each counts as half of B. Below a certain clock, the valley,
an action saves no more energy, because it takes longer. What counts is the energy above that of waiting (idle) for the same time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.schedule import Action, Op
from parallel.store.files import read_text


class Clock(NamedTuple):
    """One action at one clock: its time in seconds and its energy in joules."""

    mhz: float
    time: float
    energy: float


Profile = Callable[[int, Action], Sequence[Clock]]  # (rank, action) -> the action at each possible clock; a single one if it has no choice


@dataclass(frozen=True)
class PowerModel:
    """Assumed power and time at clock f, with full clock F and share m: P = static + dynamic (f / F) V^2, t = t_F (m + (1 - m) F / f).

    V, the voltage relative to that at full clock, falls linearly to `lowest_voltage` at the lowest clock. m (`memory_share`) is the
    fraction of the time that does not depend on the clock. The defaults are for a GPU like the V100, not measured. EnvPipe (USENIX ATC
    2023) sets the V100's clock between 800 and 1530 MHz.
    """

    static_w: float = 50
    dynamic_w: float = 250
    idle_w: float = 40
    lowest_mhz: int = 810
    full_mhz: int = 1530
    step_mhz: int = 90
    lowest_voltage: float = 0.65
    memory_share: float = 0.2

    def clocks(self, seconds: float) -> list[Clock]:
        """Return, for each clock, time and energy of an action that takes `seconds` at full clock."""
        found = []
        for mhz in range(self.lowest_mhz, self.full_mhz + 1, self.step_mhz):
            voltage = self.lowest_voltage + (1 - self.lowest_voltage) * (mhz - self.lowest_mhz) / (self.full_mhz - self.lowest_mhz)
            time = seconds * (self.memory_share + (1 - self.memory_share) * self.full_mhz / mhz)
            found.append(Clock(mhz, time, time * (self.static_w + self.dynamic_w * mhz / self.full_mhz * voltage**2)))
        return found


def fastest(clocks: Sequence[Clock]) -> Clock:
    """Return the Clock with the shortest time."""
    return min(clocks, key=lambda clock: (clock.time, clock.energy))


def valley(clocks: Sequence[Clock], idle_power: float) -> Clock:
    """Return the Clock with the least energy above idle (see `above_idle`). idle_power: watts of a rank that waits."""
    return min(clocks, key=lambda clock: (above_idle(clock, idle_power), clock.time))


def above_idle(clock: Clock, idle_power: float) -> float:
    """Return the joules of an action at a clock, less those of waiting for the same time."""
    return clock.energy - idle_power * clock.time


def useful(clocks: Sequence[Clock], idle_power: float, action: Action) -> list[Clock]:
    """Return the clocks from the fastest to the valley, without those that are slower but save nothing. Raises BadInput, which names
    `action`, if there is no clock."""
    if not clocks:
        raise BadInput("profile", got=f"no clock for {action}", needed="at least one clock", fix="measure it, or give it one clock")
    kept: list[Clock] = []
    for clock in sorted(clocks, key=lambda clock: (clock.time, clock.energy)):
        if not kept or above_idle(clock, idle_power) < above_idle(kept[-1], idle_power):
            kept.append(clock)
    return kept


@dataclass(frozen=True)
class Measured:
    """A measured Profile, equal on all ranks that hold a stage. stages: for each stage, F, B, I or W -> clocks. S and U take no time."""

    stages: tuple[Mapping[Op, Sequence[Clock]], ...]
    idle_w: float

    def __call__(self, rank: int, action: Action) -> Sequence[Clock]:
        found = self.stages[action.stage]
        if action.op in found:
            return found[action.op]
        if action.op in (Op.I, Op.W):
            return [Clock(clock.mhz, clock.time / 2, clock.energy / 2) for clock in found[Op.B]]
        return [Clock(0, 0, 0)]


def read_profile(path: str | Path) -> Measured:
    """Read a profile file (format: top of this file). Raises BadInput if the file is no profile."""
    needed = '{"idle_w": 40, "stages": [{"F": {"1530": {"s": 0.01, "j": 3.0}}, "B": {...}}]}'

    def wrong(got: str) -> BadInput:
        return BadInput("--profile", got=f"{path}: {got}", needed=needed, fix="write it so: MHz, seconds and joules, a stage an entry")

    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(getattr(error, "strerror", None) or "no JSON") from None
    stages = value.get("stages") if isinstance(value, dict) else None
    idle = value.get("idle_w", 0) if isinstance(value, dict) else 0
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise wrong("no list of stages")
    if not _number(idle, least=0):
        raise wrong(f"idle_w {idle!r}")
    found = []
    for at, stage in enumerate(stages):
        if not {"F", "B"} <= set(stage) <= {"F", "B", "I", "W"}:
            raise wrong(f"stage {at} with {', '.join(map(str, stage)) or 'nothing'}")
        found.append({Op(name): _clocks(clocks) for name, clocks in stage.items()})
        for op, clocks in found[-1].items():
            if not clocks:
                raise wrong(f"stage {at} {op} without a clock of a time and an energy above 0")
    return Measured(tuple(found), float(idle))


def _clocks(value: Any) -> list[Clock]:
    """Return the clocks of one operation in a profile file, in the file's order; an empty list if any entry is wrong."""
    clocks = []
    for mhz, cost in value.items() if isinstance(value, dict) else ():
        known = isinstance(cost, dict) and mhz.isdecimal() and 0 < float(mhz) < 1e12
        if not known or not all(_number(cost.get(key), above=0) for key in "sj"):
            return []
        clocks.append(Clock(float(mhz), float(cost["s"]), float(cost["j"])))
    return clocks


def _number(value: Any, *, least: float = 0, above: float | None = None) -> bool:
    right = isinstance(value, int | float) and not isinstance(value, bool)
    return right and (least <= value if above is None else above < value) and value < 1e12
