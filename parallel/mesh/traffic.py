"""Collectives of an exchange as numbers, stated before anything is sent.

    Load      rows that one rank has for the ranks of an axis       ->      Traffic     its collectives, one Message for each kind

The planner times messages. Tests and `moe bench exchange` compare them with the collectives counted by the mesh's communicator.
"""

from __future__ import annotations

from typing import NamedTuple


def leaving(name: str, handed: int, ranks: int) -> int:
    """Return the bytes that leave a rank if it gives `handed` bytes to the collective `name`: sums and gathers as in a ring."""
    if name == "all_gather":
        return handed * (ranks - 1)
    if name in ("shift", "send"):
        return handed
    return handed * (ranks - 1) * (2 if name == "all_reduce" else 1) // ranks


class Load(NamedTuple):
    """The work of one rank in one exchange over `ranks` ranks, if every bin gets equally many rows.

    `tokens` with `choices` bins each; `rows` that are sent, dropped ones left out; `slots`: rows and empty slots, None if slots are not
    limited. A row has `width` numbers in `row_bytes`.
    """

    tokens: float
    choices: int
    rows: float
    slots: float | None
    width: int
    row_bytes: int
    bins: int
    ranks: int


class Message(NamedTuple):
    """A collective by its name in the communicator's counts, over `ranks` ranks of `axis`, `stride` ranks apart in the exchange's axis.

    `handed`: bytes that a rank gives to it, in `calls` equal calls together.
    """

    axis: str
    name: str
    handed: float
    ranks: int
    stride: int = 1
    calls: int = 1

    @property
    def sent(self) -> int:
        """Bytes that leave a rank."""
        return leaving(self.name, int(self.handed), self.ranks)

    @property
    def held(self) -> float:
        """Bytes of its input and its result on one rank."""
        return self.handed * (1 + {"all_gather": self.ranks, "reduce_scatter": 1 / self.ranks}.get(self.name, 1))


class Traffic(NamedTuple):
    """Messages of one layer. `agreed`: small ones before the rows, such as counts. `forward` and `backward` carry rows or results."""

    agreed: tuple[Message, ...]
    forward: tuple[Message, ...]
    backward: tuple[Message, ...]

    @classmethod
    def there_and_back(cls, *agreed: Message, rows: tuple[Message, ...]) -> Traffic:
        """Return the traffic if rows are sent, results come back by the same messages, and so do their gradients."""
        return cls(agreed, 2 * rows, 2 * rows)

    @property
    def every(self) -> tuple[Message, ...]:
        return self.agreed + self.forward + self.backward
