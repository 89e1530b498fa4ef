"""Times of computation and collectives on a logical mesh of devices, for searches that choose operators' shardings (`moe plan --search`). A
collective takes alpha seconds of latency, and beta seconds for each byte that a rank sends.

    n ranks, S bytes of the whole buffer      all-reduce        alpha + 2 (n-1)/n S beta
                                              all-gather        alpha +   (n-1)/n S beta
                                              reduce-scatter    alpha +   (n-1)/n S beta
    n ranks, S bytes of one rank's buffer     all-to-all        alpha +   (n-1)/n S beta

These are the formulas of Alpa (arXiv 2201.12023, section 4.2), except that Alpa's all-to-all takes n / 2 times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from moe.plan.machine.cluster import Cluster


@dataclass(frozen=True)
class Link:
    """A link on which a collective takes `alpha_s` + bytes * `beta_s` seconds. exchange_s: seconds per byte in an all-to-all (None:
    beta_s)."""

    alpha_s: float
    beta_s: float
    exchange_s: float | None = None


@dataclass(frozen=True)
class Mesh:
    """Equal devices in a grid. sizes, links: number of ranks and link of each axis; neighbors along the last axis are closest. flops:
    FLOPs a second of one device. moved: memory bandwidth of one device, bytes a second. memory_bytes: memory of one device."""

    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    flops: float
    moved: float = inf
    memory_bytes: float = inf

    def work(self, flops: float, moved_bytes: float) -> float:
        """Return the seconds in which a device computes `flops` operations, and then reads and writes `moved_bytes`. The two do not
        overlap."""
        return flops / self.flops + moved_bytes / self.moved

    def _ring(self, size_bytes: float, axis: int, turns: int) -> float:
        n, link = self.sizes[axis], self.links[axis]
        return 0.0 if n == 1 else link.alpha_s + turns * (n - 1) / n * size_bytes * link.beta_s

    def all_reduce(self, size_bytes: float, axis: int) -> float:
        return self._ring(size_bytes, axis, 2)

    def all_gather(self, size_bytes: float, axis: int) -> float:
        return self._ring(size_bytes, axis, 1)

    reduce_scatter = all_gather

    def all_to_all(self, size_bytes: float, axis: int) -> float:
        n, link = self.sizes[axis], self.links[axis]
        each = link.beta_s if link.exchange_s is None else link.exchange_s
        return 0.0 if n == 1 else link.alpha_s + (n - 1) / n * size_bytes * each


@dataclass(frozen=True)
class Machine:
    """`nodes` nodes of `node_size` devices each. inside: link within a node. between: one device's share of its node's network.
    flops: FLOPs a second of one device. moved: memory bandwidth of one device, bytes a second. memory_bytes: memory of one device."""

    nodes: int
    node_size: int
    flops: float
    inside: Link
    between: Link
    moved: float = inf
    memory_bytes: float = inf

    @property
    def devices(self) -> int:
        return self.nodes * self.node_size

    def link(self, count: int, stride: int) -> Link:
        """Return the link of a mesh axis with `count` ranks, each `stride` devices from the next. If the axis has n ranks, w in
        each of m nodes, collectives use rings within each node, then rings between nodes. A byte of the buffer takes (n-1)/n beta_s =
        (w-1)/w inside.beta_s + (m-1)/m between.beta_s / w seconds. In an all-to-all, each device sends its bytes for other nodes over its
        own share of the network."""
        near = min(count, max(1, self.node_size // stride))
        if count == 1 or near == count:
            return self.inside
        far, inside, between = count // near, self.inside, self.between
        beta = (near - 1) / near * inside.beta_s + (far - 1) / far * between.beta_s / near
        exchange = (near - 1) / count * inside.beta_s + (count - near) / count * between.beta_s
        scale = count / (count - 1)
        return Link((inside.alpha_s if near > 1 else 0.0) + between.alpha_s, beta * scale, exchange * scale)

    def mesh(self, *sizes: int) -> Mesh:
        """Return a mesh with these axis sizes over the first devices; devices along the last axis are adjacent."""
        links, stride = [], 1
        for size in reversed(sizes):
            links.append(self.link(size, stride))
            stride *= size
        return Mesh(sizes, tuple(reversed(links)), self.flops, self.moved, self.memory_bytes)

    def submeshes(self) -> tuple[int, ...]:
        """Return the numbers of devices that a pipeline stage may have, as in Alpa: 1, 2, 4, ... devices of a node, or whole nodes."""
        parts = [n for n in (2**i for i in range(self.node_size.bit_length())) if self.node_size % n == 0]
        return tuple(sorted({*parts, *(k * self.node_size for k in range(1, self.nodes + 1))}))


def machine_of(cluster: Cluster, *, kind: str = "bf16") -> Machine:
    """Return the Machine of a cluster (cluster.py). Its memory is a device's memory / 1.1, because the allocator keeps a reserve
    (RESERVED in memory.py). kind: dtype of matrix products."""
    device, inside, between = cluster.device, cluster.inside, cluster.between
    share = between.node_gb_s * 1e9 * between.share / cluster.devices_per_node
    return Machine(
        nodes=cluster.nodes,
        node_size=cluster.devices_per_node,
        flops=device.rate(kind) / cluster.crowd(cluster.world),
        inside=Link(inside.latency_us * 1e-6, 1 / inside.bus(cluster.devices_per_node)),
        between=Link(between.latency_us * 1e-6, 1 / share),
        moved=device.bandwidth,
        memory_bytes=cluster.memory_bytes() / 1.1,
    )
