"""A plan's clocks on real GPUs through NVML (package nvidia-ml-py, not needed otherwise), for those who may set them.

    with connect(ranks) as gpus:          NoControl, in one line, without a driver, GPUs or the right to lock their clocks
        gpus.lock(rank, 1080)             what a rank does before an action; the same clock again costs nothing
                                          at the end every clock that was locked is given back, whatever happens

Setting clocks needs root on most machines, and changes them for everyone who uses the GPU: nothing here runs unless it is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from parallel.pipeline.energy import EnergyPlan


class NoControl(RuntimeError):
    """Why the clocks of this machine cannot be set, in one line."""


@dataclass
class Gpus:
    """One GPU a rank, by NVML's handles; `locked`: the clock of each, 0 for none."""

    nvml: Any
    handles: list[Any]
    locked: list[float]

    def lock(self, rank: int, mhz: float) -> bool:
        """Whether the clock had to be changed."""
        if mhz in (0, self.locked[rank]):
            return False
        self.locked[rank] = mhz  # first, so that a failure half way is given back too
        self.nvml.nvmlDeviceSetGpuLockedClocks(self.handles[rank], round(mhz), round(mhz))
        return True

    def release(self) -> None:
        """Give every clock back, also where that fails for one; then the first failure is raised."""
        failed = None
        for rank, mhz in enumerate(self.locked):
            if mhz:
                try:
                    self.nvml.nvmlDeviceResetGpuLockedClocks(self.handles[rank])
                    self.locked[rank] = 0
                except self.nvml.NVMLError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def joules(self) -> list[float]:
        """Energy of each since its driver was loaded."""
        return [self.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000 for handle in self.handles]


@contextmanager
def connect(ranks: int, nvml: Any = None) -> Iterator[Gpus]:
    """The first `ranks` GPUs. Raises NoControl where they are not there or their clocks may not be set (tried with the highest clock)."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise NoControl("no NVML here: pip install nvidia-ml-py, on a machine with NVIDIA GPUs") from None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise NoControl(f"NVML does not start: {error}") from None
    try:
        gpus = _open(nvml, ranks)
        try:
            yield gpus
        finally:
            gpus.release()
    finally:
        nvml.nvmlShutdown()


def _open(nvml: Any, ranks: int) -> Gpus:
    try:
        count = nvml.nvmlDeviceGetCount()
        if count < ranks:
            raise NoControl(f"{count} GPUs here, {ranks} needed: one a rank")
        gpus = Gpus(nvml, [nvml.nvmlDeviceGetHandleByIndex(rank) for rank in range(ranks)], [0.0] * ranks)
        for rank, handle in enumerate(gpus.handles):
            gpus.lock(rank, nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
            gpus.release()
    except nvml.NVMLError as error:
        raise NoControl(f"the clocks of these GPUs may not be set: {error} (it needs root)") from None
    return gpus


@dataclass(frozen=True)
class Rehearsal:
    """`changes` of clocks; `latest_s`: how late the latest was set; `joules` of each GPU meanwhile."""

    changes: int
    latest_s: float
    joules: tuple[float, ...]


def rehearse(
    plan: EnergyPlan,
    gpus: Gpus,
    *,
    steps: int = 1,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.perf_counter,
) -> Rehearsal:
    """Set each action's clock at its planned start, `steps` times over, and see how far behind the plan the driver is."""
    begins = sorted(
        (span.start, rank, clock.mhz)
        for rank, spans in enumerate(plan.timeline.spans)
        for span, clock in zip(spans, plan.clocks[rank], strict=True)
    )
    before, start, changes, latest = gpus.joules(), now(), 0, 0.0
    for step in range(steps):
        for at, rank, mhz in begins:
            due = start + step * plan.timeline.makespan + at
            if due > now():
                sleep(due - now())
            if gpus.lock(rank, mhz):
                changes, latest = changes + 1, max(latest, now() - due)
    return Rehearsal(changes, latest, tuple(after - first for after, first in zip(gpus.joules(), before, strict=True)))
