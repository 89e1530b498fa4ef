"""Range of a predicted step time, from errors on published runs whose table did not form it (ranges.yaml).

`python -m tests.planner ranges` writes the file; tests/planner/ranges.py says how.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from moe.plan.machine.cluster import Cluster
from parallel import yaml_text
from parallel.store.files import read_text

FILE = Path(__file__).with_name("ranges.yaml")


@dataclass(frozen=True)
class Range:
    """Measured over predicted seconds in a group of published runs.

    runs: the group in words. devices: words, one of which a device's name contains; none for all devices. across: data parallelism crosses
    nodes (None: both). low, high: ends of the range. held_out: share of runs within the range of the other tables, mean of all tables.
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
        """Return whether a run belongs to the group. device: the name of its devices. across: data parallelism crosses nodes."""
        known = not self.devices or any(word in device.lower() for word in self.devices)
        return known and self.across in (None, across)

    def said(self, seconds: float) -> str:
        """Return the range of a predicted time as text."""
        return (
            f"{self.low * seconds:.3g} to {self.high * seconds:.3g} s: {10 * self.held_out:.0f} of 10 published runs "
            f"{self.runs} fell in the range of other tables"
        )


@lru_cache
def ranges() -> tuple[Range, ...]:
    """Return the groups, the finest first."""
    return tuple(Range(**{**each, "devices": tuple(each["devices"])}) for each in yaml_text.load(read_text(FILE)))


def range_of(cluster: Cluster, dp: int) -> Range | None:
    """Return the range for `dp` replicas on this cluster. None for hosts without accelerators, of which no published run is known."""
    across = dp > 1 and cluster.nodes > 1
    return None if cluster.cores else next(each for each in ranges() if each.holds(cluster.device.name, across=across))
