"""What `moe train` sets up for its ranks before torch loads: port, cores, devices, and where compiled extensions are kept.

Everything is decided from files and package metadata, because importing torch to ask would cost two seconds.
"""

from __future__ import annotations

import ctypes.util
import math
import os
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil

from moe.launch.processes import PARENT
from parallel.errors import BadInput

# A rank must take its place from its launcher, not from a job this command happens to run inside.
_OF_A_LAUNCHER = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "CROSS_RANK",
    "CROSS_SIZE",
)


def child_environment(environment: Mapping[str, str], nproc: int) -> dict[str, str]:
    """The environment of the launcher: cores divided among the ranks, DeepSpeed's device, the extensions' folder."""
    env = {
        name: value
        for name, value in environment.items()
        if name not in _OF_A_LAUNCHER and not name.startswith(("TORCHELASTIC_", "GROUP_"))
    }
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    env.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir(environment)))
    if not has_gpu(environment):
        env.setdefault("DS_ACCELERATOR", "cpu")
        env.pop("CUDA_VISIBLE_DEVICES", None)  # DeepSpeed's launcher would print that it ignores it
    env[PARENT] = str(os.getpid())
    remove_stale_locks(Path(env["TORCH_EXTENSIONS_DIR"]))
    return env


def usable_cores() -> int:
    """The cores this process may use: its affinity, and a container's quota where there is one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(cores, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return cores


def extensions_dir(environment: Mapping[str, str] = os.environ) -> Path:
    """Where torch keeps the extensions that DeepSpeed compiles: the user's cache, apart for every torch, DeepSpeed and Python.

    torch's own default has one folder for all versions, which is built again whenever two environments alternate.
    """
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    python = f"{sys.implementation.name}{sys.version_info.major}.{sys.version_info.minor}"
    return cache / "moe-parallel" / "extensions" / f"torch-{_version('torch')}-deepspeed-{_version('deepspeed')}-{python}"


def use_extensions_dir() -> None:
    """Have this process, and what it starts, find compiled extensions there, unless it was told of another place."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir()))


def missing_for_nvme(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What must be installed before DeepSpeed's async_io can be compiled; empty if it can be, or is."""
    folder = Path(environment.get("TORCH_EXTENSIONS_DIR") or extensions_dir(environment))
    if (folder / "async_io" / "async_io.so").exists() and ctypes.util.find_library("aio"):
        return []
    needed = {
        "libaio-dev": any(Path(root, "libaio.h").exists() for root in ("/usr/include", "/usr/local/include")),
        "g++": shutil.which("g++") is not None,
        "ninja-build": shutil.which("ninja") is not None or Path(sys.executable).with_name("ninja").exists(),
    }
    return [package for package, there in needed.items() if not there]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def remove_stale_locks(folder: Path) -> list[Path]:
    """Remove locks that a killed compilation left: torch would wait for them for ever. A lock in use is open in its process."""
    locks = [path for path in folder.glob("*/lock") if path.is_file()]
    stale = [path for path in locks if not _is_open(path)]
    for path in stale:
        path.unlink(missing_ok=True)
    return stale


def _is_open(path: Path) -> bool:
    wanted = path.resolve()
    for process in psutil.process_iter():
        try:
            if any(Path(os.readlink(handle)) == wanted for handle in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
        except OSError:  # it ended meanwhile, or belongs to another user
            continue
    return not sys.platform.startswith("linux")


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Whether torch will find a GPU; where that is uncertain, True, so that nothing is forced to the CPU."""
    if _version("torch").endswith("+cpu") or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return (
        any(Path(p).exists() for p in ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")) or sys.platform == "win32"
    )


def devices(environment: Mapping[str, str], nproc: int) -> str | None:
    """The first `nproc` of the GPUs that CUDA_VISIBLE_DEVICES allows, for DeepSpeed, which would take 0, 1, ... otherwise."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or not has_gpu(environment):
        return None
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    if len(ids) < nproc:
        raise BadInput(
            "--nproc", got=nproc, needed=f"at most the {len(ids)} GPUs of CUDA_VISIBLE_DEVICES={visible}", fix=f"--nproc {len(ids)}"
        )
    if not all(part.isdecimal() for part in ids):
        raise BadInput("CUDA_VISIBLE_DEVICES", got=visible, needed="numbers, for DeepSpeed's launcher", fix="--launcher torchrun")
    return ",".join(ids[:nproc])


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_from(environment: Mapping[str, str], *, local: bool = True) -> int:
    """MASTER_PORT if it is asked for and free, else any free port (said in one line). Raises BadInput."""
    asked = environment.get("MASTER_PORT")
    if asked is None:
        return free_port()
    if not asked.isdecimal() or not 0 < int(asked) < 65536:
        raise BadInput("MASTER_PORT", got=asked, needed="a port from 1 to 65535", fix="unset MASTER_PORT to have one chosen")
    if not local:  # the port is on another host
        return int(asked)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(asked)))
        except OSError as error:
            port = free_port()
            print(f"MASTER_PORT {asked} cannot be used ({error.strerror}): using {port}", file=sys.stderr, flush=True)
            return port
    return int(asked)
