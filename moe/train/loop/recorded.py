"""What the loop records. After a step: counters, a line of metrics.jsonl, evaluation, and an error if gradients are repeatedly not finite.
At the end of a run: a sample of text, the summary, and the report.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from moe.data.chat import InChats, template_of
from moe.parallelize.sequence import shard_of
from moe.plan.job.flops import size
from moe.plan.pipeline import continuous
from moe.records.conditions import is_beyond
from moe.records.metrics import read, read_summary, write_summary
from moe.records.redone import NOTHING, sums
from moe.records.results import hardware, matmul_flops, source_commit
from moe.records.rules import diagnose, slower
from moe.records.summary import dropped_shares
from moe.train.loop.advance import Made
from moe.train.loop.step import validation_loss
from moe.train.parts.executor import logits_of
from moe.train.parts.numbers import LayerNumbers
from moe.train.start.job import Job
from moe.train.start.place import peak_memory_bytes
from moe.train.start.prediction import EVALUATION, during
from moe.train.use.generate import as_messages, sample
from parallel.errors import BadInput, counted
from parallel.fixes import Set, Words
from parallel.mesh.collectives import largest, sum_over
from parallel.numerics.clip import GradientNorm
from parallel.numerics.precision import DTYPES
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


def finish(job: Job) -> dict[str, Any]:
    """Write the run's summary and return it. If this process has made no step, and an earlier process wrote summary.json after the same
    last step, return the stored summary instead. Collective."""
    run, world, figures, progress = job.run, job.mesh.axis("world"), job.figures, job.progress
    before = None if figures.seconds else read_summary(job.out)
    if before is not None and before.get("steps") == job.counters.step:
        progress.close(before)
        return before
    if not figures.evaluated:  # an earlier process made the last step, but ended before it wrote the summary
        evaluate(job, record=not was_evaluated(job))
    watchdog.enter("ending after the step", patience=watchdog.FIRST)
    job.engine.module.eval()
    model, length = logits_of(job.training.executor, job.shard), run.model.max_length
    text = ""
    if run.train.sample_tokens and run.model.kind == "decoder":
        progress.note(f"writing a sample of {counted(run.train.sample_tokens, 'token')} (train.sample_tokens)")
        much, tokenizer = run.train.sample_tokens, job.data.tokenizer
        prompt = tokenizer.example
        if run.data.source == "chat" and template_of(tokenizer) is not None:
            (prompt,), tokenizer = as_messages(["Hello!"], tokenizer), InChats(tokenizer)
        text = sample(model, tokenizer, prompt=prompt, num_tokens=much, max_length=length, device=job.world.device)
    costs = size(run)
    speed = None
    if run.train.measure_speed:
        flops = matmul_flops(DTYPES[run.precision.compute], job.world.device)
        speed = sum_over(torch.tensor(flops, dtype=torch.float64, device=job.world.device), world).item()
    tokens, seconds, dropped, dropped_last, *redone = _totals(job)
    tokens_per_second = tokens / seconds if seconds else 0.0
    summary = {
        "recipe": job.name,
        "steps": job.counters.step,
        **figures.evaluated,
        "tokens_per_second": tokens_per_second,
        "train_seconds": seconds,
        "dropped_share": dropped,
        "dropped_share_last": dropped_last,
        "peak_memory_bytes": peak_memory_bytes(job.mesh, job.world.device),
        "state_bytes": None if figures.measured is None else figures.measured.largest_states(job.mesh),
        "predicted": None if figures.measured is None else figures.measured.against(figures.predicted, job.mesh),
        "parameters_total": costs.total,
        "parameters_active": costs.active,
        "flops_per_token": costs.training,
        "matmul_share": None if speed is None else costs.training * tokens_per_second / speed,
        "skipped": job.counters.skipped,
        "skipped_last": job.counters.in_a_row,
        "alarms": [found.line for found in diagnose(read(job.out), run)] if job.world.rank == 0 else [],
        "redone": {name: type(none)(much) for (name, none), much in zip(NOTHING.items(), redone, strict=True)},
        "sample": text,
        "world": job.world.size,
        "recipe_values": run.model_dump(mode="json"),
        "commit": source_commit(),
        "hardware": hardware(job.world.device),
    }
    if job.world.rank == 0:
        write_summary(job.out, summary)
        job.records.close()
        if run.train.report:
            from moe.report import write_report

            try:
                write_report(job.out)
            except Exception as error:  # a picture that cannot be drawn must not fail a finished run
                progress.note(f"no report ({type(error).__name__}: {error}); try again with: moe report {job.out}")
    progress.close(summary)
    return summary


def _totals(job: Job) -> list[float]:
    """Return totals of the run, which rank 0 reads from metrics.jsonl: tokens, seconds, share of dropped choices in all steps and in the
    last tenth, then `sums`: resumes, restarts, repeated steps and their seconds. Collective."""
    totals = [0.0] * (4 + len(NOTHING))
    if job.world.rank == 0:
        found = read(job.out)
        lines = [line for line in found if line["kind"] == "train"]
        totals = [*(float(sum(line[what] for line in lines)) for what in ("tokens", "step_seconds")), *dropped_shares(lines).values()]
        totals += map(float, sums(found).values())
    return sum_over(torch.tensor(totals, dtype=torch.float64, device=job.world.device), job.mesh.axis("world")).tolist()
