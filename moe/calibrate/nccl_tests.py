"""Reads the printed output of NCCL-tests and writes its times into a cluster file.

A table has a line for each size: bytes, count, type, redop, root, and twice (first out of place, then in place) the columns time
(microseconds), algbw, busbw and #wrong. `# Rank` lines name each rank's host. The out-of-place times are used. Source:
github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md.

On one node the times become `inside.times`. On several nodes, a least-squares fit of relative errors gives seconds = latency + bytes /
bandwidth. From it follow `between.share` and `latency_us` (all-gather), `exchange_share` (all-to-all) and `tree_us` (all-reduce). A cluster
file has one time for all-gather and reduce-scatter. If both were measured, the slower one is used.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from moe.launch import exit_codes
from moe.plan.machine.cluster import Between, Cluster, load_cluster, mapping_of
from parallel.errors import BadInput, counted, some
from parallel.store.files import check_writable, read_text, reason, write_text

# program of NCCL-tests -> the collective that it measures, a key of `inside.times` in a cluster file
KINDS = {
    "all_reduce_perf": "all_reduce",
    "all_gather_perf": "all_gather",
    "reduce_scatter_perf": "all_gather",
    "alltoall_perf": "all_to_all",
    "sendrecv_perf": "send",
}
COLUMNS = 13  # number of columns of a table
LEAST_SIZES = 3  # smallest number of sizes in a table, so that a latency and a bandwidth can be fitted
AGAIN = "run it again on idle nodes, with -b 8K -e 1G -f 2"
RANK = re.compile(r"#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device")


@dataclass(frozen=True)
class Measured:
    """Measured times of one collective: bytes -> microseconds. what: file names, for errors. kind: the collective, a value of KINDS.
    ranks: number of ranks, on `nodes` nodes."""

    what: str
    kind: str
    ranks: int
    nodes: int
    times: dict[int, float]

    def slower(self, other: Measured) -> Measured:
        """Return times for all sizes of both measurements: for a size that both have, the slower time."""
        times = {size: max(one.times.get(size, 0.0) for one in (self, other)) for size in sorted({*self.times, *other.times})}
        return replace(self, what=f"the slower of {self.what} and {other.what}", times=times)

    def law(self) -> tuple[float, float]:
        """Fit time = latency + bytes / bandwidth by least squares of relative errors. Return (latency in microseconds, bandwidth in bytes
        per microsecond). Raises BadInput for a negative latency, and for times that do not grow with the bytes."""
        rows = [(1 / t, size / t) for size, t in self.times.items()]
        aa, ab, bb = sum(a * a for a, _ in rows), sum(a * b for a, b in rows), sum(b * b for _, b in rows)
        a, b = sum(a for a, _ in rows), sum(b for _, b in rows)
        whole = aa * bb - ab * ab
        latency, slope = (a * bb - b * ab) / whole, (b * aa - a * ab) / whole
        if latency < 0:
            raise BadInput(self.what, got=f"a fitted latency of {latency:.3g} us", needed="at least 0 us", fix=AGAIN)
        if slope <= 0:
            raise BadInput(self.what, got="times that do not grow with the bytes", needed="a fitted bandwidth above 0", fix=AGAIN)
        return latency, 1 / slope


def read(text: str, *, kind: str, what: str) -> Measured:
    """Read the output of one NCCL-tests program. kind: its collective, a value of KINDS. what: name of the file, for errors. Raises
    BadInput for an incomplete or wrong output."""
    ranks = RANK.findall(text)
    hosts = Counter(host for _, host in ranks)
    if not hosts or len(set(hosts.values())) > 1:
        got = f"ranks per host {sorted(hosts.values())}" if hosts else "no line `# Rank`"
        raise BadInput(what, got=got, needed="the same number of ranks on each host", fix="keep the whole output, from the first line")
    lines = list(_lines(text, what))
    times = dict(lines)
    if len(times) < len(lines) or len({group for group, _ in ranks}) > 1:
        got, fix = "a size twice, or several groups of ranks", "keep one run in a file, without NCCL_TESTS_SPLIT"
        raise BadInput(what, got=got, needed="one table, measured on one group of ranks", fix=fix)
    if len(times) < LEAST_SIZES:
        raise BadInput(what, got=counted(len(times), "size"), needed=f"at least {LEAST_SIZES}", fix="run it with -b 8K -e 1G -f 2")
    return Measured(what, kind, sum(hosts.values()), len(hosts), times)


def _lines(text: str, what: str) -> Iterator[tuple[int, float]]:
    """Yield (bytes, microseconds) of each line of the table, without lines of 0 bytes. Raises BadInput for a wrong line."""
    for number, line in enumerate(text.splitlines(), 1):
        cells = line.split()
        if not cells or not cells[0].isdigit():
            continue
        if len(cells) != COLUMNS:
            got, fix = f"{counted(len(cells), 'column')} in line {number}", "leave out flags that add columns"
            raise BadInput(what, got=got, needed=f"{COLUMNS} columns", fix=fix)
        if any(cells[at] not in ("0", "N/A") for at in (8, 12)):
            raise BadInput(
                what, got=f"#wrong {cells[8]} and {cells[12]} in line {number}", needed="#wrong 0", fix="repair NCCL or the links first"
            )
        try:
            time = float(cells[5])
        except ValueError:
            time = 0.0
        if not 0 < time < float("inf"):
            raise BadInput(what, got=f"time {cells[5]} in line {number}", needed="microseconds above 0", fix="run it again")
        if int(cells[0]):
            yield int(cells[0]), time


def with_times(cluster: Cluster, found: Measured) -> Cluster:
    """Return the cluster with the times `found`. Raises BadInput for times to which no latency and bandwidth can be fitted, for send times
    between nodes, which a cluster file cannot store, and for times that contradict the cluster's number of devices or its network
    adapters' rate."""
    here = found.ranks // found.nodes
    if here > cluster.devices_per_node:
        got, needed = f"{here} ranks on a node", f"at most {cluster.devices_per_node}, the cluster's devices_per_node"
        raise BadInput(found.what, got=got, needed=needed, fix="give the cluster of these nodes by --cluster")
    if found.nodes == 1:
        ranks = 2 if found.kind == "send" else found.ranks  # send times do not depend on the number of ranks, so they are stored for 2
        rows = cluster.inside.times.get(found.kind, {}) | {ranks: found.times}
        source = f"inside.times.{found.kind} of {ranks} ranks: replaced by NCCL-tests, {found.what}"
        inside = replace(cluster.inside, times=cluster.inside.times | {found.kind: rows})
        return replace(cluster, inside=inside, sources=(*cluster.sources, source))
    if found.kind not in BETWEEN:
        got, needed = f"{found.kind} times of {found.nodes} nodes", f"{found.kind} times of one node: a cluster file has no others"
        raise BadInput(found.what, got=got, needed=needed, fix="move it to another folder")
    between, source = BETWEEN[found.kind](cluster, found, here)
    source += f" by NCCL-tests, {found.what}, {found.ranks} ranks on {found.nodes} nodes"
    return replace(cluster, between=between, sources=(*cluster.sources, source))


def _gathers(cluster: Cluster, found: Measured, here: int) -> tuple[Between, str]:
    """Fit between.share and between.latency_us to `found`, the times of ring all-gathers with `here` ranks on each node. Return (`between`
    with these values, beginning of the note for the cluster file's `sources`)."""
    latency, rate = found.law()
    between, bus = cluster.between, (found.ranks - 1) / found.ranks * rate / 1000  # bus: in GB/s
    most = min(between.node_gb_s, here * between.device_gb_s)
    _check_rate(found, bus, most)
    within = cluster.inside.latency_us + found.nodes * (here - 1) * cluster.inside.hop_us
    source = "between.share, between.latency_us: replaced"
    if latency < within:
        source += f" (no latency is left for between: {latency:.3g} us fitted, {within:.3g} us by inside.latency_us and hop_us)"
    if here > 1 and bus > cluster.inside.bus(here):
        source += f" (inside.bus_gb_s stays the limit: {bus:.4g} GB/s fitted, {cluster.inside.bus(here):.4g} inside a node)"
    return replace(between, share=bus / most, latency_us=max(0.0, latency - within) / found.nodes), source


def _exchanges(cluster: Cluster, found: Measured, here: int) -> tuple[Between, str]:
    """Fit exchange_share to `found`, the times of an all-to-all with `here` ranks on each node. Only bytes that a rank sends to other nodes
    count. Return (`between` with this value, beginning of the note for the cluster file's `sources`)."""
    between = cluster.between
    sent = (found.ranks - here) / found.ranks * found.law()[1] / 1000  # GB/s
    most = min(between.node_gb_s / here, between.device_gb_s)
    _check_rate(found, sent, most)
    return replace(between, exchange_share=sent / (most * between.share)), "between.exchange_share: replaced"


def _sums(cluster: Cluster, found: Measured, here: int) -> tuple[Between, str]:
    """Fit between.tree_us, the latency of one step of a tree, to `found`, the times of an all-reduce with `here` ranks on each node. Return
    (`between` with this value, beginning of the note for the cluster file's `sources`). Between nodes, a cluster file has one bandwidth for
    all-gathers and all-reduces. `_gathers` sets it, so the all-reduce's bandwidth is only written into the note."""
    latency, rate = found.law()
    depth = (latency - cluster.inside.latency_us) / 2 - (here - 1) * cluster.inside.hop_us
    tree_us = max(0.0, depth) / math.ceil(math.log2(found.nodes))
    source = f"between.tree_us: replaced (its {2 * rate / 1000:.4g} GB/s for 2 * bytes are not used)"
    return replace(cluster.between, tree_us=tree_us), source


# collective -> function that fits its values of `between`, in the order of the calls: _exchanges reads between.share, which _gathers sets
BETWEEN = {"all_gather": _gathers, "all_to_all": _exchanges, "all_reduce": _sums}


def _check_rate(found: Measured, rate: float, most: float) -> None:
    """Raise BadInput for a fitted rate above `most`, the largest that the cluster's network allows (both in GB/s). found: the measured
    times, which the error names."""
    if rate > most:
        needed = f"at most {most:.4g} GB/s, the most that the cluster's network allows"
        fix = "correct between.node_gb_s and between.device_gb_s in the cluster file"
        raise BadInput(found.what, got=f"a fitted {rate:.4g} GB/s", needed=needed, fix=fix)


def main(folder: Path, cluster: str, out: Path) -> int:
    """Put the times of NCCL-tests' outputs in `folder` into `cluster`, and write it to `out`. Raises BadInput for wrong outputs."""
    check_writable(out, what="--out")
    given = load_cluster(cluster)
    made = from_folder(given, folder)
    write_text(out, yaml.safe_dump(mapping_of(made), sort_keys=False), what="--out")
    print("\n".join((*made.sources[len(given.sources) :], f"wrote {out}")))
    return exit_codes.DONE


def from_folder(cluster: Cluster, folder: Path) -> Cluster:
    """Return the cluster with the times of all files NAME_perf*.txt of the folder. Raises BadInput for a folder without such a file, for
    a wrong output, for times that the cluster cannot have, and if runs on several nodes differ in the number of nodes or ranks."""
    found: dict[tuple[str, int, int], Measured] = {}
    for path, kind in [(path, kind) for name, kind in KINDS.items() for path in sorted(folder.glob(f"{name}*.txt"))]:
        try:
            text = read_text(path)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                path.name, got=f"a file that cannot be read ({reason(error)})", needed="text in UTF-8", fix="save the output again"
            ) from None
        one = read(text, kind=kind, what=path.name)
        key = kind, one.ranks, one.nodes
        found[key] = found[key].slower(one) if key in found else one
    if not found:
        fix = "name them all_reduce_perf.txt, all_gather_perf.txt, ..."
        held = some(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "no folder"
        raise BadInput("--nccl", got=f"{folder}: {held or 'empty'}", needed="a folder with outputs of nccl-tests", fix=fix)
    several = sorted({(one.nodes, one.ranks) for one in found.values() if one.nodes > 1})
    if len(several) > 1:
        got, fix = " and ".join(f"{ranks} ranks on {nodes} nodes" for nodes, ranks in several), "keep only the outputs of one of these"
        raise BadInput("--nccl", got=got, needed="the same numbers of nodes and ranks in all runs on several nodes", fix=fix)
    order = [*BETWEEN, "send"]
    for one in sorted(found.values(), key=lambda one: order.index(one.kind)):
        cluster = with_times(cluster, one)
    return cluster
