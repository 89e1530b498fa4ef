"""All objects that one rank needs to train, as one value shared by the loop, the steps and the records."""

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
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.pipeline.schedule import Schedule
from parallel.process.process import World
from parallel.store.saver import Saver
from parallel.watch.outcome import of_all

T = TypeVar("T")


@dataclass
class Job:
    """One rank's share of a run. `evaluated`: results of the last evaluation. `seconds`: training time of this process.

    `predicted`: memory and time predicted before the start, if possible. `measured`: the figures to compare it with. `recording`: profiler
    of this rank's time, if a profile was asked for. `schedules` of a pipeline, by the number of batches between drains. Each is made once,
    because the runtime caches its analysis.
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
    auditor: Auditor | None = None  # None in a rehearsal
    schedules: dict[int, Schedule] = field(default_factory=dict)
    callbacks: Callbacks | None = None  # None in a rehearsal
    code: dict[str, str] = field(default_factory=dict)  # hashes of the plug-ins that the recipe names, by key
    own_data: bool = False  # samples from a user's program: an exception on one rank ends all ranks
    saved_at: int | None = None  # the step of the last checkpoint begun, or resumed from
    told_saved: int | None = None  # the last saved step that callbacks were told
    evaluated_at: int | None = None
    base: dict[str, str] | None = None  # the entry for the base in checkpoints of adapters
    table: Table | None = None  # for hash routers with a table

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    @property
    def checkpoints(self) -> Path:
        return self.saver.folder

    @property
    def stopped(self) -> str | None:
        """Reason of a callback to stop, or None."""
        return None if self.callbacks is None else self.callbacks.stopped

    def read(self, samples: Callable[[], T]) -> T:
        """Return the samples that `samples` reads. With a user's own data it is collective, and raises BadInput on all ranks if one
        fails."""
        return of_all(samples, self.mesh.axis("world"), what="data") if self.own_data else samples()

    def tell(self, event: str, record: Mapping[str, Any]) -> None:
        """Call the callbacks. Collective if there are callbacks."""
        if self.callbacks is not None:
            w = self.world
            self.callbacks.call(event, Now(self.run, self.counters.step, record, w.rank, w.size, self.out, self.engine.module))
