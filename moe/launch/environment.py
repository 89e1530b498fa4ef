"""Environment variables and limits that `moe train` sets for its ranks: port, cores, devices, open files, folder of compiled extensions.

torch is not imported to find the values, because that would take two seconds: they come from files and package metadata.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from moe.launch.processes import PARENT, STDIN
from parallel.errors import BadInput, counted
from parallel.machine import usable_cores
from parallel.process.extensions import extensions_dir, remove_stale_locks, version_of

# Variables of an outer launcher, if one has started `moe train`. They are removed, so that a rank gets its number from its own launcher.
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_A_LAUNCHER = (*_RANK_NAMES, "CROSS_RANK", "CROSS_SIZE", STDIN)

# Variables that torch's libraries read when they are loaded. `python -m tests.measured environment` measures their effect on speed.
BEFORE_TORCH = {
    # Sizes of oneDNN's caches of compiled matrix products. With the default of 1,024 shapes, memory grows for hundreds of steps: in nearly
    # every step an expert has another number of rows, so its product has another shape.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    # Number of times that a waiting OpenMP thread spins before it sleeps. With GNU's default of 300,000, it occupies a core that other
    # threads need on a busy machine. With 0, each wait ends with a wake-up by the kernel, which is slower on an idle machine.
    "GOMP_SPINCOUNT": "10000",
    # Suppresses the lines that torch's profiler (`moe train --profile`) prints at its start and end.
    "KINETO_LOG_LEVEL": "9",
    # Allocates CUDA memory in segments that can grow. Experts' numbers of rows change in each step, which would fragment fixed segments.
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
# variable X of BEFORE_TORCH -> variable Y, which X would override: X is not set if the user has set Y
_INSTEAD = {"GOMP_SPINCOUNT": "OMP_WAIT_POLICY", "PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}

# Number of files that a rank must be allowed to open: a fixed number, plus a number for each rank that it may connect to. Measured in
# `moe train switch_tiny --nproc N --degrees.ep N`: at most 33 open files with 2 ranks, 41 with 4.
_OPEN_FILES, _OPEN_FILES_EACH = 128, 4


def child_environment(environment: Mapping[str, str], nproc: int | None) -> dict[str, str]:
    """Return `environment` for a launcher of `nproc` ranks, without the variables of an outer launcher. PARENT (this process's id) and
    the import path are added. If not set, these are added too: OMP_NUM_THREADS, the variables of BEFORE_TORCH, TORCH_EXTENSIONS_DIR, and,
    without a GPU, DS_ACCELERATOR. nproc None: ranks start on other machines, so of these only DS_ACCELERATOR is added, for a CPU build of
    torch."""
    outer = [name for name in environment if name in _OF_A_LAUNCHER or name.startswith(("TORCHELASTIC_", "GROUP_"))]
    env = {name: value for name, value in environment.items() if name not in outer}
    env |= {PARENT: str(os.getpid())} | import_path(environment)
    if nproc is None:
        if version_of("torch").endswith("+cpu"):
            env.setdefault("DS_ACCELERATOR", "cpu")
        return env
    env.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // nproc)))
    set_before_torch(env)
    env.setdefault("TORCH_EXTENSIONS_DIR", str(extensions_dir(environment)))
    if not has_gpu(environment):
        env.setdefault("DS_ACCELERATOR", "cpu")
        env.pop("CUDA_VISIBLE_DEVICES", None)  # otherwise DeepSpeed's launcher prints that it ignores this variable
    remove_stale_locks(Path(env["TORCH_EXTENSIONS_DIR"]))
    return env


def set_before_torch(environment: MutableMapping[str, str]) -> None:
    """Set the variables of BEFORE_TORCH that the user has not set. Ranks call this too, because they may have no parent `moe train`."""
    for name, value in BEFORE_TORCH.items():
        if _INSTEAD.get(name, name) not in environment:
            environment.setdefault(name, value)


def allow_open_files(world: int) -> None:
    """Raise the limit of open files, which child processes inherit, to the number that each of `world` ranks needs. Do nothing for a single
    rank, or if the limit is high enough. Raises BadInput if the system's hard limit is too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OPEN_FILES + _OPEN_FILES_EACH * world
    if world == 1 or soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        fix = f"raise nofile in /etc/security/limits.conf, or ulimit -n {needed} in the shell or batch script that lowers it"
        raise BadInput("ulimit -n", got=hard, needed=f"at least {needed} open files a process for {counted(world, 'rank')}", fix=fix)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make ranks import this project, and not a `parallel.py` or `moe.py` in the working folder.
    The folder of a checkout is put into PYTHONPATH. The folder of an installed package is not: PYTHONPATH comes before the standard
    library, so other packages in that folder could hide modules of the library."""
    safe = {"PYTHONSAFEPATH": "1"}
    here = Path(__file__).resolve().parents[2]
    if here.name in ("site-packages", "dist-packages"):
        return safe
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(here)]
    return safe | {"PYTHONPATH": os.pathsep.join([str(here), *others])}


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether torch may find a GPU. If uncertain, return True, because False would force training to the CPU."""
    if version_of("torch").endswith("+cpu") or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if environment.get("DS_ACCELERATOR") == "cpu":  # with this value ranks use no GPU (`gpus` in parallel/process/process.py)
        return False
    drivers = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
    return any(Path(p).exists() for p in drivers) or sys.platform == "win32"


def devices(environment: Mapping[str, str], nproc: int, *, launcher: str = "deepspeed") -> str | None:
    """Return the first `nproc` GPUs of CUDA_VISIBLE_DEVICES as "2,3", for DeepSpeed's launcher; None for torchrun, without a GPU, or if the
    variable is not set. Raises BadInput if it lists fewer than `nproc` GPUs, or UUIDs, which DeepSpeed's launcher does not accept."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or not has_gpu(environment):
        return None
    ids = list(dict.fromkeys(part.strip() for part in visible.split(",") if part.strip()))
    ids = ids[:1] if visible.startswith("MIG-") else ids  # a process can use only the first MIG device
    if len(ids) < nproc:
        needed = f"at most the {counted(len(ids), 'GPU')} of CUDA_VISIBLE_DEVICES={visible}"
        raise BadInput("--nproc", got=nproc, needed=needed, fix=f"--nproc {len(ids)}")
    if launcher == "torchrun":  # each rank selects its device itself (parallel/process/process.py)
        return None
    if not all(part.isdecimal() for part in ids):
        needed = "numbers: DeepSpeed's launcher accepts no UUIDs"
        raise BadInput("CUDA_VISIBLE_DEVICES", got=visible, needed=needed, fix="--launcher torchrun")
    return ",".join(ids[:nproc])


def devices_without(gone: int | None, environment: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Return {"CUDA_VISIBLE_DEVICES": the GPUs of `nproc` ranks except rank `gone`'s}; {} if `gone` is None or there are no GPUs."""
    if gone is None or not has_gpu(environment):
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(nproc)))
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids[:gone] + ids[gone + 1 :])}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_from(environment: Mapping[str, str], *, local: bool = True) -> int:
    """Return MASTER_PORT, or a free port if it is not set. If another program uses MASTER_PORT, print that and return a free port. local:
    whether rank 0 is on this machine; only then can this function check whether the port is in use. Raises BadInput if MASTER_PORT is not a
    port."""
    asked = environment.get("MASTER_PORT")
    if asked is None:
        return free_port()
    if not asked.isdecimal() or not 0 < int(asked) < 65536:
        raise BadInput("MASTER_PORT", got=asked, needed="a port from 1 to 65535", fix="unset MASTER_PORT to have one chosen")
    if not local:
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
