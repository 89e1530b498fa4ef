"""Numbers and sizes of collectives: predicted before anything is sent, and counted when they are called.

    predicted   Load, the rows that one rank has for the ranks of an axis   ->   Traffic, the Messages of one layer's exchange
    counted     every axis of a mesh reports each call to the mesh's Communicator   ->   counts(), a Count for each axis and collective

The planner times Messages. Tests and `moe bench exchange` compare Messages with the counts. Each mesh has its own Communicator, so two
meshes of one process count separately.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from parallel.mesh.debug_collectives import Agreement
from parallel.mesh.record import Record


def leaving(name: str, handed: int, ranks: int) -> int:
    """Return the bytes that a rank sends if its input to the collective `name` has `handed` bytes. All-reduces, reduce-scatters and
    all-gathers are counted as ring algorithms."""
    if name == "all_gather":
        return handed * (ranks - 1)
    if name in ("shift", "send"):
        return handed
    return handed * (ranks - 1) * (2 if name == "all_reduce" else 1) // ranks


class Load(NamedTuple):
    """The work of one rank in one exchange over `ranks` ranks.
    tokens: tokens of the rank, each routed to `choices` of the `bins` (such as experts). rows: rows that the rank sends, without dropped
    rows. slots: maximum number of rows that all bins together take from this rank (capacity); None: no limit. width: elements of a row.
    row_bytes: bytes of a row. busiest: (rows received by the rank that receives most) / `rows`; 1 if all bins get equally many rows.
    reached: number of targets (ranks or nodes) -> mean number of them to which a token's rows are sent. The bins are placed on targets in
    consecutive blocks of equal size. None: each row is sent to a random target. weighed: rows have weights, which get gradients."""

    tokens: float
    choices: int
    rows: float
    slots: float | None
    width: int
    row_bytes: int
    bins: int
    ranks: int
    busiest: float = 1.0
    reached: Callable[[int], float] | None = None
    weighed: bool = True

    def copies(self, targets: int) -> float:
        """Return the mean number of different targets to which a token's rows are sent. targets: number of ranks or nodes."""
        return distinct(self.rows / self.tokens, targets) if self.reached is None else self.reached(targets)


def distinct(choices: float, targets: float) -> float:
    """Return the expected number of different targets that are hit by `choices` independent, uniformly random choices of a target."""
    return targets * (1 - float((1 - 1 / targets) ** choices))


class Message(NamedTuple):
    """`calls` calls of the collective `name` over `axis` (names as in the communicator's counts), all with inputs of the same size.
    handed: bytes of a rank's inputs to all these calls. ranks: number of ranks of `axis`. stride: if `axis` is a part of a
    larger axis, as in the steps of a hierarchical exchange over ep, distance between neighbors on `axis` in indices of the larger one;
    else 1. busiest: in an all-to-all, (bytes received by the rank that receives most) / `handed`."""

    axis: str
    name: str
    handed: float
    ranks: int
    stride: int = 1
    calls: int = 1
    busiest: float = 1.0

    @property
    def sent(self) -> int:
        """Bytes that a rank sends to others in all calls."""
        return leaving(self.name, int(self.handed), self.ranks)

    @property
    def held(self) -> float:
        """Bytes of the inputs and results of all calls, on the rank that receives most."""
        return self.handed * (1 + {"all_gather": self.ranks, "reduce_scatter": 1 / self.ranks}.get(self.name, self.busiest))


class Traffic(NamedTuple):
    """The messages of one layer's exchange. agreed: small messages that ranks exchange before the rows, such as counts. forward, backward:
    rows and results in each pass. meanwhile: messages of each pass, with only the bytes that can overlap with computation on this rank's
    own data (shared experts)."""

    agreed: tuple[Message, ...]
    forward: tuple[Message, ...]
    backward: tuple[Message, ...]
    meanwhile: tuple[Message, ...] = ()

    @classmethod
    def there_and_back(cls, *agreed: Message, rows: Message, meanwhile: float = 0.0) -> Traffic:
        """Return the traffic of an exchange in which results are sent back by a message of the same size as `rows`, in both passes.
        meanwhile: fraction of `rows` that can overlap with computation on this rank's own data."""
        return cls(agreed, 2 * (rows,), 2 * (rows,), (rows._replace(handed=meanwhile * rows.handed),) if meanwhile else ())

    @property
    def every(self) -> tuple[Message, ...]:
        return self.agreed + self.forward + self.backward


@dataclass(frozen=True)
class Count:
    """The number of calls of one collective on one axis, and bytes of all calls together. bytes: given to the collective. sent: sent to
    other ranks; for all_reduce, all_gather and reduce_scatter the bytes of a ring algorithm, which are the least possible."""

    calls: int = 0
    bytes: int = 0
    sent: int = 0


class Communicator:
    """Counts a mesh's collectives. agreement: in debug mode, compares every collective between its ranks before it runs. record: this
    process's record, which the watchdog reads."""

    def __init__(self, agreement: Agreement | None = None, record: Record | None = None) -> None:
        self.agreement, self.record = agreement, record
        self._counts: dict[tuple[str, str], Count] = {}

    def add(self, axis: str, name: str, *, handed: int, sent: int) -> None:
        """Count one call of the collective `name`. `handed`: bytes given to it. `sent`: bytes that leave this rank."""
        so_far = self._counts.get((axis, name), Count())
        self._counts[axis, name] = Count(so_far.calls + 1, so_far.bytes + handed, so_far.sent + sent)

    def counts(self) -> dict[tuple[str, str], Count]:
        """Return the counts since the last `reset_counts`, by (axis, collective)."""
        return dict(self._counts)

    def reset_counts(self) -> None:
        self._counts.clear()
