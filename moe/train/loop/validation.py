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
    run, batches = job.run, job.batches
    watchdog.enter("evaluation after the step")
    shard = shard_of(run, job.mesh, run.train.eval_sequences)
    at_once = max(1, len(batches.shard.sequences) // run.pipeline.microbatches)
    with during(EVALUATION):  # micro-batches are as large as a step's, which fitted; only the sequences can be too large
        held = batches.read(partial(batches.data.validation.held, shard))
        loss = validation_loss(job.training.executor, torch.from_numpy(held.sequences).to(job.world.device), shard=shard, at_once=at_once)
    step, found = job.counters.step, {"validation_loss": loss, "bits_per_byte": loss / 0.6931471805599453 / held.bytes_per_token}
    job.figures.evaluated_at, job.figures.evaluated = step, found
    line = {"kind": "eval", "step": step, "time": time.time()} | found
    if record:
        job.output.write(line)
    job.output.progress.evaluation(line)
    return line


def was_evaluated(job: Job) -> bool:
    """Return whether the records, which rank 0 has, hold an evaluation of this step. An earlier process may have died between save and
    evaluation. Collective."""
    lines = read(job.out) if job.world.rank == 0 else ()
    found = any(line["kind"] == "eval" and line["step"] == job.counters.step for line in lines)
    return bool(max_over(torch.tensor(int(found), device=job.world.device), job.mesh.axis("world")).item())
