"""The next step of a run, or the next few: data, gradients, update. Hides pipelines and audits from the trainer's loop.

one         a batch, then a drained pipeline: gradients, then the norm over all ranks, then the update or a skip
several     batches through a pipeline that is not drained between them (moe/train/loop/stream.py)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from moe.plan.pipeline import continuous, schedule_of
from moe.train.loop.step import accumulate, finish
from moe.train.loop.stream import stream
from moe.train.parts.learning_rate import learning_rate
from moe.train.parts.numbers import Numbers
from moe.train.start.job import Job
from moe.train.start.out_of_memory import PASSES, STEP, during
from parallel.mesh.collectives import sum_over
from parallel.numerics.clip import GradientNorm
from parallel.pipeline.schedule import Schedule


def advance(job: Job, asked: Callable[[], bool]) -> list[Made]:
    """Make at least one step. `asked` returns True if a signal asks the run to stop."""
    return _stream(job, asked) if continuous(job.run) else [_step(job, asked)]


class Made(NamedTuple):
    """Results of one step."""

    numbers: Numbers
    norm: GradientNorm
    rate: float
    scale: float


def _step(job: Job, asked: Callable[[], bool]) -> Made:
    run, training, counters, measured = job.run, job.training, job.counters, job.figures.measured
    rate, scale = learning_rate(counters.updates, run.optimizer, total=run.train.steps), training.scale.value
    auditor = training.auditor if training.auditor is not None and training.auditor.due(counters.step + 1) else None
    with during(PASSES):
        passes = partial(
            accumulate,
            training.executor,
            _batch(job, counters.step),
            shard=job.batches.shard,
            microbatches=run.pipeline.microbatches,
            seed=run.train.seed,
            step=counters.step,
            loss_scale=scale,
            flag=_flag(job, asked),
        )
        numbers = passes() if auditor is None else auditor.passes(passes, step=counters.step + 1)
    if measured is not None:
        measured.gradients(job.engine)
    with during(STEP):
        norm = finish(
            job.engine,
            numbers,
            world=job.mesh.axis("world"),
            scale=training.scale,
            lr=rate,
            clip_norm=run.optimizer.clip_norm,
            device=job.world.device,
        )
        if auditor is not None:
            auditor.compare_copies(counters.step + 1, "after the update")
    return Made(numbers, norm, rate, scale)


def _flag(job: Job, asked: Callable[[], bool]) -> int:
    """Return a nonzero flag if any rank of tp is asked to stop. Ranks of tp read the same tokens, so the step's numbers, and the flags in
    them, are not summed over tp."""
    tp = job.mesh.axis("tp", label="who is asked to stop")
    return int(sum_over(torch.tensor(int(asked()), device=job.world.device), tp)) if tp.size > 1 else int(asked())


def _stream(job: Job, asked: Callable[[], bool]) -> list[Made]:
    """Make the steps up to the next drain: the next evaluation, save, end of training, or multiple of `drain_every`."""
    run, counters = job.run, job.counters
    steps = (run.train.steps, run.pipeline.drain_every, run.train.eval_every, run.train.save_every)
    count = min(every - counters.step % every for every in steps if every)
    rates = [learning_rate(counters.updates + n, run.optimizer, total=run.train.steps) for n in range(count)]
    with during(PASSES):
        made = stream(
            job.training.executor,
            [_batch(job, counters.step + n) for n in range(count)],
            schedule=_schedule(job, count),
            shard=job.batches.shard,
            world=job.mesh.axis("world"),
            seed=run.train.seed,
            step=counters.step,
            rate=rates.__getitem__,
            flag=_flag(job, asked),
        )
    return [Made(numbers, norm, rate, 1.0) for (numbers, norm), rate in zip(made, rates, strict=True)]


def _schedule(job: Job, count: int) -> Schedule:
    made = job.training.schedules
    if count not in made:
        made[count] = schedule_of(job.run, batches=count)
    return made[count]


def _batch(job: Job, step: int) -> Tensor:
    batches = job.batches
    return torch.from_numpy(batches.read(partial(batches.data.train.batch, step, batches.shard))).to(job.world.device)
