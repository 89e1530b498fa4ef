"""All objects that one rank needs to train, as one value shared by the loop, the steps and the records.

Job    training   the model in its engine, and the state that steps change
       batches    samples of this rank
       output     records, display, callbacks
       saves      checkpoints
       figures    seconds, bytes and losses measured so far
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe.data import Dataset
from moe.data.token_shard import TokenShard
from moe.plan.choose.predicted import Prediction
from moe.recipe.hash_table import Table
from moe.recipe.sections import Run
from moe.records.metrics import Records
from moe.records.progress import Progress
from moe.train.parts.audit import Auditor
from moe.train.parts.callbacks import Callbacks, Now
from moe.train.parts.executor import Executor
from moe.train.parts.profile import Recording
from moe.train.parts.rebalance import Rebalancer
from moe.train.start.prediction import Measured
from moe.train.start.state import Counters
from parallel.data.engine import Engine
from parallel.mesh.mesh import Axis, Mesh
from parallel.numerics.precision import LossScale
from parallel.pipeline.schedule import Schedule
from parallel.process.process import World
from parallel.store.saver import Saver
from parallel.watch.outcome import of_all

T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """A model in its engine, and the state that steps change.

    `auditor`: None in a rehearsal. `schedules` of a pipeline, by the number of batches between drains. Each is made once, because the
    runtime caches its analysis.
    """

    executor: Executor
    scale: LossScale
    rebalancer: Rebalancer
    counters: Counters = field(default_factory=Counters)
    auditor: Auditor | None = None
    schedules: dict[int, Schedule] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """The data set, and this rank's shard of a training batch. `agree`: with samples from a user's program, the axis of all ranks."""

    data: Dataset
    shard: TokenShard
    agree: Axis | None = None

    def read(self, samples: Callable[[], T]) -> T:
        """Return the samples that `samples` reads. With a user's own data it is collective, and raises BadInput on all ranks if one
        fails."""
        return samples() if self.agree is None else of_all(samples, self.agree, what="data")


@dataclass(frozen=True)
class Output:
    """Receivers of a run's lines. `callbacks`: None in a rehearsal."""

    records: Records
    progress: Progress
    callbacks: Callbacks | None = None

    def write(self, line: dict[str, Any]) -> None:
        """Write a line of the records."""
        self.records.write(line)

    def event(self, name: str, **fields: Any) -> None:
        """Write an event to the records."""
        self.records.write({"kind": "event", "event": name, **fields})

    def note(self, line: str) -> None:
        """Show a line in the display."""
        self.progress.note(line)


@dataclass
class Saves:
    """A run's checkpoints. `code`: hashes of the plug-ins that the recipe names, by key. `base`: the entry for the base in checkpoints of
    adapters. `table`: for hash routers.

    `begun`: step of the last checkpoint begun, or resumed from. `told`: the last saved step that callbacks were told.
    """

    saver: Saver
    code: dict[str, str] = field(default_factory=dict)
    base: dict[str, str] | None = None
    table: Table | None = None
    begun: int | None = None
    told: int | None = None


@dataclass
class Figures:
    """Figures of a run. `seconds`: training time of this process. `evaluated`: results of the last evaluation, at step `evaluated_at`.

    `predicted`: memory and time predicted before the start, if possible. `measured`: the figures to compare it with. `recording`: profiler
    of this rank's time, if a profile was asked for.
    """

    seconds: float = 0.0
    evaluated: dict[str, float] = field(default_factory=dict)
    evaluated_at: int | None = None
    predicted: Prediction | None = None
    measured: Measured | None = None
    recording: Recording | None = None


@dataclass(frozen=True)
class Job:
    """One rank's share of a run."""

    run: Run
    name: str
    out: Path
    world: World
    mesh: Mesh
    training: Training
    batches: Batches
    output: Output
    saves: Saves
    figures: Figures = field(default_factory=Figures)

    @property
    def engine(self) -> Engine:
        return self.training.executor.engine

    @property
    def counters(self) -> Counters:
        return self.training.counters

    @property
    def stopped(self) -> str | None:
        """Reason of a callback to stop, or None."""
        return None if self.output.callbacks is None else self.output.callbacks.stopped

    def tell(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the callbacks. Collective if there are callbacks."""
        if self.output.callbacks is not None:
            w = self.world
            self.output.callbacks.call(event, Now(self.run, self.counters.step, record, w.rank, w.size, self.out, self.engine.module))
