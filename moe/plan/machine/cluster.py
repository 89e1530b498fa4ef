"""Description of a cluster for the planner: devices, nodes, and the links between them.

    Cluster    Device (device.py)  x  devices_per_node  x  nodes
    inside     links between the devices of a node: measured times of collectives by ranks and bytes, else latency + bytes / bandwidth
    between    network of a node, all its adapters together; groups that use it at the same time share it
    host, disk links from a device to its host's memory, and from a node to its disk

Cluster files are YAML, each number with its source. load_cluster("h100-8x4") is the file h100-8 with 4 nodes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from moe.plan.job.hashed import hashed_once
from moe.plan.machine.device import FILE, Count, Device, NotEmpty, NotNegative, Number, Positive, Text
from moe.plan.machine.program import Program
from parallel import yaml_text
from parallel.errors import BadInput, did_you_mean, some
from parallel.process.extensions import cache_dir
from parallel.store.files import read_text, user_path

FOLDER = Path(__file__).parent / "clusters"
Table = Annotated[dict[Count, Annotated[dict[int, NotNegative], NotEmpty]], NotEmpty]  # number of ranks -> bytes -> microseconds


def _of_program(key: str) -> str:
    if key not in {one.name for one in fields(Program)}:
        raise ValueError(f"one of {some(one.name for one in fields(Program))}")
    return key


@dataclass(frozen=True)
class Inside:
    """Links within a node.

    bus_gb_s: number of ranks -> GB/s that each rank sends (and receives) in a ring collective. sum_bus_gb_s: the same for all-reduces, if
    switches compute the sums, so that ranks send less. latency_us: of any collective. hop_us: latency from one device to the next.
    pair_gb_s: GB/s between two devices. times: collective -> number of ranks -> bytes -> measured microseconds.
    """

    __pydantic_config__ = FILE
    bus_gb_s: Annotated[dict[Count, Positive], NotEmpty] = field(hash=False)
    latency_us: NotNegative
    hop_us: NotNegative
    pair_gb_s: Positive
    sum_bus_gb_s: dict[Count, Positive] | None = field(default=None, hash=False)
    times: dict[Text, Table] = field(default_factory=dict, hash=False)

    def bus(self, ranks: int, *, sums: bool = False) -> float:
        """Bytes per second that each of `ranks` ranks sends in a ring collective. sums: True for an all-reduce."""
        table = self.sum_bus_gb_s if sums and self.sum_bus_gb_s else self.bus_gb_s
        known = min((n for n in table if n >= ranks), default=max(table))
        return table[known] * 1e9


@dataclass(frozen=True)
class Between:
    """Network of a node.

    node_gb_s: GB/s of the node in each direction. device_gb_s: largest GB/s of one device. share: fraction of both that collectives reach.
    exchange_share: fraction of this rate that an all-to-all reaches. latency_us, tree_us: latency of a step of a ring, and of a tree.
    """

    __pydantic_config__ = FILE
    node_gb_s: Positive
    device_gb_s: Positive
    share: Positive
    latency_us: NotNegative
    tree_us: NotNegative
    exchange_share: Positive = 0.7


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """A cluster in which every rank has one device, and nodes are filled with ranks in order.

    host_gb_s: from a device to its host's memory. host_adam_per_s: parameters that a host updates by AdamW. disk_gb_s: of a node's disk.
    cores: 0 for accelerators. Otherwise the devices are processes of a host, which share this number of cores and the device's memory.
    threads: number of cores of a process -> its speed compared with one core. program: measured properties of the training program on
    this cluster: field of Program (program.py) -> value. sources: where the numbers come from.
    """

    __pydantic_config__ = FILE
    name: Text
    device: Device
    devices_per_node: Count
    nodes: Count
    inside: Inside
    between: Between
    host_gb_s: Positive = 20.0
    host_adam_per_s: Positive = 4e9
    disk_gb_s: Positive = 3.0
    cores: Annotated[int, Number, Field(ge=0, le=1_000_000)] = 0
    threads: dict[Count, Positive] = field(default_factory=dict, hash=False)
    program: dict[Annotated[str, AfterValidator(_of_program)], NotNegative] = field(default_factory=dict, hash=False)
    sources: tuple[Text, ...] = ()

    def crowd(self, world: int) -> float:
        """Compute time of a rank if `world` ranks share the cores, divided by its time on one core. 1 for accelerators."""
        here = min(self.devices_per_node, world)
        if not self.cores:
            return 1.0
        if here > self.cores:
            return here / self.cores
        have = self.cores // here
        return 1 / max((speed for count, speed in self.threads.items() if count <= have), default=1.0)

    def memory_bytes(self, ranks: int | None = None) -> float:
        """Memory of one rank in bytes. ranks: number of ranks that share a CPU host's memory (default: one for each device)."""
        whole = self.device.memory_gib * 2**30
        return whole / (ranks or self.devices_per_node) if self.cores else whole

    @property
    def world(self) -> int:
        return self.devices_per_node * self.nodes

    def of(self, nodes: int) -> Cluster:
        """This cluster with another number of nodes."""
        return replace(self, nodes=nodes)

    def holding(self, ranks: int) -> Cluster:
        """This cluster with as many nodes as `ranks` ranks need. A CPU host instead gets as many processes."""
        if self.cores:
            return replace(self, devices_per_node=max(self.devices_per_node, ranks), nodes=1)
        return self.of(-(-ranks // self.devices_per_node))


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def some_clusters() -> str:
    """Some names of clusters, for a line of text."""
    return some(cluster_names(), rest="docs/parallel/planner_time.md")


def load_cluster(name: str) -> Cluster:
    """Load a shipped cluster by name (`NAMExN` for N nodes), or a cluster file. Raises BadInput for an unknown name, with known names."""
    path = user_path(name, what="cluster")
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise BadInput(
                "cluster",
                got=name,
                needed="a file that exists",
                fix=f"give its path, or one of {some_clusters()}",
            )
        return _read(path)
    known = cluster_names()
    if name in known:
        return _read(FOLDER / f"{name}.yaml")
    found = re.fullmatch(r"(.+)x([1-9]\d{0,5})", name)
    if found and found[1] in known:
        return _read(FOLDER / f"{found[1]}.yaml").of(int(found[2]))
    raise BadInput("cluster", got=name, needed=f"one of {some_clusters()}", fix=_nearest(name, known))


def _nearest(name: str, known: list[str]) -> str:
    """Return the fix for an unknown cluster name. For h100x8 or 8xh100, it proposes the shipped node with 8 of these devices."""
    counted = re.fullmatch(r"(?:(?P<before>\d+)[x*-])?(?P<device>.+?)(?:[x*:_-](?P<after>\d+))?", name.lower())
    assert counted is not None
    device, count = counted["device"], int(counted["after"] or counted["before"] or 8)
    of_device = {
        each: int(each.rpartition("-")[2]) for each in known if each.startswith(f"{device}-") and each.rpartition("-")[2].isdigit()
    }
    if of_device:
        node = min(of_device, key=lambda each: (count % of_device[each] != 0, len(each), each))
        nodes = max(1, -(-count // of_device[node]))
        return f"did you mean {node}{f'x{nodes}' if nodes > 1 else ''}?"
    near = did_you_mean(name.lower(), known)
    return f"did you mean {near}?" if near else f"take one of them, as {known[0]}x4 for 4 nodes, or a .yaml file"


def _read(path: Path) -> Cluster:
    what = f"cluster file {path.name}"
    try:
        mapping = yaml_text.load(read_text(path))
    except OSError as error:
        raise BadInput(what, got=error.strerror or error, needed="a file that can be read", fix="check the file") from None
    except yaml_text.NOT_YAML as wrong:
        line = getattr(wrong, "problem", None) or (str(wrong).splitlines() or ["values nested too deeply"])[0]
        raise BadInput(what, got=line, needed="YAML", fix="mend that line") from None
    try:
        return cluster_of(mapping, name=path.stem)
    except ValidationError as wrong:
        raise _explained(what, wrong.errors()) from None


def cluster_of(mapping: Any, *, name: str) -> Cluster:
    """Make a cluster from the mapping in its file. Raises pydantic's ValidationError for missing or unknown keys and for wrong values."""
    return TypeAdapter(Cluster).validate_python({"nodes": 1, **mapping, "name": name} if isinstance(mapping, dict) else mapping)


def _explained(what: str, errors: list[ErrorDetails]) -> BadInput:
    """Return the error of the cluster file `what` for one of pydantic's errors: an unknown key if there is one, otherwise the first."""
    unknown = "unexpected_keyword_argument"
    first = next((error for error in errors if error["type"] == unknown), errors[0])
    *section, key = (str(name) for name in first["loc"] or ("the file",) if name != "[key]")
    path, got, fix = ".".join((*section, key)), f": {first['input']!r}", f"write it as {FOLDER.name}/a100-80-8.yaml does"
    needed = re.sub(r"^(\w+ should (be|have)|Value error,) | after validation| or an instance of \w+", "", first["msg"])
    if first["type"] == "missing":
        needed, got = "this key", ": nothing"
    elif first["type"] == unknown:
        known = {"device": Device, "inside": Inside, "between": Between}.get("".join(section), Cluster)
        near = did_you_mean(key, [one.name for one in fields(known)])
        needed, got, fix = "the keys of a cluster", ", which no cluster has", f"did you mean {near}?" if near else "remove it"
    return BadInput(what, got=f"{path}{got}", needed=needed.replace("dictionary", "mapping"), fix=fix)


def mapping_of(cluster: Cluster) -> dict[str, Any]:
    """Mapping from which `cluster_of` makes this cluster again."""
    mapping = asdict(cluster)
    mapping.pop("name")
    mapping["device"]["attention"] = list(cluster.device.attention)
    mapping["sources"] = list(cluster.sources)
    return mapping


def measured_file() -> Path:
    """Return the path of the cluster file that `moe plan --calibrate` writes by default."""
    return cache_dir() / "machine.yaml"


def measured_cluster(device: str) -> Cluster | None:
    """Return the cluster that was measured on this machine. None if there is no file, or if it is another device's: several machines may
    share a home folder."""
    path = measured_file()
    try:
        found = load_cluster(str(path)) if path.is_file() else None
    except (BadInput, OSError):
        return None
    return found if found is not None and found.device.name == device else None
