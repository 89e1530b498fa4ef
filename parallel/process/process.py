"""Start and end of the process group, for every launcher.

Reads RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which DeepSpeed's launcher and torchrun set. Without RANK it reads
the variables of SLURM or Open MPI. Without any of these variables, there is one process and no group. Only this file reads these
variables.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.errors import BadInput, cut
from parallel.machine import usable_cores
from parallel.mesh.debug_collectives import DEBUG, TIMEOUT_S, Agreement
from parallel.mesh.mesh import Axis, Degrees, Mesh
from parallel.mesh.record import Record
from parallel.mesh.traffic import Communicator
from parallel.process.libc import keep_freed_memory
from parallel.watch import watchdog
from parallel.watch.meet import NotMet, meet

_ADDRESS_OF = 0x8915  # Linux's SIOCGIFADDR: an interface's IPv4 address; IPv6 addresses are in /proc/net/if_inet6
_OF_NCCL = "NCCL_SOCKET_IFNAME"
LIMITS_S = {"gloo": 120.0, "nccl": 600.0}  # seconds that ranks wait for one another; 600 is torch's default

_NAMES = {  # number for World -> environment variables that can hold it; the first that is set counts
    "rank": ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
    "size": ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"),
    "local": ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "local_size": ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
}


@dataclass(frozen=True)
class World:
    """This process among the `size` processes of a run, of which `local_size` are on this machine. `place`: "cpu" or "cuda"; None: cuda if
    there is a GPU (`gpus`), else cpu."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    place: str | None = None

    @property
    def device(self) -> torch.device:
        place = self.place or ("cuda" if gpus() else "cpu")
        return torch.device(place, gpu_of(self.local_rank, gpus())) if place == "cuda" else torch.device(place)


def gpus() -> int:
    """Return the number of GPUs that this process may use; 0 if the environment variable DS_ACCELERATOR is cpu. All code calls this instead
    of torch's device_count, which ignores the variable."""
    hidden = os.environ.get("DS_ACCELERATOR") == "cpu"
    return torch.cuda.device_count() if not hidden and torch.cuda.is_available() else 0


def gpu_of(local_rank: int, visible: int) -> int:
    """Return the index of a rank's GPU among the `visible` GPUs of its process. A launcher shows all ranks the same GPUs, or each rank its
    own. If two ranks get the same GPU, parallel/watch/meet.py raises an error when the ranks start."""
    return local_rank % max(1, visible)


def read_environment(environment: Mapping[str, str] = os.environ) -> World:
    """Return this process's rank and world, from the variables in _NAMES. Raise BadInput if they are inconsistent.
    SLURM's variables are ignored in a job step of one task, such as a shell."""
    values = {what: next((environment[n] for n in names if n in environment), None) for what, names in _NAMES.items()}
    by_other = environment.get("SLURM_NTASKS", "1") != "1" or "OMPI_COMM_WORLD_RANK" in environment  # SLURM or Open MPI sets the rank
    if "RANK" not in environment and not by_other:
        if (size := environment.get("WORLD_SIZE") or "1") != "1":
            got, fix = (
                f"{size}, but RANK is not set, so this process would be rank 0",
                "start with moe train --nproc N, or unset WORLD_SIZE",
            )
            raise BadInput("WORLD_SIZE", got=got, needed="both WORLD_SIZE and RANK, or neither", fix=fix)
        return World()
    try:
        ranks = int(values["size"] or 1)
        rank, local = (0 if values[what] is None else int(values[what] or "nothing") for what in ("rank", "local"))
        world = World(rank, ranks, local, int(values["local_size"] or ranks))
        if not 0 <= world.rank < world.size or not 0 <= world.local_rank < world.local_size:
            raise ValueError("a rank beyond its world")
        return world
    except ValueError:
        needed = "whole numbers, each rank below the size of its world"
        said = 0 if values["rank"] is None else values["rank"] or "nothing"
        what = f"RANK, WORLD_SIZE, LOCAL_RANK on rank {said}"
        raise BadInput(what, got=values, needed=needed, fix="start with moe train --nproc N") from None


def start(world: World, *, timeout_s: float | None = None, end: watchdog.End | None = None) -> None:
    """Join the process group under a watchdog: NCCL on GPUs, gloo on CPUs. On a CPU, also let the C library keep freed memory for reuse.
    A single process joins no group. No product of fp32 tensors uses TF32 afterwards.

    `timeout_s`: seconds that ranks wait for one another (None: LIMITS_S); until the first step is done, watchdog.FIRST times as long.
    `end`: called with the watchdog's message before the watchdog ends this process. Raise NotMet if ranks are missing or do not connect,
    and BadInput if ranks share a GPU."""
    torch.set_float32_matmul_precision("highest")  # no TF32, which NVIDIA's containers allow by TORCH_ALLOW_TF32_CUBLAS_OVERRIDE
    if world.device.type == "cpu":
        keep_freed_memory()
    if world.size == 1 or dist.is_initialized():
        return
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _slurm_master() or "127.0.0.1"
    # under SLURM, take a port that depends on the job, because jobs can share a machine; otherwise take torch's default, 29500
    port = os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", "9500")) % 20000))
    if not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        what, needed = f"MASTER_PORT on rank {world.rank}", "a port from 1 to 65535, the same on all ranks"
        raise BadInput(what, got=port or "nothing", needed=needed, fix="set it to 29500")
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank))
    backend, device = "gloo", "cpu"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend, device = "nccl", str(torch.cuda.get_device_properties(world.device).uuid)
    limit_s = timeout_s or LIMITS_S[backend]
    problem, wait_s = wrong_interface(os.environ, backend), watchdog.FIRST * limit_s
    store = meet(world.rank, world.size, environment=os.environ, timeout_s=wait_s, problem=problem, device=device)
    found = interface_to(os.environ["MASTER_ADDR"])
    if found and backend == "gloo":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", found)
    elif found and found != "lo":  # NCCL must not use lo, to which MASTER_ADDR can resolve on rank 0's machine
        os.environ.setdefault(_OF_NCCL, f"={found}")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    record = Record(world.rank)
    record.enter("joining the process group", patience=watchdog.FIRST)
    holder = f"torchrun at {os.environ['MASTER_ADDR']}" if agent else "rank 0"
    watchdog.watch(watchdog.Watchdog(record, store, world_size=world.size, limit_s=limit_s, holder=holder, end=end))
    try:
        dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=timedelta(seconds=_last_resort_s()))
    except RuntimeError as error:
        raise _not_connected(error, world) from error


def _not_connected(error: RuntimeError, world: World) -> Exception:
    """Return the exception for ranks that reached the rendezvous store but cannot connect to each other: the watchdog's verdict if it has
    one, which is the same on all ranks; otherwise this rank's own error."""
    lines, where = [line.strip() for line in str(error).splitlines() if line.strip()], ""
    if world.device.type == "cpu":
        lines = [line.rpartition("] ")[2] for line in lines[:1]]  # gloo's first line, without file and line number
        if over := os.environ.get("GLOO_SOCKET_IFNAME"):
            where = f" over {over} (GLOO_SOCKET_IFNAME: it must be an interface that connects the ranks)"
    said = cut("; ".join(lines)) or type(error).__name__  # with NCCL the last lines have the reason
    here = f"rank {world.rank} on {socket.gethostname()}"
    own = ConnectionError(f"{here} reached the store but cannot connect to the other ranks{where}: {said}")
    return watchdog.ended_by(own) or NotMet(str(own))


def wrong_interface(environment: Mapping[str, str], backend: str = "gloo") -> str:
    """Return an error in one line if the backend's variable names an interface that this machine does not have, else "". GLOO_SOCKET_IFNAME
    lists names, all of which must exist. NCCL_SOCKET_IFNAME lists prefixes of names, of which one must exist; after "=" it lists whole
    names, and after "^" prefixes to avoid."""
    variable = "GLOO_SOCKET_IFNAME" if backend == "gloo" else _OF_NCCL
    asked, here = environment.get(variable, ""), [name for _, name in socket.if_nameindex()]
    nccl = backend == "nccl"
    named = [name for name in (asked.lstrip("=") if nccl else asked).split(",") if name]
    prefixes = nccl and not asked.startswith("=")
    found = [name for name in named if any(one.startswith(name) if prefixes else one == name for one in here)]
    if not named or (nccl and (found or asked.startswith("^"))) or found == named:
        return ""
    reaching = interface_to(environment["MASTER_ADDR"])
    by_it = f", which is {reaching} here" if reaching else ""
    return (
        f"{variable}: got {asked}, needed interfaces of this machine ({', '.join(here)}); "
        f"fix: unset it, then the interface that reaches MASTER_ADDR is used{by_it}"
    )


def interface_to(host: str) -> str | None:
    """Return the network interface through which this process reaches a host; None if the system does not say. If no interface is set, gloo
    takes the address of this machine's name, which on many machines is a loopback address."""
    try:
        family = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))  # UDP: sends nothing, but the system chooses the address from which it would send
            mine = probe.getsockname()[0]
            if family == socket.AF_INET6:
                return _with_address(ipaddress.IPv6Address(mine.partition("%")[0]))
            for _, name in socket.if_nameindex():
                asked = struct.pack("256s", name.encode())
                with contextlib.suppress(OSError):  # an interface without an IPv4 address
                    if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _ADDRESS_OF, asked)[20:24]) == mine:
                        return name
    except OSError:
        return None
    return None


def _with_address(address: ipaddress.IPv6Address) -> str | None:
    """Return the interface with this address, or None. A row of /proc/net/if_inet6: address in hexadecimal, four numbers, name."""
    table = Path("/proc/net/if_inet6")
    rows = [line.split() for line in table.read_text().splitlines()] if table.exists() else []
    return next((row[5] for row in rows if ipaddress.IPv6Address(int(row[0], 16)) == address), None)


def _last_resort_s() -> float:
    """Return torch's time limit for a group, in seconds. It is longer than the watchdog's limit, so that a hang is ended by the watchdog,
    with a message that says more."""
    watching = watchdog.current()
    return 600.0 if watching is None else watchdog.FIRST * watching.limit_s + 60


def _communicator(world: World) -> Communicator:
    """Make a new mesh's communicator. With `--debug-collectives` (MOE_DEBUG_COLLECTIVES), ranks compare their descriptions of each
    collective before it runs."""
    asked, watching = os.environ.get(DEBUG), watchdog.current()
    record = None if watching is None else watching.record
    if not asked or not dist.is_initialized():
        return Communicator(record=record)
    try:
        timeout_s = float(asked)
    except ValueError:
        raise BadInput(DEBUG, got=asked, needed="seconds to wait for a rank", fix=f"set it to {TIMEOUT_S:g}, or unset it") from None
    store = dist.distributed_c10d._get_default_store()
    return Communicator(Agreement(store, rank=world.rank, timeout_s=timeout_s), record)


def share_cores(world: World) -> None:
    """Divide this machine's cores among its ranks, unless OMP_NUM_THREADS is set. Threads in excess of the cores would only
    wait."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // world.local_size))


def connect(degrees: Degrees, world: World) -> Mesh:
    """Return this process's mesh with its process groups. Every rank must call it."""
    mesh = Mesh.of(degrees, world.rank, communicator=_communicator(world))
    wait = timedelta(seconds=_last_resort_s())

    def new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Make a process group. Only its members call this, because making all groups on each of 100,000 ranks would take too long."""
        made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=wait, use_local_synchronization=True)
        return made

    return mesh.connect(new_group, world=dist.group.WORLD if world.size > 1 else None)


def everyone(world: World) -> Axis:
    """Return the axis over all ranks, for use before a mesh exists. Every rank must call it."""
    return Axis("world", tuple(range(world.size)), world.rank, communicator=_communicator(world))


def stop() -> None:
    """Stop the watchdog and leave the process group."""
    watchdog.release()
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for every rank."""
    if dist.is_initialized():
        dist.barrier()


def _slurm_master() -> str | None:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        return None
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return nodes.split(",")[0]
    return listed.stdout.split()[0]
