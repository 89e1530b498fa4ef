"""The environment that `moe train` gives its ranks before torch is imported: port, cores, devices, open files, folder of extensions.

All values come from files and package metadata, because importing torch to ask would take two seconds.
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

# Variables of an outer job's launcher. They are removed, because a rank must take its number from its own launcher.
_RANK_NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_A_LAUNCHER = (*_RANK_NAMES, "CROSS_RANK", "CROSS_SIZE", STDIN)

# Variables that torch's libraries read when loaded. The values for speed were measured: `python -m tests.measured environment`.
BEFORE_TORCH = {
    # By default two caches keep compiled matrix products of 1,024 shapes each. They would grow for hundreds of steps, because an expert's
    # number of rows, and so the shape, is new at nearly every step.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32",
    "LRU_CACHE_CAPACITY": "32",
    # An OpenMP thread that waits spins this many times, then sleeps. On a busy machine GNU's default of 300,000 is too long: the thread
    # blocks the core that the awaited thread needs. 0 is slower on an idle machine, where every thread would have to be woken.
    "GOMP_SPINCOUNT": "10000",
    # Keeps torch's profiler (`moe train --profile`) from printing a line when it starts and stops.
    "KINETO_LOG_LEVEL": "9",
}

# Open files that one rank may need: for libraries, plus connections for each rank of the run. Measured: 33 with 2 ranks, 63 with 4.
_OPEN_FILES, _OPEN_FILES_EACH = 128, 3


def child_environment(environment: Mapping[str, str], nproc: int | None) -> dict[str, str]:
    """Return the launcher's environment: cores divided among `nproc` ranks, DeepSpeed's device, and the folder of compiled extensions.

    nproc None: ranks start on other machines. Their cores and devices are unknown here; they are assumed to have the same build of torch.
    """
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
    """Set the variables of BEFORE_TORCH that the user has not set. Ranks call it too, because `moe train` may not be their parent."""
    for name, value in BEFORE_TORCH.items():
        if name != "GOMP_SPINCOUNT" or "OMP_WAIT_POLICY" not in environment:  # otherwise GOMP_SPINCOUNT would override OMP_WAIT_POLICY
            environment.setdefault(name, value)


def allow_open_files(world: int) -> None:
    """Raise the limit of open files, of this process and its children, to what a rank needs in a run of `world` ranks. Raises BadInput."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OPEN_FILES + _OPEN_FILES_EACH * world
    if world == 1 or soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        fix = f"raise nofile in /etc/security/limits.conf, or ulimit -n {needed} in the shell or batch script that lowers it"
        raise BadInput("ulimit -n", got=hard, needed=f"at least {needed} open files a process for {world} ranks", fix=fix)
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def import_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return {variable: value} so that ranks import this project, not a `parallel.py` or `moe.py` in the working folder.

    PYTHONPATH gets the folder of a checkout that is not installed. The folder of an installed package is not added: PYTHONPATH comes
    before the standard library, so other packages in that folder could hide modules of the library.
    """
    safe = {"PYTHONSAFEPATH": "1"}
    here = Path(__file__).resolve().parents[2]
    if here.name in ("site-packages", "dist-packages"):
        return safe
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(here)]
    return safe | {"PYTHONPATH": os.pathsep.join([str(here), *others])}


def has_gpu(environment: Mapping[str, str]) -> bool:
    """Return whether torch will find a GPU. If that is uncertain, True, so that nothing is forced to the CPU."""
    if version_of("torch").endswith("+cpu") or environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    drivers = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/kfd", "/dev/dxg")
    return any(Path(p).exists() for p in drivers) or sys.platform == "win32"


def devices(environment: Mapping[str, str], nproc: int) -> str | None:
    """Return the first `nproc` GPUs of CUDA_VISIBLE_DEVICES, for DeepSpeed, which would otherwise take 0, 1, ... . Raises BadInput."""
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if not visible or not has_gpu(environment):
        return None
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    if len(ids) < nproc:
        needed = f"at most the {counted(len(ids), 'GPU')} of CUDA_VISIBLE_DEVICES={visible}"
        raise BadInput("--nproc", got=nproc, needed=needed, fix=f"--nproc {len(ids)}")
    if not all(part.isdecimal() for part in ids):
        raise BadInput("CUDA_VISIBLE_DEVICES", got=visible, needed="numbers, for DeepSpeed's launcher", fix="--launcher torchrun")
    return ",".join(ids[:nproc])


def devices_without(gone: int | None, environment: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Return CUDA_VISIBLE_DEVICES (nproc GPUs) without the GPU of rank `gone`, as {name: value}; {} without such a rank or GPUs."""
    if gone is None or not has_gpu(environment):
        return {}
    visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(nproc)))
    ids = [part.strip() for part in visible.split(",") if part.strip()]
    return {"CUDA_VISIBLE_DEVICES": ",".join(ids[:gone] + ids[gone + 1 :])}


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def port_from(environment: Mapping[str, str], *, local: bool = True) -> int:
    """Return MASTER_PORT if it is set, otherwise a free port. If MASTER_PORT is in use, print that and return a free port.

    local: rank 0 is on this machine; on another one, MASTER_PORT is not checked. Raises BadInput for a value that is no port.
    """
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
