"""A cluster as a planner sees it: devices, nodes, and how long collectives take between them.

    Cluster    Device (device.py)  x  devices_per_node  x  nodes
    inside     links between the devices of a node: measured times of collectives by ranks and bytes, else latency + bytes / bandwidth
    between    a node's network, all its adapters together: groups that use it at the same time share it
    host, disk a device's way to its host's memory, a node's to its disk

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
_MOST = 1_000_000  # nodes, and devices of one
_SMALLEST = 1e-15  # below, and above its inverse, sums of what is computed from it overflow
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
    """Links within a node. GB/s of `bus`: what each rank sends (and receives) in a ring, by the number of ranks.

    `times`: microseconds of a collective by ranks and bytes, where they were measured; `hop_us`: from one device to the next.
    """

    bus_gb_s: dict[int, float] = field(hash=False)
    latency_us: float
    hop_us: float
    pair_gb_s: float
    sum_bus_gb_s: dict[int, float] | None = field(default=None, hash=False)  # of all-reduces, where switches add up: they send less
    times: dict[str, dict[int, dict[int, float]]] = field(default_factory=dict, hash=False)

    def bus(self, ranks: int, *, sums: bool = False) -> float:
        """Bytes per second that each of so many ranks sends. `sums`: of an all-reduce."""
        table = self.sum_bus_gb_s if sums and self.sum_bus_gb_s else self.bus_gb_s
        known = min((n for n in table if n >= ranks), default=max(table))
        return table[known] * 1e9


@dataclass(frozen=True)
class Between:
    """A node's network: `node_gb_s` in each direction, `device_gb_s` at most for one device (its own adapter, or all of them),
    `share` of it that collectives reach; `latency_us` of a step of a ring, `tree_us` of a tree, `exchange_us` of an all-to-all by nodes."""

    node_gb_s: float
    device_gb_s: float
    share: float
    latency_us: float
    tree_us: float
    exchange_share: float = 0.7


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """Every rank has one device. Ranks lie on nodes in order. `sources`: where the numbers come from.

    `cores`: the devices are processes of a host without accelerators, which share so many cores, and the memory that one device states.
    0: every device has its own. `threads`: how much faster a process is with so many cores of its own. `program`: what was measured of the
    training program here, as fields of moe/plan/machine/program.py.
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
        """How much longer a rank computes where so many share the cores, all of them at work. Below 1 where each has several."""
        here = min(self.devices_per_node, world)
        if not self.cores:
            return 1.0
        if here > self.cores:
            return here / self.cores
        have = self.cores // here
        return 1 / max((speed for count, speed in self.threads.items() if count <= have), default=1.0)

    def memory_bytes(self, ranks: int | None = None) -> float:
        """Of one rank, where so many train (all devices if not given)."""
        whole = self.device.memory_gib * 2**30
        return whole / (ranks or self.devices_per_node) if self.cores else whole

    @property
    def world(self) -> int:
        return self.devices_per_node * self.nodes

    def of(self, nodes: int) -> Cluster:
        """The same kind of nodes, so many."""
        return replace(self, nodes=nodes)

    def holding(self, ranks: int) -> Cluster:
        """As many nodes as so many ranks need; processes of a host are all on it."""
        if self.cores:
            return replace(self, devices_per_node=max(self.devices_per_node, ranks), nodes=1)
        return self.of(-(-ranks // self.devices_per_node))


def cluster_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def some_clusters() -> str:
    """The first names of clusters, for a line of text."""
    return some(cluster_names(), rest="docs/parallel/planner_time.md")


def load_cluster(name: str) -> Cluster:
    """A shipped cluster by name, with `xN` after it for N nodes, or a file. Raises BadInput for an unknown one, with the list."""
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
    """The fix for an unknown cluster: of h100x8 and 8xh100, of which no node is shipped, the node with 8 devices of that name."""
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
        told = yaml_text.load(read_text(path))
    except OSError as error:
        raise BadInput(what, got=error.strerror or error, needed="a file that can be read", fix="check the file") from None
    except yaml_text.NOT_YAML as wrong:
        line = getattr(wrong, "problem", None) or (str(wrong).splitlines() or ["values nested too deeply"])[0]
        raise BadInput(what, got=line, needed="YAML", fix="mend that line") from None
    if not isinstance(told, dict):
        raise BadInput(what, got=type(told).__name__, needed="a mapping", fix=f"begin with a copy of {FOLDER.name}/a100-80-8.yaml")
    try:
        return cluster_of(told, name=path.stem)
    except (KeyError, TypeError, ValueError, AttributeError) as wrong:
        said = f"no key {wrong}" if isinstance(wrong, KeyError) else str(wrong)
        fix = f"write it as {FOLDER.name}/a100-80-8.yaml does"
        raise BadInput(what, got=said, needed="the keys of a cluster", fix=fix) from None


def cluster_of(told: dict[str, Any], *, name: str) -> Cluster:
    """A cluster from the mapping that its file holds. Raises ValueError and others for a mapping that no cluster has."""
    _check_texts(told)
    device, inside, between, rest = (
        _section(told, name, of) for name, of in (("device", Device), ("inside", Inside), ("between", Between), ("", Cluster))
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
        sources=tuple(told.get("sources", ())),
    )


def _check_texts(told: Any) -> None:
    """Refuse text that a terminal would obey."""
    if isinstance(told, dict | list):
        for value in (*told, *told.values()) if isinstance(told, dict) else told:
            _check_texts(value)
    elif isinstance(told, str) and not harmless(told):
        raise ValueError(f"{told!r}, which a terminal would obey")


def _section(told: dict[str, Any], section: str, of: type) -> dict[str, Any]:
    """The numbers of a section (of the file itself with ""), by the names that `of` has. Raises ValueError for what no formula can use."""
    values = told[section] if section else told
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
    """A number, or a list or a nest of mappings with numbers. YAML reads 4e9 as text."""
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


def told_of(cluster: Cluster) -> dict[str, Any]:
    """The mapping from which cluster_of makes the cluster again."""
    from dataclasses import asdict

    told = asdict(cluster)
    told.pop("name")
    told["device"]["attention"] = list(cluster.device.attention)
    told["sources"] = list(cluster.sources)
    return told


def measured_file() -> Path:
    """Return the path of the cluster file that `moe plan --calibrate` writes by default."""
    return cache_dir() / "machine.yaml"


def measured_cluster(device: str) -> Cluster | None:
    """Return the cluster file measured on this machine. None without one, and for a file of another device, because several machines may
    share a home folder."""
    path = measured_file()
    try:
        found = load_cluster(str(path)) if path.is_file() else None
    except (BadInput, OSError):
        return None
    return found if found is not None and found.device.name == device else None
