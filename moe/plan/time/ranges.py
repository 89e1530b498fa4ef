"""Tells how far a measured step time may be from its prediction: ranges of measured / predicted seconds for groups of published runs
(ranges.yaml).

Each range was tested on published tables that were left out when it was computed. `python -m tests.planner ranges` writes the file, and
tests/planner/ranges.py describes how.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moe.plan.job.network import Plan
from moe.plan.machine.cluster import Cluster
from moe.plan.time.collective_times import group_of
from parallel.store import files
from parallel.store.files import read_text

FILE = Path(__file__).with_name("ranges.yaml")


@dataclass(frozen=True)
class Range:
    """Range of measured / predicted seconds in a group of published runs.

    runs: description of the group. devices: the group has devices whose name contains one of these words; empty: all devices. across:
    whether data parallelism crosses nodes (None: both). low, high: ends of the range. held_out: fraction of a published table's runs that
    lie within the range computed from all other tables, as a mean over tables. tables: number of tables in the group. rows: number of runs.
    """

    runs: str
    devices: tuple[str, ...]
    across: bool | None
    low: float
    high: float
    held_out: float
    tables: int
    rows: int

    def holds(self, device: str, *, across: bool) -> bool:
        """Return whether a run belongs to this Range's group. device: the name of its devices. across: whether its data parallelism crosses
        nodes."""
        known = not self.devices or any(word in device.lower() for word in self.devices)
        return known and self.across in (None, across)

    def said(self, seconds: float) -> str:
        """Return the range of a predicted time as text."""
        return (
            f"{self.low * seconds:.3g} to {self.high * seconds:.3g} s: {int(10 * self.held_out)} of 10 published runs "
            f"{self.runs} were in a range computed from other tables"
        )


@lru_cache
def ranges() -> tuple[Range, ...]:
    """Return the Range of each group of published runs, the most specific group first."""
    return tuple(Range(**{**each, "devices": tuple(each["devices"])}) for each in files.load(read_text(FILE)))


def range_of(cluster: Cluster, plan: Plan) -> Range | None:
    """Return the Range (measured / predicted seconds of a step) of published runs that are similar to this plan on this cluster. None for
    CPU hosts, because there are no published runs on them."""
    if cluster.cores:
        return None
    return next(each for each in ranges() if each.holds(cluster.device.name, across=crosses_nodes(cluster, plan)))


def crosses_nodes(cluster: Cluster, plan: Plan) -> bool:
    """Return whether gradients are summed over several nodes."""
    return group_of(plan.dp * plan.sp, plan.tp, cluster.devices_per_node, plan.world).nodes > 1
