"""Everything one rank needs to train, as one value that the loop, the steps and the records share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe.data import Dataset
from moe.data.token_shard import TokenShard
from moe.plan.predicted import Prediction
from moe.recipe.hash_table import Table
from moe.recipe.sections import Run
from moe.records.metrics import Records
from moe.records.progress import Progress
from moe.train.audit import Auditor
from moe.train.callbacks import Callbacks, Now
from moe.train.executor import Executor
from moe.train.prediction import Measured
from moe.train.profile import Recording
from moe.train.rebalance import Rebalancer
from moe.train.state import Counters
from parallel.data.engine import Engine
from parallel.mesh import Mesh
from parallel.outcome import of_all
from parallel.pipeline.schedule import Schedule
from parallel.precision import LossScale
from parallel.process import World
from parallel.saver import Saver

T = TypeVar("T")


@dataclass
class Job:
    """One rank's part of a run; `evaluated` is what the last evaluation gave, `seconds` the training time of this process.

    `predicted`: what was said before it started, if anything could be; `measured`: what to hold against that.
    `recording`: of this rank's time, where a profile was asked for.
    `schedules` of a pipeline by how many batches they take without a drain: one object each, as its runtime keeps what it works out of it.
    """

    run: Run
    name: str
    out: Path
    world: World
    mesh: Mesh
    executor: Executor
    data: Dataset
    shard: TokenShard  # of a training batch
    records: Records
    progress: Progress
    scale: LossScale
    rebalancer: Rebalancer
    saver: Saver
    counters: Counters = field(default_factory=Counters)
    evaluated: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    predicted: Prediction | None = None
    measured: Measured | None = None
    recording: Recording | None = None
    auditor: Auditor | None = None  # of a rehearsal there is none
    schedules: dict[int, Schedule] = field(default_factory=dict)
    callbacks: Callbacks | None = None  # of a rehearsal there are none
    code: dict[str, str] = field(default_factory=dict)  # hashes of the parts that the recipe names, by key
    own_data: bool = False  # samples that a user's program makes: what it raises on one rank ends all of them
    saved_at: int | None = None  # the step whose checkpoint was begun last, or gone on from
    told_saved: int | None = None  # the step of the last one that callbacks know of
    evaluated_at: int | None = None
    base: dict[str, str] | None = None  # of a run of adapters, what its checkpoints say of the other weights
    table: Table | None = None  # of routers that were given one

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    @property
    def checkpoints(self) -> Path:
        return self.saver.folder

    @property
    def stopped(self) -> str | None:
        """Why a callback has asked to stop, if one has."""
        return None if self.callbacks is None else self.callbacks.stopped

    def read(self, samples: Callable[[], T]) -> T:
        """What reading them gives. Raises BadInput on every rank where a user's own cannot be made on one. Collective for those."""
        return of_all(samples, self.mesh.axis("world"), what="data") if self.own_data else samples()

    def tell(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the callbacks. Collective where there are any."""
        if self.callbacks is not None:
            w = self.world
            self.callbacks.call(event, Now(self.run, self.counters.step, record, w.rank, w.size, self.out, self.engine.module))
