"""Work after a step: counters, a line of metrics.jsonl, evaluation, and an error if gradients are repeatedly not finite."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from moe.parallelize.sequence import shard_of
from moe.plan.pipeline import continuous
from moe.records.conditions import is_beyond
from moe.records.metrics import read
from moe.records.rules import slower
from moe.train.loop.advance import Made
from moe.train.loop.step import validation_loss
from moe.train.parts.numbers import LayerNumbers
from moe.train.start.job import Job
from moe.train.start.prediction import EVALUATION, during
from parallel.errors import BadInput, counted
from parallel.fixes import Set, Words
from parallel.mesh.collectives import largest
from parallel.numerics.clip import GradientNorm
from parallel.pipeline.schedules import ADVISED
from parallel.store.checkpoint import numbered
from parallel.store.stored import finite
from parallel.watch import watchdog
from parallel.watch.outcome import of_all


def count(job: Job, norm: GradientNorm) -> None:
    """Count one step. It counts as skipped, without an update, if its gradient norm is not finite."""
    c = job.counters
    c.step += 1
    if norm.finite:
        c.updates, c.in_a_row = c.updates + 1, 0
    else:
        c.skipped, c.in_a_row = c.skipped + 1, c.in_a_row + 1


def record(job: Job, made: Made, seconds: float) -> dict[str, Any]:
    """Write a step's line to metrics.jsonl, display it, and return it. made: the step's results. seconds: its duration."""
    c, figures = job.counters, job.figures
    numbers, norm, rate, scale, peak_bytes = made
    tokens = numbers.tokens
    figures.seconds += seconds
    if figures.measured is not None:
        figures.measured.after_step(seconds, job.engine)
    layers = [_layer(layer) for layer in numbers.layers]
    line = {
        "kind": "train",
        "step": c.step,
        "loss": numbers.loss,
        "balance_loss": numbers.balance_loss,
        "z_loss": numbers.z_loss,
        "grad_norm": norm.total,
        "grad_norm_parts": norm.families,
        "lr": rate,
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "memory_bytes": peak_bytes(),
        "loss_scale": scale,
        "skipped": not norm.finite,
        "skipped_total": c.skipped,
        "dropped_share": numbers.dropped_share,
        "moe": layers,
        "time": time.time(),
    }
    job.records.write(line)
    job.progress.step(line)
    for found in () if job.doctor is None else job.doctor.after_step(line):
        job.records.event("alarm", step=c.step, **found.row())
        job.progress.note(found.line)
    return line


def _layer(numbers: LayerNumbers) -> dict[str, Any]:
    """Return a layer's entry in a line of metrics.jsonl. `load`, the share of choices that each expert gets, replaces `choices`."""
    kept = {name: value for name, value in vars(numbers).items() if name != "choices" and value is not None}
    rounded = {name: round(value, 6) for name, value in kept.items() if name.startswith("bias_")}
    return kept | rounded | {"load": [round(share, 5) for share in numbers.load]}


def refuse_endless_skips(job: Job, norm: GradientNorm) -> None:
    """If this step was skipped, write the event "skipped", and raise BadInput on all ranks if later steps are likely to be skipped too.
    norm: gradient norm of this step. Collective if the step was skipped."""
    run, c = job.run, job.counters
    if norm.finite:
        return
    of_all(lambda: _refuse_bad_weights(job), job.mesh.axis("world"), what=f"step {c.step}")
    families = ", ".join(name for name, value in norm.families.items() if not value < float("inf"))
    job.records.event("skipped", step=c.step, families=families)
    scale = job.training.scale
    scaled = scale.growth_interval > 0
    if continuous(run):
        got = f"that are not finite, with {run.pipeline.schedule}, whose stages have already updated their weights"
        other = Set("pipeline.schedule", ADVISED, said=f"{ADVISED}, which skips such steps")
        fix = "lower optimizer.lr" | other | "resume from an earlier checkpoint"
    elif scaled and scale.at_floor:
        got = f"that overflow {run.precision.compute} even at the smallest loss scale {scale.floor:g}"
        fix = "lower optimizer.lr" | Set("precision.compute", "bf16") & Set("precision.loss_scale", "none")
    elif not scaled and (run.train.on_nan == "stop" or c.in_a_row >= run.train.max_skips):
        got = f"that are not finite, {counted(c.in_a_row, 'step')} in a row"
        others = "lower optimizer.lr, lengthen optimizer.warmup_steps, or resume from an earlier checkpoint"
        fix = Words(f"{slower(run)}, and start over with --fresh" if is_beyond(run) else others)
    else:
        return
    raise BadInput(f"step {c.step}", got=f"gradients ({families}) {got}", needed="finite gradients", fix=fix)


def _refuse_bad_weights(job: Job) -> None:
    """Raise BadInput if a weight or optimizer state of this rank is not finite: later steps cannot repair it."""
    bad = next((held for held in job.engine.tensors() if not finite(held.tensor)), None)
    if bad is None:
        return
    skipped, saver = job.counters.in_a_row, job.saves.saver
    there = [step for step, _ in numbered(saver.folder)]
    after = f", so that {skipped} step{'s were' if skipped > 1 else ' was'} skipped"
    goes_on = f"the run continues from step-{max(there)}" if there else "the run begins again"
    if (step := saver.under_way) is not None and step not in there:
        goes_on += f", or continues from step-{step} once that is saved"
    raise BadInput(
        f"step {job.counters.step}",
        got=f"values that are not finite in the {bad} on rank {job.world.rank}{after}",
        needed="finite weights and optimizer states: later steps cannot repair NaN or infinity, so this step is not saved",
        fix=f"start the run again: {goes_on}; if this error returns, --from_step with an earlier checkpoint, or a lower optimizer.lr",
    )


def evaluate(job: Job, *, record: bool = True) -> dict[str, Any]:
    """Evaluate on held-out text. Return the line for metrics.jsonl; write it only if `record`. Collective."""
    run = job.run
    watchdog.enter("evaluation after the step")
    shard = shard_of(run, job.mesh, run.train.eval_sequences)
    at_once = max(1, len(job.shard.sequences) // run.pipeline.microbatches)
    with during(EVALUATION):  # an out-of-memory error then names the evaluation, which loads all its sequences at once
        held = job.read(partial(job.data.validation.held, shard))
        loss = validation_loss(job.training.executor, torch.from_numpy(held.sequences).to(job.world.device), shard=shard, at_once=at_once)
    step, found = job.counters.step, {"validation_loss": loss}
    if not run.train.has_own_loss:  # then the loss is in nats a token
        found["bits_per_byte"] = loss / 0.6931471805599453 / held.bytes_per_token
    job.figures.evaluated_at, job.figures.evaluated = step, found
    line = {"kind": "eval", "step": step, "time": time.time()} | found
    if record:
        job.records.write(line)
    job.progress.evaluation(line)
    return line


def was_evaluated(job: Job) -> bool:
    """Return whether metrics.jsonl has an evaluation at the current step. A resumed run may lack it, because a step is saved before it is
    evaluated. Rank 0 reads the file. Collective."""
    lines = read(job.out) if job.world.rank == 0 else ()
    found = any(line["kind"] == "eval" and line["step"] == job.counters.step for line in lines)
    return bool(largest(float(found), job.mesh.axis("world")))
