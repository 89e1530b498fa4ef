"""Reads the printed output of NCCL-tests and puts its times into a cluster.

A table has a line for each size: bytes, count, type, redop, root, then time (microseconds), algbw, busbw and #wrong, out of place and in
place. `# Rank` lines name each rank's host. Times out of place count. Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

On one node the times become `inside.times`. On several, least squares of relative errors give an all-gather's
seconds = latency + bytes / bandwidth, and from them `between.share` and `between.latency_us`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from moe.launch import exit_codes
from moe.plan.machine.cluster import Cluster, load_cluster, mapping_of
from parallel.errors import BadInput
from parallel.store.files import check_writable, read_text, write_text

# name of a program -> key of `inside.times`
KINDS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "all_gather",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send",
}
COLUMNS = 13
LEAST_SIZES = 3
RANK = re.compile(r"#\s+Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")


@dataclass(frozen=True)
class Measured:
    """Times of one collective: bytes -> microseconds. ranks on `nodes` nodes."""

    kind: str
    ranks: int
    nodes: int
    times: dict[int, float]

    def law(self) -> tuple[float, float]:
        """Return (latency in microseconds, bytes per microsecond) that fit the times best, by relative error."""
        rows = [(1 / t, size / t) for size, t in self.times.items()]
        aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
        a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
        whole = aa * bb - ab * ab
        return (a * bb - b * ab) / whole, whole / (b * aa - a * ab)


def read(text: str, *, kind: str, what: str) -> Measured:
    """Read the output of one program. Raises BadInput, with `what` as the name of the file, for an output that is not whole and right."""
    hosts = Counter(RANK.findall(text))
    if not hosts or len(set(hosts.values())) > 1:
        got = f"ranks per host {sorted(hosts.values())}" if hosts else "no line `# Rank`"
        raise BadInput(what, got=got, needed="the same number of ranks on each host", fix="keep the whole output, from the first line")
    times = dict(_lines(text, what))
    if len(times) < LEAST_SIZES:
        raise BadInput(what, got=f"{len(times)} sizes", needed=f"at least {LEAST_SIZES}", fix="run it with -b 8K -e 1G -f 2")
    return Measured(kind, sum(hosts.values()), len(hosts), times)


def _lines(text: str, what: str) -> Iterator[tuple[int, float]]:
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split()
        if not cells or not cells[0].isdigit():
            continue
        if len(cells) != COLUMNS:
            raise BadInput(what, got=f"{len(cells)} columns in line {number}", needed=f"{COLUMNS}", fix="run it with no flags for columns")
        if any(cells[at] not in ("0", "N/A") for at in (8, 12)):
            raise BadInput(what, got=f"#wrong {cells[8]} and {cells[12]} in line {number}", needed="0", fix="mend NCCL or the links first")
        try:
            time = float(cells[5])
        except ValueError:
            time = 0.0
        if not 0 < time < float("inf"):
            raise BadInput(what, got=f"time {cells[5]} in line {number}", needed="microseconds above 0", fix="run it again")
        if int(cells[0]):
            yield int(cells[0]), time


def with_times(cluster: Cluster, found: Measured) -> Cluster:
    """Return the cluster with these times. Raises BadInput for times of several nodes that are not of an all-gather or reduce-scatter."""
    if found.nodes == 1:
        rows = cluster.inside.times.get(found.kind, {}) | {found.ranks: found.times}
        return replace(cluster, inside=replace(cluster.inside, times=cluster.inside.times | {found.kind: rows}))
    if found.kind != "all_gather":
        raise BadInput(found.kind, got=f"{found.nodes} nodes", needed="all_gather or reduce_scatter between nodes", fix="remove this file")
    latency, rate = found.law()
    here, between = found.ranks // found.nodes, cluster.between
    bus = (found.ranks - 1) / found.ranks * rate / 1000  # GB/s
    step = (latency - cluster.inside.latency_us) / found.nodes - (here - 1) * cluster.inside.hop_us
    share = bus / min(between.node_gb_s, here * between.device_gb_s)
    return replace(cluster, between=replace(between, share=share, latency_us=max(0.0, step)))


def main(folder: Path, cluster: str, out: Path) -> int:
    """Put the outputs in `folder` into `cluster`, and write the cluster file `out`. Raises BadInput."""
    check_writable(out, what="--out")
    made = from_folder(load_cluster(cluster), folder)
    write_text(out, yaml.safe_dump(mapping_of(made), sort_keys=False), what="--out")
    print(f"wrote {out}: {made.sources[-1]}")
    return exit_codes.DONE


def from_folder(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with the times of all files NAME_perf*.txt of the folder. Raises BadInput for a folder without such a file."""
    paths = [(path, kind) for name, kind in KINDS.items() for path in sorted(folder.glob(f"{name}*.txt"))]
    if not paths:
        raise BadInput(
            "--nccl", got=str(folder), needed="a folder with outputs", fix="name them all_reduce_perf.txt, all_gather_perf.txt, ..."
        )
    for path, kind in paths:
        cluster = with_times(cluster, read(read_text(path), kind=kind, what=path.name))
    read_files = ", ".join(path.name for path, _ in paths)
    return replace(cluster, sources=(*cluster.sources, f"inside.times, between.share, between.latency_us: NCCL-tests, {read_files}"))
