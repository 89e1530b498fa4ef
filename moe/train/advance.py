"""The next step of a run, or the next few: data, gradients, update. What the trainer's loop does not need to know of.

one         a batch, drained: gradients, then the norm over all ranks, then the update or a skip
several     batches through a pipeline that is not drained between them (moe/train/stream.py)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from moe.plan.pipeline import continuous, schedule_of
from moe.recipe.sections import Run
from moe.train.job import Job
from moe.train.learning_rate import learning_rate
from moe.train.numbers import Numbers
from moe.train.out_of_memory import PASSES, STEP, during
from moe.train.step import accumulate, finish
from moe.train.stream import stream
from parallel.clip import GradientNorm
from parallel.pipeline.schedule import Schedule


def advance(job: Job, asked: Callable[[], bool]) -> list[Made]:
    """At least one step; `asked`: whether a signal asks the run to stop."""
    return _stream(job, asked) if continuous(job.run) else [_step(job, asked)]


class Made(NamedTuple):
    """One step."""

    numbers: Numbers
    norm: GradientNorm
    rate: float
    scale: float


def _step(job: Job, asked: Callable[[], bool]) -> Made:
    run, counters = job.run, job.counters
    rate, scale = learning_rate(counters.updates, run.optimizer, total=run.train.steps), job.scale.value
    with during(PASSES):
        numbers = accumulate(
            job.engine,
            _batch(job, counters.step),
            mesh=job.mesh,
            microbatches=run.pipeline.microbatches,
            seed=run.train.seed,
            step=counters.step,
            loss_scale=scale,
            flag=int(asked()),
        )
    with during(STEP):
        norm = finish(
            job.engine,
            numbers,
            world=job.mesh.axis("world"),
            scale=job.scale,
            lr=rate,
            clip_norm=run.optimizer.clip_norm,
            device=job.world.device,
        )
    return Made(numbers, norm, rate, scale)


def _stream(job: Job, asked: Callable[[], bool]) -> list[Made]:
    """The steps up to the next drain of the pipeline: where something is evaluated or saved, and every so many."""
    run, counters = job.run, job.counters
    steps = (run.train.steps, run.pipeline.drain_every, run.train.eval_every, run.train.save_every)
    count = min(every - counters.step % every for every in steps if every)
    rates = [learning_rate(counters.updates + n, run.optimizer, total=run.train.steps) for n in range(count)]
    with during(PASSES):
        made = stream(
            job.engine,
            [_batch(job, counters.step + n) for n in range(count)],
            schedule=_schedule(run, count),
            mesh=job.mesh,
            seed=run.train.seed,
            step=counters.step,
            rate=rates.__getitem__,
            flag=int(asked()),
        )
    return [Made(numbers, norm, rate, 1.0) for (numbers, norm), rate in zip(made, rates, strict=True)]


@lru_cache(maxsize=16)
def _schedule(run: Run, count: int) -> Schedule:
    """One object for each count: the runtime keeps what it works out of it."""
    return schedule_of(run, batches=count)


def _batch(job: Job, step: int) -> Tensor:
    dp = job.mesh.axis("dp")
    return torch.from_numpy(job.data.train.batch(step, job.run.train.global_batch, dp.index, dp.size)).to(job.world.device)
