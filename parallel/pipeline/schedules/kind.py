"""Facts about a schedule that checks, simulator, planner and verify ask for: a ScheduleKind each, which catalog.py lists by name.

    make       sizes -> the order of actions                 refusal    sizes that it cannot have, with the nearest that it can
    seconds    closed form of its time, else simulated       held       closed form of what ranks keep, else counted in its order

A fact that an order of actions shows is no field: see `splits_backward` and `update_every`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.schedule import Op, Schedule
from parallel.pipeline.simulator.held import Rank

Placed = Literal["line", "v", "both_ways"]
DEFAULT_CHUNKS = 2  # used if chunks are a choice and none are given


@dataclass(frozen=True)
class Size:
    """The parameters of a schedule: `microbatches` in each of `batches`, `chunks` stages per rank; each other belongs to one schedule."""

    ranks: int
    microbatches: int
    chunks: int = 1
    batches: int = 1
    vertical_sync: bool = False
    pipelines: int = 2

    def one_after_the_other(self, schedule: Callable[[int, int], Schedule]) -> Schedule:
        """For schedules with a flush: the schedule of one batch, repeated."""
        return schedule(self.ranks, self.microbatches).repeated(self.batches)


class Passes(NamedTuple):
    """Seconds of one micro-batch on each rank. `waits`: seconds in which it waits for messages, in both directions together."""

    forward: Sequence[float]
    backward: Sequence[float]
    waits: float
    microbatches: int
    chunks: int

    @property
    def total(self) -> list[float]:
        """Forward, backward and messages of each rank."""
        return [f + b + self.waits for f, b in zip(self.forward, self.backward, strict=True)]


def any_size(size: Size) -> None:
    """The rule of schedules that can have every size."""


@dataclass(frozen=True)
class ScheduleKind:
    """One row of the catalog. `chunks`: the only possible number per rank, None if it is a choice. `option`: the Size field only it uses.

    batches: how many are drawn if no number is given.
    placed: where stages are: on a `line`, stage s on rank s modulo ranks; on a `v`, down the ranks and up again; `both_ways`, in replicas.
    refusal: why a size is impossible, about `stages`, `pipelines` or `microbatches`, with the nearest that works; None if it is possible.
    seconds: time from the first forward to the last backward pass; None: it is simulated.
    held: what each rank keeps; None: counted in an order of `rounds` micro-batches a rank, after which no more is kept (None: of three
    rounds and the rest).
    steady: after three rounds each further one takes equally long, also if stages differ; otherwise every step is simulated whole.
    age: number of updates by which the weights of a stage's gradients are older than those that they change; None: never older.
    advice: why it is not recommended, and which schedule is better.
    """

    make: Callable[[Size], Schedule]
    about: str
    chunks: int | None = 1
    batches: int = 1
    option: str | None = None
    placed: Placed = "line"
    refusal: Callable[[Size], BadInput | None] = any_size
    seconds: Callable[[Passes], float] | None = None
    held: Callable[[Size], tuple[Rank, ...]] | None = None
    rounds: int | None = None
    steady: bool = True
    age: Callable[[Size, int], int] | None = None
    advice: str | None = None

    @property
    def continuous(self) -> bool:
        """Whether updates do not wait for the pipeline to drain, so that gradients are of older weights than those they update."""
        return self.age is not None

    @cached_property
    def _example(self) -> Schedule:
        """An order of the smallest size that it can have."""
        sizes = (Size(ranks, m, self.chunks or DEFAULT_CHUNKS) for ranks, m in product(range(2, 9), range(2, 33)))
        return self.make(next(size for size in sizes if self.refusal(size) is None))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether backward passes are cut in two, I and W, so that weight gradients can be put off."""
        return any(action.op is Op.I for order in self._example.orders for action in order)

    @cached_property
    def update_every(self) -> int | None:
        """Micro-batches of an update if their number is fixed; None if an update sums all of a step."""
        return self._example.microbatches_per_update if self._example.num_updates > 1 else None
