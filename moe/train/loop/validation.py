"""Validation within a run: the loss on held-out text, recorded and displayed."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from moe.parallelize.sequence import shard_of
from moe.records.metrics import read
from moe.train.loop.step import validation_loss
from moe.train.start.job import Job
from moe.train.start.out_of_memory import EVALUATION, during
from parallel.mesh.collectives import max_over
from parallel.watch import watchdog


def evaluate(job: Job, *, record: bool = True) -> dict[str, Any]:
    """Evaluate at this step and return the record's line. `record`: also write it. Collective."""
    run = job.run
    watchdog.enter("evaluation after the step")
    shard = shard_of(run, job.mesh, run.train.eval_sequences)
    at_once = max(1, len(job.shard.sequences) // run.pipeline.microbatches)
    with during(EVALUATION):  # micro-batches are as large as a step's, which fitted; only the sequences can be too large
        held = job.read(partial(job.data.validation.held, shard))
        loss = validation_loss(job.executor, torch.from_numpy(held.sequences).to(job.world.device), shard=shard, at_once=at_once)
    job.evaluated_at, job.evaluated = (
        job.counters.step,
        {"validation_loss": loss, "bits_per_byte": loss / 0.6931471805599453 / held.bytes_per_token},
    )
    line = {"kind": "eval", "step": job.counters.step, "time": time.time()} | job.evaluated
    if record:
        job.records.write(line)
    job.progress.evaluation(line)
    return line


def was_evaluated(job: Job) -> bool:
    """Return whether the records, which rank 0 has, hold an evaluation of this step. An earlier process may have died between save and
    evaluation. Collective."""
    lines = read(job.out) if job.world.rank == 0 else ()
    found = any(line["kind"] == "eval" and line["step"] == job.counters.step for line in lines)
    return bool(max_over(torch.tensor(int(found), device=job.world.device), job.mesh.axis("world")).item())
