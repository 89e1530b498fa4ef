"""Facts about a schedule, for checks, simulator, planner and verify: one ScheduleKind for each schedule, listed in catalog.py.

    make       size -> Schedule                               refusal    error for impossible sizes, with the nearest possible one
    seconds    closed form of its time; None: simulated       held       closed form of the kept activations; None: counted

Facts that can be read from an order of actions are properties, not fields: `splits_backward` and `update_every`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.schedule import Op, Schedule
from parallel.pipeline.simulator.held import RankPeaks

Placed = Literal["line", "v", "both_ways"]
DEFAULT_CHUNKS = 2  # number of stages a rank if the schedule leaves the choice and none is given


@dataclass(frozen=True)
class Size:
    """Parameters of a schedule: `batches` of `microbatches` each, `chunks` stages a rank.

    vertical_sync: all stages read the first stage's weight version (PipeDream). pipelines: number of pipelines (Chimera).
    """

    ranks: int
    microbatches: int
    chunks: int = 1
    batches: int = 1
    vertical_sync: bool = False
    pipelines: int = 2


class PassTimes(NamedTuple):
    """Times from which a closed form computes a schedule's time.

    forward, backward: seconds of one micro-batch on each rank, all of its stages together. waits: seconds that a rank waits for one
    micro-batch's messages, both directions together.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    waits: float
    microbatches: int
    chunks: int

    @property
    def total(self) -> list[float]:
        """Return the seconds of one micro-batch on each rank: forward pass, backward pass and waits."""
        return [f + b + self.waits for f, b in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True)
class ScheduleKind:
    """One row of the catalog.

    make: builds the schedule of a size. about: one line for help texts.
    chunks: the only possible number of stages a rank; None if it is a choice.
    batches: number of batches if none is given.
    option: name of the Size field that only this schedule uses.
    placed: `line`: stage s on rank s modulo ranks; `v`: down the ranks and up again; `both_ways`: replicas in both directions.
    refusal: size -> error that names an impossible `stages`, `pipelines` or `microbatches` and the nearest possible value, or None.
    seconds: times -> seconds from the first forward to the last backward pass; None: they are simulated.
    held: size -> peak activations of each rank; None: they are counted in an order of rounds * ranks micro-batches.
    rounds: multiple of the ranks' number; with more micro-batches the peak activations stay the same. None: three rounds and the
        remainder are counted.
    steady: True if, after three rounds, each further round takes equally long, even if stages differ; False: whole steps are simulated.
    age: (size, stage) -> number of updates between the weights that gradients were computed with and those they change; None: 0.
    advice: why the schedule is not recommended, and which is better.
    """

    make: Callable[[Size], Schedule]
    about: str
    chunks: int | None = 1
    batches: int = 1
    option: str | None = None
    placed: Placed = "line"
    refusal: Callable[[Size], BadInput | None] = lambda size: None
    seconds: Callable[[PassTimes], float] | None = None
    held: Callable[[Size], tuple[RankPeaks, ...]] | None = None
    rounds: int | None = None
    steady: bool = True
    age: Callable[[Size, int], int] | None = None
    advice: str | None = None

    @property
    def continuous(self) -> bool:
        """True if updates do not wait for the pipeline to drain, so that gradients belong to older weights than those they change."""
        return self.age is not None

    @cached_property
    def _example(self) -> Schedule:
        """Return a schedule of the smallest possible size, from which the properties read its facts."""
        sizes = (Size(ranks, m, self.chunks or DEFAULT_CHUNKS) for ranks, m in product(range(2, 9), range(2, 33)))
        return self.make(next(size for size in sizes if self.refusal(size) is None))

    @cached_property
    def splits_backward(self) -> bool:
        """True if backward passes are cut in two, I and W, so that weight gradients can be deferred."""
        return any(action.op is Op.I for order in self._example.orders for action in order)

    @cached_property
    def update_every(self) -> int | None:
        """Number of micro-batches in an update, if it is fixed; None if an update sums all micro-batches of a step."""
        return self._example.microbatches_per_update if self._example.num_updates > 1 else None
