"""Sets the clocks of real GPUs as an energy plan says, through NVML (package nvidia-ml-py). This needs root on most machines.

    with connect(ranks) as gpus:          raises NoControl without a driver, GPUs or permission to lock their clocks
        gpus.lock(rank, 1080)             called before an action
                                          at the end all locked clocks are released, even after an error

`rehearse` makes a plan's clock changes on the GPUs of all ranks from one process, without computing. In training, each rank connects to its
own GPU, and a `ClockSetter` sets the clock before each action.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from parallel.errors import counted
from parallel.pipeline.energy.energy import EnergyPlan
from parallel.pipeline.schedule import Action, Op, Watcher


class NoControl(RuntimeError):
    """Raised if GPU clocks cannot be set on this machine. The message is one line with the reason."""


@dataclass
class Gpus:
    """GPUs whose clocks can be locked, one for each rank. nvml: the module `pynvml`. handles: NVML's handle of each rank's GPU.
    locked: locked clock of each rank's GPU in MHz; 0: not locked."""

    nvml: Any
    handles: list[Any]
    locked: list[float]

    def lock(self, rank: int, mhz: float) -> bool:
        """Lock the GPU of `rank` to `mhz`. Return False, without a call to NVML, if it is already locked to `mhz`, or if `mhz` is 0
        (no clock is planned)."""
        if mhz in (0, self.locked[rank]):
            return False
        self.locked[rank] = mhz  # recorded before the call, so that `release` unlocks the GPU even if the call raises an error
        self.nvml.nvmlDeviceSetGpuLockedClocks(self.handles[rank], round(mhz), round(mhz))
        return True

    def free(self, rank: int) -> None:
        """Unlock the GPU of `rank`, so that the driver chooses its clock again."""
        if self.locked[rank]:
            self.nvml.nvmlDeviceResetGpuLockedClocks(self.handles[rank])
            self.locked[rank] = 0

    def release(self) -> None:
        """Unlock all GPUs. If unlocking one fails, unlock the others before raising the error."""
        with ExitStack() as stack:
            for rank in reversed(range(len(self.handles))):
                stack.callback(self.free, rank)

    def joules(self) -> list[float]:
        """Return for each GPU the joules that it has used since the driver was loaded."""
        return [self.nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000 for handle in self.handles]


@contextmanager
def connect(which: int | Sequence[str], nvml: Any = None) -> Iterator[Gpus]:
    """Return a context with Gpus, which are unlocked at its end. which: number of GPUs, or the UUIDs of the GPUs. nvml: the module; None:
    `pynvml`. Raises NoControl if GPUs do not exist, or if this process may not set their clocks. To find out, it locks each
    GPU to its highest clock and unlocks it."""
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
        gpus = _open(nvml, which)
        try:
            yield gpus
        finally:
            gpus.release()
    finally:
        nvml.nvmlShutdown()


def _open(nvml: Any, which: int | Sequence[str]) -> Gpus:
    try:
        if isinstance(which, int):
            count = nvml.nvmlDeviceGetCount()
            if count < which:
                raise NoControl(f"{counted(count, 'GPU')} here, {which} needed: one a rank")
            handles = [nvml.nvmlDeviceGetHandleByIndex(rank) for rank in range(which)]
        else:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in which]
        gpus = Gpus(nvml, handles, [0.0] * len(handles))
        for rank, handle in enumerate(gpus.handles):
            gpus.lock(rank, nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
            gpus.release()
    except nvml.NVMLError as error:
        raise NoControl(f"the clocks of these GPUs may not be set: {error} (setting them needs root)") from None
    return gpus


@dataclass
class ClockSetter(Watcher):
    """Watcher that locks a rank's GPU to the planned clock before each action of training, and unlocks it before an update.

    gpus: the rank's one GPU. mhz: action -> its planned clock; other actions keep the previous clock. settle: waits until the GPU has
    executed all queued kernels. on: False after the driver has refused a clock; then no clock is set. lost: called with the reason of the
    refusal."""

    gpus: Gpus
    mhz: Mapping[Action, float]
    settle: Callable[[], None]
    lost: Callable[[str], None]
    on: bool = True

    def before(self, action: Action) -> None:
        locked, mhz = self.gpus.locked[0], self.mhz.get(action, 0.0)
        unlocks = action.op is Op.U
        if not self.on or (not locked if unlocks else mhz in (0, locked)):
            return
        self.settle()
        try:
            if unlocks:
                self.gpus.free(0)
            else:
                self.gpus.lock(0, mhz)
        except self.gpus.nvml.NVMLError as error:
            self.on = False
            with suppress(self.gpus.nvml.NVMLError):
                self.gpus.release()
            self.lost(str(error))


@dataclass(frozen=True)
class Rehearsal:
    """Result of `rehearse`. changes: number of clock changes. latest_s: longest delay of a change after its planned time. joules: energy
    used by each GPU."""

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
    """Set the GPUs' clocks as in `steps` steps of the plan, without computation, and measure the delay of each change.
    sleep, now: replaced in tests."""
    begins = sorted(
        (span.start, rank, clock.mhz)
        for rank, spans in enumerate(plan.timeline.spans)
        for span, clock in zip(spans, plan.clocks[rank], strict=True)
    )
    before, start, changes, latest = gpus.joules(), now(), 0, 0.0
    for step in range(steps):
        for at, rank, mhz in begins:
            due = start + step * plan.timeline.makespan + at
            sleep(max(0.0, due - now()))
            if gpus.lock(rank, mhz):
                changes, latest = changes + 1, max(latest, now() - due)
    return Rehearsal(changes, latest, tuple(after - first for after, first in zip(gpus.joules(), before, strict=True)))
