"""Description of a cluster for the planner: devices, nodes, and the links between them.

    Cluster    Device (device.py)  x  devices_per_node  x  nodes
    inside     links between the devices of a node: measured times of collectives by ranks and bytes, else latency + bytes / bandwidth
    between    network of a node, all its adapters together; groups that use it at the same time share it
    host, disk links from a device to its host's memory, and from a node to its disk

Cluster files are YAML, each number with its source. load_cluster("h100-8x4") is the file h100-8 with 4 nodes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from moe.plan.job.hashed import hashed_once
from moe.plan.machine.device import RATED, Device
from moe.plan.machine.program import Program
from parallel import yaml_text
from parallel.errors import BadInput, did_you_mean, harmless, some
from parallel.process.extensions import cache_dir
from parallel.store.files import read_text, user_path

FOLDER = Path(__file__).parent / "clusters"
_MOST = 1_000_000  # limit for the number of nodes, and for the devices in a node
_SMALLEST = 1e-15  # formulas would overflow with smaller numbers, and with numbers above its inverse
_DEEP = {"peak_tflops": 1, "bus_gb_s": 1, "sum_bus_gb_s": 1, "rates": 2, "attention_times": 1, "times": 3, "threads": 1, "program": 1}
_LISTS = {"attention": 2, "attention_times": 4}
_NO_NUMBERS = ("name", "sources", "device", "inside", "between")
_MAY_LACK = ("sum_bus_gb_s", "rates", "attention_times", "times", "threads", "program")
_DIVIDES = (
    *("memory_gib", "memory_gb_s", "units", "peak_tflops", "sustained", "attention", "memory_share", "rates"),
    *("bus_gb_s", "sum_bus_gb_s", "pair_gb_s", "node_gb_s", "device_gb_s", "share", "exchange_share"),
    *("host_gb_s", "host_adam_per_s", "disk_gb_s", "threads"),
)


@dataclass(frozen=True)
class Inside:
    """Links within a node.

    bus_gb_s: number of ranks -> GB/s that each rank sends (and receives) in a ring collective. sum_bus_gb_s: the same for all-reduces, if
    switches compute the sums, so that ranks send less. latency_us: of any collective. hop_us: latency from one device to the next.
    pair_gb_s: GB/s between two devices. times: collective -> number of ranks -> bytes -> measured microseconds.
    """

    bus_gb_s: dict[int, float] = field(hash=False)
    latency_us: float
    hop_us: float
    pair_gb_s: float
    sum_bus_gb_s: dict[int, float] | None = field(default=None, hash=False)
    times: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict, hash=False)

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

    node_gb_s: float
    device_gb_s: float
    share: float
    latency_us: float
    tree_us: float
    exchange_share: float = 0.7


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """A cluster in which every rank has one device, and nodes are filled with ranks in order.

    host_gb_s: from a device to its host's memory. host_adam_per_s: parameters that a host updates by AdamW. disk_gb_s: of a node's disk.
    cores: 0 for accelerators. Otherwise the devices are processes of a host, which share this number of cores and the device's memory.
    threads: number of cores of a process -> its speed compared with one core. program: measured properties of the training program on
    this cluster: field of Program (program.py) -> value. sources: where the numbers come from.
    """

    name: str
    device: Device
    devices_per_node: int
    nodes: int
    inside: Inside
    between: Between
    host_gb_s: float = 20.0
    host_adam_per_s: float = 4e9
    disk_gb_s: float = 3.0
    cores: int = 0
    threads: dict[int, float] = field(default_factory=dict, hash=False)
    program: dict[str, float] = field(default_factory=dict, hash=False)
    sources: tuple[str, ...] = ()

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
    if not isinstance(mapping, dict):
        raise BadInput(what, got=type(mapping).__name__, needed="a mapping", fix=f"begin with a copy of {FOLDER.name}/a100-80-8.yaml")
    try:
        return cluster_of(mapping, name=path.stem)
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        said = f"no key {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        fix = f"write it as {FOLDER.name}/a100-80-8.yaml does"
        raise BadInput(what, got=said, needed="the keys of a cluster", fix=fix) from None


def cluster_of(mapping: dict[str, Any], *, name: str) -> Cluster:
    """Make a cluster from the mapping in its file. Raises KeyError, TypeError, ValueError or AttributeError if it is no cluster."""
    _check_texts(mapping)
    device, inside, between, rest = (
        _section(mapping, name, of) for name, of in (("device", Device), ("inside", Inside), ("between", Between), ("", Cluster))
    )
    device["name"], device["attention"] = str(device["name"]), tuple(device["attention"])
    if not set(device["peak_tflops"]) & set(RATED):
        raise ValueError(f"peak_tflops of {', '.join(device['peak_tflops'])}, none of {', '.join(RATED)}")
    if other := set(rest.get("program") or {}) - {one.name for one in fields(Program)}:
        raise ValueError(f"program.{other.pop()}, which no program has")
    device["rates"] = {kind: {float(flops): float(rate) for flops, rate in row.items()} for kind, row in device.get("rates", {}).items()}
    times = {
        kind: {int(ranks): {int(size): float(us) for size, us in row.items()} for ranks, row in table.items()}
        for kind, table in inside.pop("times", {}).items()
    }
    each, nodes = rest["devices_per_node"], rest.get("nodes", 1)
    if not (0 < each <= _MOST and 0 < nodes <= _MOST and each == int(each) and nodes == int(nodes)):
        raise ValueError(f"{nodes} nodes of {each} devices, of each 1 to {_MOST}")
    return Cluster(
        name=name,
        device=Device(**device),
        devices_per_node=int(each),
        nodes=int(nodes),
        inside=Inside(**inside, times=times),
        between=Between(**between),
        host_gb_s=float(rest.get("host_gb_s", 20)),
        host_adam_per_s=float(rest.get("host_adam_per_s", 4e9)),
        disk_gb_s=float(rest.get("disk_gb_s", 3)),
        cores=int(rest.get("cores", 0)),
        threads={int(count): float(speed) for count, speed in rest.get("threads", {}).items()},
        program={str(name): float(value) for name, value in rest.get("program", {}).items()},
        sources=tuple(mapping.get("sources", ())),
    )


def _check_texts(value: Any) -> None:
    """Refuse text with control characters."""
    if isinstance(value, dict | list):
        for part in (*value, *value.values()) if isinstance(value, dict) else value:
            _check_texts(part)
    elif isinstance(value, str) and not harmless(value):
        raise ValueError(f"{value!r}, which has control characters")


def _section(mapping: dict[str, Any], section: str, of: type) -> dict[str, Any]:
    """Values of a section ("": top level) of a cluster file. of: dataclass with fields that are the allowed names. Raises ValueError for
    other names, and for bad numbers."""
    values = mapping[section] if section else mapping
    if not isinstance(values, dict):
        raise ValueError(f"{section}: {values!r}, which is no mapping")
    known = {one.name for one in fields(of)}
    if other := [key for key in values if key not in known]:
        near = did_you_mean(str(other[0]), known)
        raise ValueError(
            f"{section + '.' if section else ''}{other[0]}, which no cluster has" + (f" (did you mean {near}?)" if near else "")
        )
    return {key: value if key in _NO_NUMBERS else _number(key, value, _DEEP.get(key, 0), key) for key, value in values.items()}


def _number(key: str, value: Any, deep: int, where: Any) -> Any:
    """Return a number, or a list or nested mapping of numbers, after checks. Text such as 4e9 counts, because YAML reads it as text.

    key: field name, for which _DEEP, _LISTS and _DIVIDES have rules. deep: levels of nested mappings. where: path in the file, for errors.
    """
    if key in _MAY_LACK and not value and where == key:
        return value
    if deep:
        if not isinstance(value, dict) or not value:
            raise ValueError(f"{where}: {value!r}, which is no mapping of numbers")
        return {name: _number(key, of, deep - 1, f"{where}.{name}") for name, of in value.items()}
    if key in _LISTS:
        if not isinstance(value, list | tuple) or len(value) != _LISTS[key]:
            raise ValueError(f"{where}: {value!r}, which is no list of {_LISTS[key]} numbers")
        return [_of_range(key, one, where) for one in value]
    return _of_range(key, value, where)


def _of_range(key: str, value: Any, where: Any) -> Any:
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    least = _SMALLEST if key in _DIVIDES else 0
    if not isinstance(number, int | float) or isinstance(number, bool) or not least <= number <= 1 / _SMALLEST:
        raise ValueError(f"{where}: {value}, which is no number from {least:.3g} to {1 / _SMALLEST:.0e}")
    return number


def mapping_of(cluster: Cluster) -> dict[str, Any]:
    """Mapping from which `cluster_of` makes this cluster again."""
    from dataclasses import asdict

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
