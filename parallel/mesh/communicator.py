"""A mesh's counts of collectives, with the watchdog's record and the debug mode's comparison.

    mesh.communicator  <-  every axis of the mesh has it  <-  collectives report each call      counts(), reset_counts()

It belongs to a mesh, not to the process: two meshes of one process count and compare separately.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from parallel.mesh.debug_collectives import Agreement
from parallel.mesh.record import Record


@dataclass(frozen=True)
class Count:
    """Calls and bytes of one collective on one axis.

    `bytes`: given to the collective. `sent`: sent to other ranks; for all_reduce, all_gather and reduce_scatter as in a ring, which is
    the minimum of all algorithms.
    """

    calls: int
    bytes: int
    sent: int


class Communicator:
    """Counts of a mesh's collectives.

    `agreement`: compares every collective over its ranks before it runs (parallel/mesh/debug_collectives.py), or None. `record`: this
    process's record, which the watchdog reads, or None.
    """

    def __init__(self, agreement: Agreement | None = None, record: Record | None = None) -> None:
        self.agreement, self.record = agreement, record
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._sent: Counter[tuple[str, str]] = Counter()

    def add(self, axis: str, name: str, *, handed: int, sent: int) -> None:
        """Count one call of the collective `name`. `handed`: bytes given to it. `sent`: bytes that leave this rank."""
        self._calls[axis, name] += 1
        self._bytes[axis, name] += handed
        self._sent[axis, name] += sent

    def counts(self) -> dict[tuple[str, str], Count]:
        """Return calls and bytes since the last `reset_counts`, by (axis, collective)."""
        return {key: Count(self._calls[key], self._bytes[key], self._sent[key]) for key in self._calls}

    def reset_counts(self) -> None:
        for counter in (self._calls, self._bytes, self._sent):
            counter.clear()
