"""`Job`: all objects that one rank needs for training. opening.py builds it; the training loop uses it."""

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
from moe.records.rules import Live
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
    """The model in its engine, and the state that steps change. schedules: number of batches between two drains of the pipeline ->
    schedule. Schedule objects are kept, because the pipeline runtime caches its analysis of each object."""

    executor: Executor
    scale: LossScale
    rebalancer: Rebalancer
    counters: Counters = field(default_factory=Counters)
    schedules: dict[int, Schedule] = field(default_factory=dict)


@dataclass
class Saves:
    """Saving of a run's checkpoints. described: arguments of `state.parts` that are equal for all checkpoints (recipe, tokenizer, ...)."""

    saver: Saver
    described: dict[str, Any] = field(default_factory=dict)
    begun: int | None = None  # step of the newest checkpoint, even if it is still being written
    told: int | None = None  # step of the checkpoint for which on_save was last called


@dataclass
class Figures:
    """Figures of a run, measured or predicted, for its summary."""

    seconds: float = 0.0  # training time of this process
    evaluated: dict[str, float] = field(default_factory=dict)  # "validation_loss", "bits_per_byte" of the last evaluation
    evaluated_at: int | None = None  # step of the last evaluation
    predicted: Prediction | None = None  # memory and time, predicted before the start
    measured: Measured | None = None  # memory and time, measured in this run; None in a rehearsal
    recording: Recording | None = None  # profiler; None without --profile


@dataclass(frozen=True)
class Job:
    """All objects that one rank needs to train. name: the recipe's. out: the run's folder. shard: which samples of a training batch this
    rank reads. callbacks, auditor: None in a rehearsal. agree: the axis of all ranks if a user's program gives the samples, because reading
    may then fail on one rank; else None. doctor: watches the records, only on rank 0."""

    run: Run
    name: str
    out: Path
    world: World
    mesh: Mesh
    training: Training
    data: Dataset
    shard: TokenShard
    records: Records
    progress: Progress
    saves: Saves
    callbacks: Callbacks | None = None
    auditor: Auditor | None = None
    agree: Axis | None = None
    doctor: Live | None = None
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
        return None if self.callbacks is None else self.callbacks.stopped

    def read(self, samples: Callable[[], T]) -> T:
        """Call samples() and return its result. If `agree` is set, this is collective, and all ranks raise BadInput if reading fails on
        one."""
        return samples() if self.agree is None else of_all(samples, self.agree, what="data")

    def tell(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the method `event` of every callback with the state of the run (`Now`), which includes `record`. Collective if there are
        callbacks."""
        if self.callbacks is not None:
            w = self.world
            self.callbacks.call(event, Now(self.run, self.counters.step, record, w.rank, w.size, self.out, self.engine.module))
