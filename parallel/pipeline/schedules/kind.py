"""ScheduleKind: the facts about a schedule that the checks, the simulator, the planner and `moe verify` use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal, NamedTuple

from parallel.errors import BadInput
from parallel.pipeline.schedule import Schedule
from parallel.pipeline.simulator.held import RankPeaks

Placed = Literal["line", "v", "both_ways"]
DEFAULT_CHUNKS = 2  # stages per rank if the schedule allows several numbers and the user gives none


@dataclass(frozen=True)
class Size:
    """Parameters of a schedule. microbatches: number in one batch. chunks: stages per rank. batches: number of batches in the schedule.
    vertical_sync: all stages read the first stage's weight version (PipeDream). pipelines: number of pipelines (Chimera)."""

    ranks: int
    microbatches: int
    chunks: int = 1
    batches: int = 1
    vertical_sync: bool = False
    pipelines: int = 2


class PassTimes(NamedTuple):
    """Times of the passes, from which a closed form computes the time of a schedule.
    forward, backward: for each rank, seconds of one micro-batch's passes through all stages of the rank. waits: seconds that a rank waits
    for the messages of one micro-batch, in both directions together. chunks: stages per rank."""

    forward: Sequence[float]
    backward: Sequence[float]
    waits: float
    microbatches: int
    chunks: int

    @property
    def total(self) -> list[float]:
        """Return for each rank the seconds of one micro-batch: forward pass, backward pass and waits."""
        return [f + b + self.waits for f, b in zip(self.forward, self.backward, strict=True)]


@dataclass(frozen=True)
class ScheduleKind:
    """One row of the catalog.

    make: builds the schedule for a Size. about: one line for help texts.
    chunks: the only possible number of stages per rank; None if the user can choose.
    batches: number of batches (steps) if the caller gives none.
    option: name of the Size field that only this schedule uses.
    placed: rank of each stage s. `line`: s modulo ranks; `v`: down the ranks and up again; `both_ways`: replicas in both directions.
    refusal: size -> error for an impossible `stages`, `pipelines` or `microbatches`, with the nearest possible value; None if possible.
    seconds: times -> seconds from the first forward to the last backward pass; None: the planner simulates the step.
    rounds: number of rounds (a round: one micro-batch for each rank) after which peak activations stay the same. None: unknown; the planner
        then counts three rounds and the remainder.
    peaks: size -> peak activations of each rank; None: the planner counts them in a step of about `rounds` rounds.
    steady: True if each round after the third adds the same time to a step, so that the simulation of a few rounds is enough. False: the
        whole step is simulated.
    age: (size, stage) -> number of updates between a gradient's forward pass and the update that applies it; None: always 0.
    advice: one line that says why another schedule is better, and names it.
    """

    make: Callable[[Size], Schedule]
    about: str
    chunks: int | None = 1
    batches: int = 1
    option: str | None = None
    placed: Placed = "line"
    refusal: Callable[[Size], BadInput | None] = lambda size: None
    seconds: Callable[[PassTimes], float] | None = None
    peaks: Callable[[Size], tuple[RankPeaks, ...]] | None = None
    rounds: int | None = None
    steady: bool = True
    age: Callable[[Size, int], int] | None = None
    advice: str | None = None

    @property
    def continuous(self) -> bool:
        """True if updates do not wait for the pipeline to drain, so that gradients were computed with older weights."""
        return self.age is not None

    @cached_property
    def _example(self) -> Schedule:
        """Return the schedule at its smallest possible size."""
        sizes = (Size(ranks, m, self.chunks or DEFAULT_CHUNKS) for ranks, m in product(range(2, 9), range(2, 33)))
        return self.make(next(size for size in sizes if self.refusal(size) is None))

    @cached_property
    def splits_backward(self) -> bool:
        return self._example.splits_backward

    @cached_property
    def update_every(self) -> int | None:
        """Number of micro-batches of an update if the schedule updates more than once a batch; None if an update uses the whole batch."""
        return self._example.microbatches_per_update if self._example.num_updates > 1 else None
