"""Profiles: time and energy of an action at each GPU clock, measured (read from a file) or computed by an assumed power model.

    {"idle_w": 40, "stages": [{"F": {"1530": {"s": 0.010, "j": 3.0}, "1080": {...}}, "B": {...}}, ...]}

A file has time (s, seconds) and energy (j, joules) of each stage's forward (F) and backward pass (B) at each clock (MHz). The two halves of
a split backward pass, input gradient (I) and weight gradient (W), are optional: each defaults to half of B.
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
    """A GPU clock, with the time in seconds and the energy in joules that an action takes at this clock."""

    mhz: float
    time: float
    energy: float


Profile = Callable[[int, Action], Sequence[Clock]]  # (rank, action) -> the possible clocks, each with the action's time and energy


@dataclass(frozen=True)
class PowerModel:
    """Assumed power P and time t of an action at clock f: P = static + dynamic (f / F) V^2, t = t_F (m + (1 - m) F / f). F is the full
    clock, and t_F the time at full clock. V is the voltage relative to full clock; it falls linearly to `lowest_voltage` at the lowest
    clock. m is `memory_share`, the fraction of the time that does not depend on the clock. The defaults resemble a V100 but are
    not measured."""

    static_w: float = 50
    dynamic_w: float = 250
    idle_w: float = 40
    lowest_mhz: int = 810
    full_mhz: int = 1530
    step_mhz: int = 90
    lowest_voltage: float = 0.65
    memory_share: float = 0.2

    def clocks(self, seconds: float) -> list[Clock]:
        """Return every clock, with time and energy of an action that takes `seconds` at full clock."""
        found = []
        for mhz in range(self.lowest_mhz, self.full_mhz + 1, self.step_mhz):
            voltage = self.lowest_voltage + (1 - self.lowest_voltage) * (mhz - self.lowest_mhz) / (self.full_mhz - self.lowest_mhz)
            time = seconds * (self.memory_share + (1 - self.memory_share) * self.full_mhz / mhz)
            found.append(Clock(mhz, time, time * (self.static_w + self.dynamic_w * mhz / self.full_mhz * voltage**2)))
        return found


def fastest(clocks: Sequence[Clock]) -> Clock:
    return min(clocks, key=lambda clock: (clock.time, clock.energy))


def least_energy_clock(clocks: Sequence[Clock], idle_power: float) -> Clock:
    """Return the Clock with the least energy above idle (see `energy_above_idle`). idle_power: watts of an idle GPU."""
    return min(clocks, key=lambda clock: (energy_above_idle(clock, idle_power), clock.time))


def energy_above_idle(clock: Clock, idle_power: float) -> float:
    """Return an action's joules at a clock minus the joules of an idle GPU in the same time. idle_power: watts."""
    return clock.energy - idle_power * clock.time


def efficient_clocks(clocks: Sequence[Clock], idle_power: float, action: Action) -> list[Clock]:
    """Return the Pareto-optimal clocks, the fastest first. A slower clock is kept if its `energy_above_idle` is less than that of all
    faster clocks. idle_power: watts of an idle GPU. Raises BadInput, which names `action`, if there is no clock."""
    if not clocks:
        raise BadInput(
            "profile", got=f"no clock for {action}", needed="at least one clock", fix="measure this action, or give it one clock"
        )
    kept: list[Clock] = []
    for clock in sorted(clocks, key=lambda clock: (clock.time, clock.energy)):
        if not kept or energy_above_idle(clock, idle_power) < energy_above_idle(kept[-1], idle_power):
            kept.append(clock)
    return kept


@dataclass(frozen=True)
class MeasuredProfile:
    """A Profile that was read from a file. stages: for each stage, op -> its clocks. All-reduces (S) and updates (U) take no time and no
    energy."""

    stages: tuple[Mapping[Op, Sequence[Clock]], ...]
    idle_w: float

    def __call__(self, rank: int, action: Action) -> Sequence[Clock]:
        found = self.stages[action.stage]
        if action.op in found:
            return found[action.op]
        if action.op in (Op.I, Op.W):
            return [Clock(clock.mhz, clock.time / 2, clock.energy / 2) for clock in found[Op.B]]
        return [Clock(0, 0, 0)]


def read_profile(path: str | Path) -> MeasuredProfile:
    """Read a profile file (format: top of this file). Raises BadInput if the file is not a valid profile."""
    needed = '{"idle_w": 40, "stages": [{"F": {"1530": {"s": 0.01, "j": 3.0}}, "B": {...}}]}'

    def wrong(got: str) -> BadInput:
        return BadInput("--profile", got=f"{path}: {got}", needed=needed, fix="give each stage its clocks (MHz), seconds and joules")

    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise wrong(getattr(error, "strerror", None) or "no JSON") from None
    stages = value.get("stages") if isinstance(value, dict) else None
    idle = value.get("idle_w", 0) if isinstance(value, dict) else 0
    if not isinstance(stages, list) or not stages or not all(isinstance(stage, dict) for stage in stages):
        raise wrong("no list of stages")
    if not is_number(idle):
        raise wrong(f"idle_w {idle!r}")
    found = []
    for at, stage in enumerate(stages):
        if not {"F", "B"} <= set(stage) <= {"F", "B", "I", "W"}:
            raise wrong(f"stage {at} with {', '.join(map(str, stage)) or 'nothing'}")
        found.append({Op(name): _clocks(clocks) for name, clocks in stage.items()})
        for op, clocks in found[-1].items():
            if not clocks:
                raise wrong(f"stage {at} {op} without a clock, or with a clock, time or energy that is no number above 0")
    return MeasuredProfile(tuple(found), float(idle))


def _clocks(value: Any) -> list[Clock]:
    """Parse one op's entry of a profile file into clocks; return an empty list if any part of the entry is wrong."""
    clocks = []
    for mhz, cost in value.items() if isinstance(value, dict) else ():
        known = isinstance(cost, dict) and mhz.isdecimal() and 0 < float(mhz) < 1e12
        if not known or not all(is_number(cost.get(key)) and cost[key] > 0 for key in "sj"):
            return []
        clocks.append(Clock(float(mhz), float(cost["s"]), float(cost["j"])))
    return clocks


def is_number(value: Any, *, below: float = 1e12) -> bool:
    """Return whether a value that JSON gave is a number of at least 0 and below `below`."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < below
