"""Description of a cluster for the planner: devices, nodes, and the links between them.

    Cluster    `nodes` nodes of `devices_per_node` Devices (device.py)
    inside     links within a node. A collective takes its measured time if it has been measured, otherwise latency + bytes / bandwidth
    between    all network cards of a node together, shared by the groups of ranks that send at the same time
    host, disk links from a device to its host's memory, and from a node to its disk

Cluster files are YAML, each number with its source. load_cluster("h100-8x4") loads the file h100-8 with 4 nodes, and load_cluster("h100-2")
loads 2 devices of one of its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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

    bus_gb_s: number of ranks -> bus bandwidth, GB/s that each rank sends in a ring collective. sum_bus_gb_s: bus bandwidth of all-reduces
    that switches compute (NVLink SHARP); None: `bus_gb_s`. latency_us: latency of a collective. hop_us: latency of a message between two
    devices. pair_gb_s: GB/s from one device to another. times: name of a collective -> measured times.
    """

    __pydantic_config__ = FILE
    bus_gb_s: Annotated[dict[Count, Positive], NotEmpty] = field(hash=False)
    latency_us: NotNegative
    hop_us: NotNegative
    pair_gb_s: Positive
    sum_bus_gb_s: dict[Count, Positive] | None = field(default=None, hash=False)
    times: dict[Text, Table] = field(default_factory=dict, hash=False)

    def bus(self, ranks: int, *, sums: bool = False) -> float:
        """Bus bandwidth in bytes per second: the rate at which each of `ranks` ranks sends in a ring collective. sums: whether the
        collective is an all-reduce."""
        table = self.sum_bus_gb_s if sums and self.sum_bus_gb_s else self.bus_gb_s
        known = min((n for n in table if n >= ranks), default=max(table))
        return table[known] * 1e9


@dataclass(frozen=True)
class Between:
    """Network between nodes.

    node_gb_s: GB/s of all network cards of a node in one direction. device_gb_s: GB/s that one device can send at most.
    share: fraction of these rates that collectives reach. An all-to-all reaches the fraction share * exchange_share.
    latency_us: latency of one step of a ring collective. tree_us: latency of one step of a tree collective.
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

    host_gb_s: GB/s from a device to its host's memory. host_adam_per_s: parameters that AdamW on a host updates per second.
    disk_gb_s: GB/s of a node's disk. cores: 0 for accelerators. Otherwise each device is a process on a CPU host; the processes share this
    number of cores and `device.memory_gib`. threads: number of cores of a process -> its speed / the speed of one core.
    program: field of Program (program.py) -> value measured on this cluster. sources: texts that say where the numbers come from.
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
        """Factor on a rank's compute time if `world` ranks share the cores of a CPU host. 1: the rank has one core of its own. Always 1 for
        accelerators."""
        here = min(self.devices_per_node, world)
        if not self.cores:
            return 1.0
        if here > self.cores:
            return here / self.cores
        have = self.cores // here
        return 1 / max((speed for count, speed in self.threads.items() if count <= have), default=1.0)

    def memory_bytes(self, ranks: int | None = None) -> float:
        """Memory of one rank in bytes. On a CPU host, `ranks` ranks share the host's memory; None: devices_per_node ranks."""
        whole = self.device.memory_gib * 2**30
        return whole / (ranks or self.devices_per_node) if self.cores else whole

    @property
    def world(self) -> int:
        return self.devices_per_node * self.nodes

    def of(self, nodes: int) -> Cluster:
        """Return this cluster with another number of nodes."""
        return replace(self, nodes=nodes)

    def holding(self, ranks: int) -> Cluster:
        """Return this cluster with as many nodes as `ranks` ranks need. A CPU host stays one node, with `ranks` processes."""
        if self.cores:
            return replace(self, devices_per_node=max(self.devices_per_node, ranks), nodes=1)
        return self.of(-(-ranks // self.devices_per_node))


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def some_clusters() -> str:
    """Return names of shipped clusters for an error message, at most five."""
    return some(cluster_names(), rest="docs/parallel/planner_time.md")


def load_cluster(name: str) -> Cluster:
    """Load a shipped cluster by name (`NAMExN`: N nodes; `h100-2`: 2 devices of h100-8), or a cluster file by path. Raises BadInput for an
    unknown name or a wrong file."""
    path = user_path(name, what="cluster")
    if path.suffix in (".yaml", ".yml"):
        if not path.is_file():
            raise BadInput("cluster", got=name, needed="a file that exists", fix=f"give its path, or one of {some_clusters()}")
        return _read(path)
    known = cluster_names()
    if name in known:
        return _read(FOLDER / f"{name}.yaml")
    found = re.fullmatch(r"(.+)x([1-9]\d{0,5})", name)
    if found and found[1] in known:
        return _read(FOLDER / f"{found[1]}.yaml").of(int(found[2]))
    if (whole := _whole_node(name)) is not None:
        return replace(whole, name=name, devices_per_node=int(name.rpartition("-")[2]))
    raise BadInput("cluster", got=name, needed=f"one of {some_clusters()}", fix=_nearest(name, known))


def _whole_node(name: str) -> Cluster | None:
    """Return the shipped cluster of a whole node if `name` is a part of it: h100-8 for h100-2. None for other names."""
    device, _, count = name.rpartition("-")
    if not re.fullmatch(r"[1-9]\d?", count) or name in cluster_names():
        return None
    nodes = (_read(FOLDER / f"{each}.yaml") for each in cluster_names() if each.rpartition("-")[0] == device)
    return next((node for node in nodes if node.name == f"{device}-{node.devices_per_node}" and int(count) < node.devices_per_node), None)


def larger_clusters(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    """Yield larger clusters, each as (text of a fix, cluster): the whole node if `cluster` is a part of one, then 2, 4, ... 16,384 times as
    many nodes."""
    node, whole = cluster, _whole_node(cluster.name)
    if whole is not None and replace(whole, name=cluster.name, devices_per_node=cluster.devices_per_node, nodes=cluster.nodes) == cluster:
        node = whole  # all values are equal, so `cluster` is not a user's file that happens to have the name of a shipped cluster
        yield f"take --cluster {node.name}", node
    shipped = node.name in cluster_names() and load_cluster(node.name).of(node.nodes) == node
    for nodes in (node.nodes * 2**n for n in range(1, 15)):
        yield f"take --cluster {node.name}x{nodes}" if shipped else f"write nodes: {nodes} in {node.name}.yaml", node.of(nodes)


def _nearest(name: str, known: list[str]) -> str:
    """Return the fix for an unknown cluster name. For h100x8 or 8xh100 it names the shipped cluster with 8 devices of this kind."""
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
        raise BadInput(what, got=line, needed="YAML", fix="correct that line") from None
    try:
        return cluster_of(mapping, name=path.stem)
    except ValidationError as wrong:
        raise _explained(what, wrong.errors()) from None


def cluster_of(mapping: Any, *, name: str) -> Cluster:
    """Make a cluster from the mapping in its file. Raises pydantic's ValidationError for missing or unknown keys and for wrong values."""
    return TypeAdapter(Cluster).validate_python({"nodes": 1, **mapping, "name": name} if isinstance(mapping, dict) else mapping)


def _explained(what: str, errors: list[ErrorDetails]) -> BadInput:
    """Return one of pydantic's errors in the cluster file `what` as BadInput: an unknown key if there is one, otherwise the first error."""
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
    """Return the content of a cluster file with this cluster. `cluster_of` is the inverse."""
    mapping = asdict(cluster)
    mapping.pop("name")
    mapping["device"]["attention"] = list(cluster.device.attention)
    mapping["sources"] = list(cluster.sources)
    return mapping


def measured_file() -> Path:
    """Return the path of the cluster file that `moe plan --calibrate` writes by default."""
    return cache_dir() / "machine.yaml"


def measured_cluster(device: str) -> Cluster | None:
    """Return the cluster that `moe plan --calibrate` measured on this machine; None if there is no such file, if it cannot be read, or if
    it was measured on another kind of device. (Several machines may share a home folder.)"""
    path = measured_file()
    try:
        found = load_cluster(str(path)) if path.is_file() else None
    except (BadInput, OSError):
        return None
    return found if found is not None and found.device.name == device else None
