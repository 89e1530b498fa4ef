"""Offload: model states are kept in host memory (cpu) or on a disk (nvme) instead of the computing device.

    optimizer     master weights and Adam's moments; gradients are copied to the host, which computes the step      ZeRO stages 1 to 3, FSDP
    parameters    a rank's shard of the model's weights; a weight is copied to the device while its module runs       stage 3

The host's step is torch's fused AdamW, so results equal those of a run without offload. DeepSpeed's async_io reads and writes the disk, a
group of states at a time. Sources: ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity (arXiv 2104.07857).
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

Place = Literal["none", "cpu", "nvme"]
GROUP_ELEMENTS = 2**22  # elements of a state that are read from a disk at a time, 16 MiB in fp32: larger reads are not faster


class SwapFolder(tempfile.TemporaryDirectory[str]):
    """A folder that is deleted with this object. path: the folder in which it is made. prefix: start of its name. While the object's
    process runs, a file lock marks the folder as in use. The process id in the folder's name is not enough, because other containers cannot
    check whether that process runs."""

    def __init__(self, path: Path, prefix: str) -> None:
        super().__init__(dir=path, prefix=prefix, ignore_cleanup_errors=True)
        self._open = os.open(self.name, os.O_RDONLY)
        fcntl.flock(self._open, fcntl.LOCK_SH)

    def __del__(self) -> None:
        os.close(self._open)

    @staticmethod
    def in_use(folder: Path) -> bool:
        """Return whether a running process of this machine has locked the folder."""
        opened = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(opened)
        return False


@dataclass(frozen=True)
class Offload:
    """Places in which optimizer states and parameters are stored. `path`: for nvme, the folder in which each rank makes a folder for one
    run."""

    optimizer: Place = "none"
    parameters: Place = "none"
    path: str | None = None

    @property
    def on_disk(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters)

    def folder(self) -> SwapFolder | None:
        """Make this rank's swap folder, deleted with the returned object; None without nvme. First delete folders of killed runs."""
        if not self.on_disk:
            return None
        prefix = f"moe-swap-{socket.gethostname()}-"
        mine = re.compile(rf"{re.escape(prefix)}(\d+)-\w+")  # matched in full, because another host's name may begin with this host's name
        for left in Path(self.path or ".").iterdir():
            named = mine.fullmatch(left.name)
            if named and not psutil.pid_exists(int(named[1])) and not SwapFolder.in_use(left):
                shutil.rmtree(left, ignore_errors=True)
        return SwapFolder(Path(self.path or "."), f"{prefix}{os.getpid()}-")

    def sections(self, folder: str | None, *, largest: int, device: torch.device) -> dict[str, Any]:
        """Return the entries for offload in DeepSpeed's configuration section `zero_optimization`. `folder`: swap folder on the disk.
        `largest`: number of elements of the largest shard. `device`: the model's device."""
        pin = device.type == "cuda"  # page-locked memory speeds up copies to and from a GPU
        found: dict[str, Any] = {}
        if self.optimizer != "none":
            found["offload_optimizer"] = {"device": self.optimizer, "pin_memory": pin}
        if self.parameters != "none":
            found["offload_param"] = {"device": self.parameters, "pin_memory": pin, "buffer_size": largest, "max_in_cpu": 0}
        for section in found.values():
            if section["device"] == "nvme":
                section["nvme_path"] = folder
        if self.optimizer == "nvme":
            found["sub_group_size"] = max(largest, GROUP_ELEMENTS)  # elements whose optimizer states are read from the disk at a time
        return found
