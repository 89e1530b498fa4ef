"""Bookkeeping after a step: counters, a line of the records, and the end of a run whose gradients stay without a finite norm."""

from __future__ import annotations

import time
from typing import Any

from moe.plan.pipeline import continuous
from moe.train.loop.advance import Made
from moe.train.parts.numbers import LayerNumbers
from moe.train.start.job import Job
from moe.train.start.place import peak_memory_bytes
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.numerics.clip import GradientNorm
from parallel.pipeline.schedules.catalog import ADVISED
from parallel.store.checkpoint import numbered
from parallel.store.stored import finite
from parallel.watch.outcome import of_all


def count(job: Job, norm: GradientNorm) -> None:
    """Count one step; a step without a finite norm was skipped."""
    c = job.counters
    c.step += 1
    if norm.finite:
        c.updates, c.in_a_row = c.updates + 1, 0
    else:
        c.skipped, c.in_a_row = c.skipped + 1, c.in_a_row + 1


def record(job: Job, made: Made, seconds: float) -> dict[str, Any]:
    """Write and display the step's line, and return it. `seconds`: duration of the step."""
    run, c, figures = job.run, job.counters, job.figures
    numbers, norm, rate, scale = made
    tokens = run.train.global_batch * run.model.read_length
    figures.seconds += seconds
    if figures.measured is not None:
        figures.measured.step(seconds, job.engine)
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
        "memory_bytes": peak_memory_bytes(job.mesh),
        "loss_scale": scale,
        "skipped": not norm.finite,
        "skipped_total": c.skipped,
        "dropped_share": numbers.dropped_share,
        "moe": [_layer_line(layer) for layer in numbers.layers],
        "time": time.time(),
    }
    job.output.write(line)
    job.output.progress.step(line)
    return line


def _layer_line(layer: LayerNumbers) -> dict[str, Any]:
    line = vars(layer) | {"load": [round(share, 5) for share in layer.load]}
    del line["choices"]  # the load gives the same information with fewer digits
    return line


def refuse_endless_skips(job: Job, norm: GradientNorm) -> None:
    """End the run on all ranks if skipping cannot help. Collective after a skipped step. Raises BadInput."""
    run, c = job.run, job.counters
    if norm.finite:
        return
    of_all(lambda: _refuse_bad_weights(job), job.mesh.axis("world"), what=f"step {c.step}")
    families = ", ".join(name for name, value in norm.families.items() if not value < float("inf"))
    job.output.event("skipped", step=c.step, families=families)
    if continuous(run):
        raise BadInput(
            f"step {c.step}",
            got=f"gradients ({families}) that are not finite, with {run.pipeline.schedule}, whose stages have updated all the same",
            needed="finite gradients",
            fix="lower optimizer.lr"
            | Set("pipeline.schedule", ADVISED, said=f"{ADVISED}, which skips such steps")
            | "resume from an earlier checkpoint",
        )
    scale = job.training.scale
    scaled = scale.growth_interval > 0
    if scaled and scale.at_floor:
        raise BadInput(
            f"step {c.step}",
            got=f"gradients ({families}) that overflow {run.precision.compute} even at the smallest loss scale {scale.floor:g}",
            needed="finite gradients",
            fix="lower optimizer.lr" | Set("precision.compute", "bf16") & Set("precision.loss_scale", "none"),
        )
    if not scaled and (run.train.on_nan == "stop" or c.in_a_row >= run.train.max_skips):
        raise BadInput(
            f"step {c.step}",
            got=f"gradients ({families}) that are not finite, {c.in_a_row} step{'s' if c.in_a_row > 1 else ''} in a row",
            needed="finite gradients",
            fix="lower optimizer.lr, lengthen optimizer.warmup_steps, or resume from an earlier checkpoint",
        )


def _refuse_bad_weights(job: Job) -> None:
    """Refuse weights that are not finite, because gradients through them are never finite. Raises BadInput."""
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
        needed="finite weights: no further step can mend them, and nothing of them is saved",
        fix=f"start it again: {goes_on}; if that ends so too, --from_step with an earlier checkpoint, or a lower optimizer.lr",
    )
