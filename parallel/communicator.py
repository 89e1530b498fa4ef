"""What one mesh keeps of its collectives: how many there were and of how many bytes, where this rank is among them for the watchdog, and
in debug mode what ranks compare before each.

    mesh.communicator  <-  every axis of the mesh carries it  <-  collectives note each call there      counts(), reset_counts()

It belongs to a mesh and not to the process: two meshes of one process count apart, and compare apart.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from parallel.debug_collectives import Agreement
from parallel.record import Record


@dataclass(frozen=True)
class Count:
    """`bytes`: handed to the collective; `sent`: what of them, or of their sums, goes to other ranks (all_reduce, all_gather and
    reduce_scatter: as in a ring, which no algorithm undercuts)."""

    calls: int
    bytes: int
    sent: int


class Communicator:
    """`agreement`: has every collective compared over its ranks before it runs (parallel/debug_collectives.py); None: nothing is.
    `record`: this process's, which the watchdog reads; None where there is none."""

    def __init__(self, agreement: Agreement | None = None, record: Record | None = None) -> None:
        self.agreement, self.record = agreement, record
        self._calls: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._sent: Counter[tuple[str, str]] = Counter()

    def add(self, axis: str, name: str, *, handed: int, sent: int) -> None:
        """One call of the collective `name`, of so many bytes."""
        self._calls[axis, name] += 1
        self._bytes[axis, name] += handed
        self._sent[axis, name] += sent

    def counts(self) -> dict[tuple[str, str], Count]:
        """Calls and bytes since the last `reset_counts`, by (axis, collective)."""
        return {key: Count(self._calls[key], self._bytes[key], self._sent[key]) for key in self._calls}

    def reset_counts(self) -> None:
        for counter in (self._calls, self._bytes, self._sent):
            counter.clear()
