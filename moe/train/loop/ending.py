"""The end of a run: a sample of text, the summary, and the report."""

from __future__ import annotations

from typing import Any

import torch

from moe.data.chat import InChats, template_of
from moe.plan.job.flops import size
from moe.records.metrics import read, read_summary, write_summary
from moe.records.redone import NOTHING, sums
from moe.records.results import hardware, matmul_flops, source_commit
from moe.records.rules import diagnose
from moe.records.summary import dropped_shares
from moe.train.loop.recorded import evaluate, was_evaluated
from moe.train.parts.executor import logits_of
from moe.train.start.job import Job
from moe.train.start.place import peak_memory_bytes
from moe.train.use.generate import as_messages, sample
from parallel.errors import counted
from parallel.mesh.collectives import sum_over
from parallel.numerics.precision import DTYPES
from parallel.watch import watchdog


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
