"""Where model states lie when they do not lie on the device that computes: host memory (cpu) or a disk (nvme).

    optimizer     master weights and moments; gradients come to the host and the step is made there     stages 1 to 3
    parameters    a rank's own part of the working weights; each is brought in for its module alone     stage 3

    gradients --down--> host: Adam on 1/N --up--> weights         2 P / N elements each way a step
    nvme: a group of states at a time      file --read--> buffer --step--> buffer --write--> file

The step on the host is torch's own fused AdamW, so the numbers are those of a run that is not offloaded. Reading and writing
is DeepSpeed's async_io. Sources: ZeRO-Offload (arXiv 2101.06840), ZeRO-Infinity (arXiv 2104.07857).
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

Place = Literal["none", "cpu", "nvme"]
GROUP_ELEMENTS = 2**22  # 16 MiB of each state: a disk is as fast with it as with more


@dataclass(frozen=True)
class Offload:
    """`path`: a folder on the disk for what is on nvme; each rank makes a folder of its own in it, which goes with the engine."""

    optimizer: Place = "none"
    parameters: Place = "none"
    path: str | None = None

    @property
    def on_disk(self) -> bool:
        return "nvme" in (self.optimizer, self.parameters)

    def folder(self) -> tempfile.TemporaryDirectory[str] | None:
        """Where this rank swaps: a new folder, deleted when the object is; those that killed runs left on this machine go first."""
        if not self.on_disk:
            return None
        here = f"moe-swap-{socket.gethostname()}-"
        for left in Path(self.path or ".").glob(f"{here}*"):
            if not psutil.pid_exists(int(left.name.removeprefix(here).partition("-")[0])):
                shutil.rmtree(left, ignore_errors=True)
        return tempfile.TemporaryDirectory(dir=self.path, prefix=f"{here}{os.getpid()}-", ignore_cleanup_errors=True)

    def sections(self, folder: str | None, *, largest: int) -> dict[str, Any]:
        """DeepSpeed's settings, as a part of `zero_optimization`; `largest`: elements of the largest swapped part of a parameter."""
        pin = torch.cuda.is_available()  # page-locked memory is for a GPU's copies
        found: dict[str, Any] = {}
        if self.optimizer != "none":
            found["offload_optimizer"] = {"device": self.optimizer, "pin_memory": pin}
        if self.parameters != "none":
            found["offload_param"] = {"device": self.parameters, "pin_memory": pin, "buffer_size": largest, "max_in_cpu": 0}
        for section in found.values():
            if section["device"] == "nvme":
                section["nvme_path"] = folder
        if self.optimizer == "nvme":  # what is brought in for a step at once, in four buffers: weights, gradients, two moments
            found["sub_group_size"] = max(largest, GROUP_ELEMENTS)
        return found
