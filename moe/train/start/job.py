"""`Job`: all objects with which one rank trains, made by opening.py and used by the loop, the steps and the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe.data import Dataset
from moe.data.token_shard import TokenShard
from moe.plan.choose.predicted import Prediction
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
    """The model in its engine, and the state that steps change. auditor: None in a rehearsal. schedules: number of batches between two
    drains of the pipeline -> schedule, made once, because the runtime caches its analysis of it."""

    executor: Executor
    scale: LossScale
    rebalancer: Rebalancer
    counters: Counters = field(default_factory=Counters)
    auditor: Auditor | None = None
    schedules: dict[int, Schedule] = field(default_factory=dict)


@dataclass(frozen=True)
class Batches:
    """The data set, and this rank's shard of a training batch. agree: the axis of all ranks if a user's program gives the samples."""

    data: Dataset
    shard: TokenShard
    agree: Axis | None = None

    def read(self, samples: Callable[[], T]) -> T:
        """Return samples(). If `agree` is set, the call is collective: if samples() fails on one rank, all ranks raise BadInput."""
        return samples() if self.agree is None else of_all(samples, self.agree, what="data")


@dataclass(frozen=True)
class Output:
    """Where a run's lines go: metrics.jsonl, the display, and callbacks (None in a rehearsal)."""

    records: Records
    progress: Progress
    callbacks: Callbacks | None = None

    def event(self, name: str, **fields: Any) -> None:
        """Write a line of kind "event" to metrics.jsonl."""
        self.records.write({"kind": "event", "event": name, **fields})


@dataclass
class Saves:
    """A run's checkpoints. described: what each stores unchanged (recipe, tokenizer, ...), as keyword arguments of `state.parts`."""

    saver: Saver
    described: dict[str, Any] = field(default_factory=dict)
    begun: int | None = None  # step of the newest checkpoint, also if it is still being written
    told: int | None = None  # step of the newest checkpoint for which on_save was called


@dataclass
class Figures:
    """Measured and predicted figures of a run."""

    seconds: float = 0.0  # training time of this process
    evaluated: dict[str, float] = field(default_factory=dict)  # "validation_loss", "bits_per_byte" of the last evaluation
    evaluated_at: int | None = None  # step of the last evaluation
    predicted: Prediction | None = None  # memory and time, predicted before the start
    measured: Measured | None = None  # memory and time, measured in this run; None in a rehearsal
    recording: Recording | None = None  # profiler, if a profile was asked for


@dataclass(frozen=True)
class Job:
    """All objects with which one rank trains a run. name: the recipe's. out: the run's folder."""

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
        """The reason for which a callback has stopped the run; None if none has."""
        return None if self.output.callbacks is None else self.output.callbacks.stopped

    def tell(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the method `event` of all callbacks, with `record` in its argument. Collective if there are callbacks."""
        if self.output.callbacks is not None:
            w = self.world
            self.output.callbacks.call(event, Now(self.run, self.counters.step, record, w.rank, w.size, self.out, self.engine.module))
