"""A replacement for NVML that needs no GPU, and records all locked clocks."""

from __future__ import annotations


class NvmlError(Exception):
    pass


class FakeNvml:
    """locked: GPU -> its locked clock now. set: (GPU, MHz) of every lock, in order. Calls raise NvmlError as the arguments say."""

    NVML_CLOCK_SM, NVMLError = 1, NvmlError

    def __init__(self, gpus: int = 4, *, allowed: bool = True, starts: bool = True) -> None:
        self.gpus, self.allowed, self.starts, self.open = gpus, allowed, starts, False
        self.locked: dict[int, int] = {}
        self.set: list[tuple[int, int]] = []

    def nvmlInit(self) -> None:  # noqa: N802 (NVML's own names from here on)
        if not self.starts:
            raise NvmlError("Driver Not Loaded")
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid not in {f"GPU-{index}" for index in range(self.gpus)}:
            raise NvmlError("Not Found")
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return 1530

    def nvmlDeviceSetGpuLockedClocks(self, handle: int, low: int, high: int) -> None:  # noqa: N802
        if not self.allowed:
            raise NvmlError("Insufficient Permissions")
        assert self.open and low == high
        self.locked[handle] = low
        self.set.append((handle, low))

    def nvmlDeviceResetGpuLockedClocks(self, handle: int) -> None:  # noqa: N802
        del self.locked[handle]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        return 1000 * len(self.set)
