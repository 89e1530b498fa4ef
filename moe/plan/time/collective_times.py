"""Predicts the seconds of one collective on a cluster, while other groups of ranks run the same collective.

    ring        all-gather, reduce-scatter: (n-1)/n S / B + latency of one turn around the ring;    all-reduce: twice as long
    tree        all-reduce: 2 S / B over the network + latency of 2 log2(nodes) steps, less than a ring's with many nodes
    pairwise    all-to-all: bytes within the node and bytes to other nodes, each over its own links

n: number of ranks. S: bytes of the whole tensor. B: bandwidth of the links; if the group spans several nodes, at most its share of a node's
network. Measured times in the cluster file replace these formulas. Sources: Thakur et al. (2005), NCCL's tuning constants.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache

from moe.plan.machine.cluster import Cluster

OVERLAP_SLOWDOWN = 0.126  # matrix products take longer by this fraction while collectives run; measured by Galvatron


@dataclass(frozen=True)
class Group:
    """Ranks of a collective: `inside` ranks on each of `nodes` nodes. sharing: number of groups on a node that run the collective at the
    same time."""

    inside: int
    nodes: int
    sharing: int = 1

    @property
    def size(self) -> int:
        return self.inside * self.nodes


@lru_cache(maxsize=100_000)
def group_of(size: int, stride: int, devices_per_node: int, world: int) -> Group:
    """Return a group of `size` ranks, each `stride` ranks from the next. All `world` ranks run the collective, in equal groups."""
    inside = max(1, min(size, devices_per_node // stride)) if stride < devices_per_node else 1
    nodes = -(-size // inside)
    return Group(inside, nodes, max(1, min(devices_per_node, world) // inside))


def network(cluster: Cluster, group: Group) -> float:
    """Bytes per second that one group can send over the network while the other groups of the node send at the same time."""
    b = cluster.between
    return min(b.node_gb_s / group.sharing, group.inside * b.device_gb_s) * 1e9 * b.share


def _measured(table: dict[int, dict[int, float]], ranks: int, num_bytes: float) -> float | None:
    """Return the seconds of a collective of `num_bytes`, interpolated in table[ranks][bytes], the measured microseconds; None if `ranks`
    were not measured. Below the smallest measured size, the time is constant; above the largest, it is proportional to the bytes."""
    row = table.get(ranks)
    if row is None:
        return None
    sizes = sorted(row)
    if num_bytes <= sizes[0]:
        return row[sizes[0]] * 1e-6
    at = bisect_left(sizes, num_bytes)
    if at == len(sizes):
        return row[sizes[-1]] * 1e-6 * num_bytes / sizes[-1]
    low, high = sizes[at - 1], sizes[at]
    return (row[low] + (row[high] - row[low]) * (num_bytes - low) / (high - low)) * 1e-6


def _ring(cluster: Cluster, group: Group, *, sums: bool = False) -> tuple[float, float]:
    """Return (bytes per second of a ring, latency of one turn around it in seconds). sums: the collective is an all-reduce."""
    bus = cluster.inside.bus(group.inside, sums=sums and group.nodes == 1) if group.inside > 1 else math.inf
    if group.nodes == 1:
        return bus, (group.inside - 1) * cluster.inside.hop_us * 1e-6
    hops = group.nodes * (group.inside - 1) * cluster.inside.hop_us + group.nodes * cluster.between.latency_us
    return min(bus, network(cluster, group)), hops * 1e-6


def _turns(cluster: Cluster, group: Group) -> float:
    """Factor by which a collective on a CPU host takes longer because several groups share its cores; 1 for accelerators."""
    if not cluster.cores:
        return 1.0
    return max(1.0, group.sharing * min(group.inside, cluster.cores) / cluster.cores)


def all_reduce(cluster: Cluster, group: Group, num_bytes: float) -> float:
    """Seconds of an all-reduce of a tensor of `num_bytes`."""
    n = group.size
    if n == 1 or num_bytes <= 0:
        return 0.0
    base = cluster.inside.latency_us * 1e-6
    if group.nodes == 1:
        known = _measured(cluster.inside.times.get("all_reduce", {}), n, num_bytes)
        if known is not None:
            return known * _turns(cluster, group)
    bus, steps = _ring(cluster, group, sums=True)
    ring = base + 2 * steps + 2 * (n - 1) / n * num_bytes / bus
    if group.nodes == 1:
        return ring
    depth = math.ceil(math.log2(group.nodes)) * cluster.between.tree_us + (group.inside - 1) * cluster.inside.hop_us
    return min(ring, base + 2 * depth * 1e-6 + 2 * num_bytes / bus)


def gather(cluster: Cluster, group: Group, num_bytes: float) -> float:
    """Seconds of an all-gather or a reduce-scatter. num_bytes: bytes of the larger side, the output or the input, on each rank."""
    n = group.size
    if n == 1 or num_bytes <= 0:
        return 0.0
    if group.nodes == 1:
        known = _measured(cluster.inside.times.get("all_gather", {}), n, num_bytes)
        # without a measured all-gather, take half an all-reduce's time, unless switches compute all-reduces
        if known is None and not cluster.inside.sum_bus_gb_s:
            sums = _measured(cluster.inside.times.get("all_reduce", {}), n, num_bytes)
            known = None if sums is None else max(sums / 2, cluster.inside.latency_us * 1e-6)
        if known is not None:
            return known * _turns(cluster, group)
    bus, steps = _ring(cluster, group)
    return cluster.inside.latency_us * 1e-6 + steps + (n - 1) / n * num_bytes / bus


def all_to_all(cluster: Cluster, group: Group, num_bytes: float, *, copies: float = 1.0) -> float:
    """Seconds of an all-to-all in which every rank sends num_bytes / n to each of n - 1 other ranks. copies: fraction of the bytes for
    other nodes that is sent over the network; below 1 if a row for several ranks of a node is sent to the node once."""
    n = group.size
    if n == 1 or num_bytes <= 0:
        return 0.0
    known = _measured(cluster.inside.times.get("all_to_all", {}), n, num_bytes) if group.nodes == 1 else None
    if known is not None:
        return known * _turns(cluster, group)
    base = cluster.inside.latency_us * 1e-6
    within = (group.inside - 1) / n * num_bytes / cluster.inside.bus(group.inside) if group.inside > 1 else 0.0
    if group.nodes == 1:
        return base + within
    b = cluster.between
    leaving = num_bytes * copies * (n - group.inside) / n
    # an all-to-all by nodes (copies < 1) sends one long message to each node instead of one to each rank, and so reaches the full rate
    reached = b.exchange_share if copies >= 1.0 else 1.0
    rate = min(b.node_gb_s / (group.sharing * group.inside), b.device_gb_s) * 1e9 * b.share * reached
    spread = max(0.0, 1 - copies) * (n - group.inside) / n * num_bytes / cluster.inside.bus(cluster.devices_per_node)
    return base + group.nodes * b.latency_us * 1e-6 / 2 + max(within + spread, leaving / rate)


def collective(cluster: Cluster, group: Group, name: str, handed: float, *, copies: float = 1.0) -> float:
    """Seconds of a collective. name: all_gather, reduce_scatter, all_reduce or all_to_all. handed: bytes of each rank's input."""
    if name in ("all_gather", "reduce_scatter"):
        return gather(cluster, group, handed * (group.size if name == "all_gather" else 1))
    return all_reduce(cluster, group, handed) if name == "all_reduce" else all_to_all(cluster, group, handed, copies=copies)


def send(cluster: Cluster, num_bytes: float, *, stride: int, sharing: int = 1) -> float:
    """Seconds of a message to the rank that is `stride` ranks away, while `sharing` ranks of a node send at the same time."""
    if num_bytes <= 0:
        return 0.0
    if stride < cluster.devices_per_node:
        known = _measured(cluster.inside.times.get("send", {}), 2, num_bytes)
        if known is not None:
            return known
        return (cluster.inside.latency_us + cluster.inside.hop_us) * 1e-6 + num_bytes / (cluster.inside.pair_gb_s * 1e9)
    b = cluster.between
    rate = min(b.node_gb_s / sharing, b.device_gb_s) * 1e9 * b.share
    return (cluster.inside.latency_us + b.latency_us) * 1e-6 + num_bytes / rate
