"""Everything one rank needs to train, as one value that the loop, the steps and the records share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from moe.data import Dataset
from moe.data.token_shard import TokenShard
from moe.plan.predicted import Prediction
from moe.recipe.sections import Run
from moe.records.metrics import Records
from moe.records.progress import Progress
from moe.train.audit import Auditor
from moe.train.executor import Executor
from moe.train.prediction import Measured
from moe.train.profile import Recording
from moe.train.rebalance import Rebalancer
from moe.train.state import Counters
from parallel.data.engine import Engine
from parallel.mesh import Mesh
from parallel.pipeline.schedule import Schedule
from parallel.precision import LossScale
from parallel.process import World
from parallel.saver import Saver


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

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    @property
    def checkpoints(self) -> Path:
        return self.saver.folder
