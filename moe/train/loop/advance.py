"""Makes the next training step: data, gradients, update; or the next few steps, if the schedule does not drain the pipeline after each."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe.plan.pipeline import continuous, schedule_of
from moe.train.loop.step import accumulate, finish, stream
from moe.train.parts.learning_rate import learning_rate
from moe.train.parts.numbers import Numbers
from moe.train.start.job import Job
from moe.train.start.place import peak_later
from moe.train.start.prediction import PASSES, STEP, during
from parallel.mesh.collectives import sum_over
from parallel.mesh.host import on_device
from parallel.numerics.clip import GradientNorm


def advance(job: Job, asked: Callable[[], bool]) -> list[Made]:
    """Make one or more steps; return the results of each. asked: returns True after a signal has asked this process to stop."""
    return _stream(job, asked) if continuous(job.run) else [_step(job, asked)]


class Made(NamedTuple):
    """Results of one step. numbers: loss, and statistics of the MoE layers. norm: gradient norm before clipping. rate: learning rate.
    scale: loss scale. `peak_bytes()`: maximum over ranks of a rank's peak memory so far, in bytes."""

    numbers: Numbers
    norm: GradientNorm
    rate: float
    scale: float
    peak_bytes: Callable[[], float]


def _step(job: Job, asked: Callable[[], bool]) -> Made:
    run, training, counters, measured = job.run, job.training, job.counters, job.figures.measured
    rate, scale = learning_rate(counters.updates, run.optimizer, total=run.train.steps), training.scale.value
    auditor = job.auditor if job.auditor is not None and job.auditor.due(counters.step + 1) else None
    with during(PASSES):
        passes = partial(
            accumulate,
            training.executor,
            _batch(job, counters.step),
            shard=job.shard,
            microbatches=run.pipeline.microbatches,
            seed=run.train.seed,
            step=counters.step,
            loss_scale=scale,
            flag=_flag(job, asked),
        )
        numbers = passes() if auditor is None else auditor.passes(passes, step=counters.step + 1)
    if measured is not None:
        measured.before_update(job.engine)
    world, clip_norm = job.mesh.axis("world"), run.optimizer.clip_norm
    with during(STEP):
        norm = finish(job.engine, numbers, world=world, scale=training.scale, lr=rate, clip_norm=clip_norm, device=job.world.device)
        if auditor is not None:
            auditor.compare_copies(counters.step + 1, "after the update")
    return Made(numbers, norm, rate, scale, peak_later(job.mesh, job.world.device))


def _flag(job: Job, asked: Callable[[], bool]) -> Tensor:
    """Return the number of ranks on the tp axis that a signal has asked to stop, float64 [1]. It is summed over the other axes together
    with the step's numbers."""
    tp = job.mesh.axis("tp", label="stop signals")
    return sum_over(on_device(torch.tensor([float(asked())], dtype=torch.float64), job.world.device), tp)


def _stream(job: Job, asked: Callable[[], bool]) -> list[Made]:
    """Make all steps until the pipeline is next drained: for an evaluation, a save, a multiple of `drain_every`, or the end of training.
    asked: returns True after a signal has asked this process to stop."""
    run, counters, schedules = job.run, job.counters, job.training.schedules
    steps = (run.train.steps, run.pipeline.drain_every, run.train.eval_every, run.train.save_every)
    count = min(every - counters.step % every for every in steps if every)
    rates = [learning_rate(counters.updates + n, run.optimizer, total=run.train.steps) for n in range(count)]
    if count not in schedules:
        schedules[count] = schedule_of(run, batches=count)
    with during(PASSES):
        made = stream(
            job.training.executor,
            [_batch(job, counters.step + n) for n in range(count)],
            schedule=schedules[count],
            shard=job.shard,
            world=job.mesh.axis("world"),
            seed=run.train.seed,
            step=counters.step,
            rate=rates.__getitem__,
            flag=_flag(job, asked),
        )
    peak_bytes = peak_later(job.mesh, job.world.device)
    return [Made(numbers, norm, rate, 1.0, peak_bytes) for (numbers, norm), rate in zip(made, rates, strict=True)]


def _batch(job: Job, step: int) -> Tensor:
    return on_device(torch.from_numpy(job.read(partial(job.data.train.batch, step, job.shard))), job.world.device)
