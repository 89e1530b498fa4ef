"""Train a recipe: the loop around one step, with evaluation, checkpoints, records, and an orderly way out.

    data(step) -> step.accumulate -> step.finish -> records -> every n-th step: evaluate, save -> flag agreed? save and leave

`train(run)` is the library's entry and never reads argv. It resumes from the newest checkpoint in `out` by default. A
signal only sets a flag; the flag is summed with the step's numbers, so that all ranks leave at the same step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe.checks.sequence import without_effect
from moe.checks.together import check_run
from moe.checks.verdict import not_recommended
from moe.data import open_data
from moe.parallelize.build import build, whole_layouts
from moe.parallelize.engines import prepare
from moe.parallelize.sequence import shard_of
from moe.plan.flops import size
from moe.plan.pipeline import continuous
from moe.plan.predicted import Prediction
from moe.recipe.changes import check_allowed
from moe.recipe.load import resolved_yaml
from moe.recipe.sections import Run
from moe.records.metrics import Records, read, read_summary, write_summary
from moe.records.progress import open_progress
from moe.records.redone import NOTHING, Restart, going_on, sums
from moe.records.speed import hardware, matmul_flops, source_commit
from moe.records.summary import dropped_shares
from moe.records.title import title
from moe.train import state
from moe.train.advance import Made, advance
from moe.train.audit import Auditor
from moe.train.energy_clocks import planned_clocks
from moe.train.executor import Executor, logits_of, start_executor
from moe.train.generate import sample
from moe.train.job import Job
from moe.train.numbers import LayerNumbers
from moe.train.out_of_memory import RESUMING, STATES, WEIGHTS, during
from moe.train.place import asked_to_stop, check_precision, make_writable, peak_memory_bytes, set_aside, settle_precision
from moe.train.prediction import Measured, foretell
from moe.train.profile import Recording, first_of_its_stage
from moe.train.rebalance import Rebalancer, nothing_to_move
from moe.train.resume import Resumed
from moe.train.state import Counters
from moe.train.step import validation_loss
from parallel import process, watchdog
from parallel.clip import GradientNorm
from parallel.collectives import max_over, sum_over
from parallel.deterministic import deterministic
from parallel.errors import BadInput
from parallel.lock import alone_in
from parallel.mesh import Mesh
from parallel.precision import DTYPES, LossScale
from parallel.process import World
from parallel.saver import Saver


class Stopped(Exception):
    """A signal came and the checkpoint is saved."""


def train(
    run: Run,
    *,
    name: str = "run",
    out: Path | None = None,
    origins: dict[str, str] | None = None,
    fresh: bool = False,
    allow_changes: Sequence[str] = (),
    world: World | None = None,
    display: bool = True,
    cluster: str | None = None,
    force: bool = False,
    init_from: Path | None = None,
    restart: Restart | None = None,
    profile: bool = False,
) -> dict[str, Any]:
    """Train a checked or unchecked Run and return its summary (the fields of summary.json).

    In one process, or on every rank that a launcher started. `fresh` sets earlier checkpoints aside
    instead of resuming. `allow_changes`: keys of the recipe that may change what a resumed model computes. `cluster`: a file that
    predicts memory and time (else this machine's own); `force` tries what is predicted not to fit. `init_from`: another run, or one of
    its checkpoints, whose weights and tokenizer this one begins with. `restart`: that the run was started again without its user, for its
    records. `profile`: record where a few steps' time goes. Raises BadInput before anything is written, and Stopped after a signal once
    the state is saved.
    """
    world = world or process.read_environment()
    check_allowed(allow_changes)
    asked, run = run, check_run(run, world.size)
    process.start(world, timeout_s=run.train.timeout_s)
    run = settle_precision(run, world)
    check_precision(run, world)
    out = out or Path("runs") / name
    say: Callable[[str], None] = print if world.rank == 0 and display else _silent
    predicted = foretell(run, asked, world, cluster=cluster, force=force, say=say)
    with deterministic(run.train.deterministic), contextlib.nullcontext() if world.rank else alone_in(out):
        return _train(run, name, out, origins or {}, fresh, allow_changes, world, display, predicted, init_from, restart, profile)


def _train(
    run: Run,
    name: str,
    out: Path,
    origins: dict[str, str],
    fresh: bool,
    allow_changes: Sequence[str],
    world: World,
    display: bool,
    predicted: Prediction | None,
    init_from: Path | None,
    restart: Restart | None,
    profile: bool,
) -> dict[str, Any]:
    watchdog.enter("preparing", patience=watchdog.FIRST)
    job = _open(run, name, out, origins, fresh, allow_changes, world, display, init_from, restart)
    job.predicted, job.measured = predicted, Measured(world)
    if profile and first_of_its_stage(job.mesh):
        job.recording = Recording(out / "profile", f"rank-{world.rank}", note=job.progress.note)
    with asked_to_stop() as asked:
        try:
            with planned_clocks(run, job.executor, job.mesh, world, note=job.progress.note):
                _loop(job, asked)
            if job.recording is not None:
                job.recording.close()
            return _finish(job)
        finally:
            job.saver.leave()
            job.progress.close()
            job.records.close()


def _open(
    run: Run,
    name: str,
    out: Path,
    origins: dict[str, str],
    fresh: bool,
    allowed: Sequence[str],
    world: World,
    display: bool,
    init_from: Path | None,
    restart: Restart | None,
) -> Job:
    first = world.rank == 0
    make_writable(out, world)
    say: Callable[[str], None] = print if first and display else _silent
    mesh = process.connect(run.mesh_degrees(), world)
    found = None if fresh else state.find(out / "checkpoints", mesh, log=say)
    source = None if init_from is None or found is not None else state.source(init_from, mesh, log=say)
    resumed = Resumed.of(found, run, allowed) if source is None else Resumed.begun(source, run, allowed)
    data = open_data(
        run.data,
        max_length=run.model.max_length,
        vocab_size=run.vocab_size,
        seed=run.train.seed,
        tokenizer=resumed.tokenizer,
        log=say,
    )
    prepare(run, say)
    executor = start_model(run, mesh, world)
    scale, counters = LossScale.of(run.precision.loss_scale), Counters()
    if fresh:
        set_aside(out / "checkpoints", world)
    whole = whole_layouts(run) if run.degrees.pp > 1 else None
    with during(RESUMING):
        state.resume(
            found,
            executor.engine,
            mesh,
            counters=counters,
            scale=scale,
            data=data.key,
            recipe=run.model_dump(mode="json"),
            log=say,
            whole=whole,
        )
        if source is not None:
            state.begin(source, executor.engine, mesh, log=say, whole=whole)
    if first:
        (out / "recipe.yaml").write_text(resolved_yaml(run, origins))
    goes_on = found is not None or (restart is not None and not fresh)
    again = going_on(out, counters.step, restart) if goes_on and first else {}
    records = Records(out if first else None, resume_step=counters.step if goes_on else None, say=say)
    progress = open_progress(
        run.train.steps, recipe=name, world=world.size, lines=title(run, world), out=out, kind="auto" if first and display else "none"
    )
    if why := nothing_to_move(run):
        progress.note(f"experts.rebalance_every {run.experts.rebalance_every} has no effect: {why}")
    for line in (*without_effect(run), *(f"not recommended: {reason}" for reason in not_recommended(run)), *resumed.unused(allowed)):
        progress.note(line)
    if found is not None:
        progress.note(f"resumed from {out / 'checkpoints'} at step {counters.step} (--fresh starts over)")
    if goes_on:
        about = resumed.recorded() if source is None else {}
        records.write({"kind": "event", "event": "resumed", "step": counters.step, **again, **about})
    if source is not None:
        progress.note(f"begins with the weights and the tokenizer of {source.path}")
        records.write({"kind": "event", "event": "begun", "step": 0, "from": str(source.path)} | resumed.recorded())
    elif init_from is not None:
        progress.note(f"--init_from {init_from} has no effect: the run goes on from its own checkpoint (--fresh starts over)")
    shard = shard_of(run, mesh, run.train.global_batch)
    rebalancer = Rebalancer(run, executor.engine, mesh)
    saver = Saver(out / "checkpoints", mesh.axis("world"), keep=run.train.keep)
    auditor = Auditor(
        executor.engine, mesh, every=run.train.audit_every, record=records.write, note=progress.note, checkpoints=saver.folder
    )
    return Job(run, name, out, world, mesh, executor, data, shard, records, progress, scale, rebalancer, saver, counters, auditor=auditor)


def start_model(run: Run, mesh: Mesh, world: World) -> Executor:
    """The model as this rank holds it, in its engine and with what carries out its passes. Collective."""
    with during(WEIGHTS):
        model, layouts = build(run, mesh, device=world.device)
    with during(STATES):
        return start_executor(run, model, layouts, mesh)


def _loop(job: Job, asked: Callable[[], bool]) -> None:
    run, counters, began = job.run, job.counters, job.counters.step
    due: Callable[[int], bool] = lambda every: every > 0 and counters.step % every == 0  # noqa: E731
    if 0 < counters.step < run.train.steps and due(run.train.eval_every) and not _was_evaluated(job):
        _evaluate(job)
    while counters.step < run.train.steps:
        started = time.perf_counter()
        watchdog.enter("starting the step", step=counters.step + 1, patience=watchdog.FIRST if began == counters.step else 1.0)
        made = advance(job, asked) if job.recording is None else job.recording.of(lambda: advance(job, asked))
        watchdog.enter("after the step", patience=1.0)
        seconds = (time.perf_counter() - started) / len(made)
        for one in made:
            _count(job, one.norm)
            _record(job, one, seconds)
            _refuse_endless_skips(job, one.norm)
            job.rebalancer.after_step(one.numbers, step=counters.step, updates=counters.updates, record=job.records.write)
        _record_saved(job)
        last, flags = counters.step == run.train.steps, made[-1].numbers.flags
        if last or due(run.train.save_every) or flags:
            _save(job, wait=last or bool(flags))  # before the evaluation: whatever becomes of that, these steps are kept
        if last or due(run.train.eval_every):
            _evaluate(job)
        if flags and not last:
            job.records.write({"kind": "event", "event": "stopped", "step": counters.step})
            job.progress.note(f"stopped by a signal at step {counters.step}; the same command goes on from here")
            raise Stopped


def _count(job: Job, norm: GradientNorm) -> None:
    c = job.counters
    c.step += 1
    if norm.finite:
        c.updates, c.in_a_row = c.updates + 1, 0
    else:
        c.skipped, c.in_a_row = c.skipped + 1, c.in_a_row + 1


def _record(job: Job, made: Made, seconds: float) -> None:
    run, c = job.run, job.counters
    numbers, norm, rate, scale = made
    tokens = run.train.global_batch * run.model.read_length
    job.seconds += seconds
    if job.measured is not None:
        job.measured.step(seconds)
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
    job.records.write(line)
    job.progress.step(line)


def _layer_line(layer: LayerNumbers) -> dict[str, Any]:
    line = vars(layer) | {"load": [round(share, 5) for share in layer.load]}
    del line["choices"]  # the load says it, in fewer digits
    return line


def _refuse_endless_skips(job: Job, norm: GradientNorm) -> None:
    """Stop, on all ranks alike, where skipping cannot help."""
    run, c = job.run, job.counters
    if norm.finite:
        return
    families = ", ".join(name for name, value in norm.families.items() if not value < float("inf"))
    job.records.write({"kind": "event", "event": "skipped", "step": c.step, "families": families})
    if continuous(run):
        raise BadInput(
            f"step {c.step}",
            got=f"gradients ({families}) that are not finite, with {run.pipeline.schedule}, whose stages have updated all the same",
            needed="finite gradients",
            fix="lower optimizer.lr, set pipeline.schedule to 1f1b, which skips such steps, or resume from an earlier checkpoint",
        )
    scaled = job.scale.growth_interval > 0
    if scaled and job.scale.at_floor:
        raise BadInput(
            f"step {c.step}",
            got=f"gradients ({families}) that overflow {run.precision.compute} even at the smallest loss scale {job.scale.floor:g}",
            needed="finite gradients",
            fix="lower optimizer.lr, or set precision.compute to bf16 and precision.loss_scale to none",
        )
    if not scaled and (run.train.on_nan == "stop" or c.in_a_row >= run.train.max_skips):
        raise BadInput(
            f"step {c.step}",
            got=f"gradients ({families}) that are not finite, {c.in_a_row} step{'s' if c.in_a_row > 1 else ''} in a row",
            needed="finite gradients",
            fix="lower optimizer.lr, lengthen optimizer.warmup_steps, or resume from an earlier checkpoint",
        )


def _evaluate(job: Job, *, record: bool = True) -> None:
    run = job.run
    watchdog.enter("evaluation after the step")
    shard = shard_of(run, job.mesh, run.train.eval_sequences)
    held = job.data.validation.held(shard)
    at_once = max(1, len(job.shard.sequences) // run.pipeline.microbatches)
    loss = validation_loss(job.executor, _tensor(job, held.sequences), shard=shard, at_once=at_once)
    job.evaluated = {"validation_loss": loss, "bits_per_byte": loss / 0.6931471805599453 / held.bytes_per_token}
    line = {"kind": "eval", "step": job.counters.step, "time": time.time()} | job.evaluated
    if record:
        job.records.write(line)
    job.progress.evaluation(line)


def _was_evaluated(job: Job) -> bool:
    """Whether the records, which rank 0 has, hold an evaluation of this step: an earlier life may have died between saving and that."""
    lines = read(job.out) if job.world.rank == 0 else ()
    found = any(line["kind"] == "eval" and line["step"] == job.counters.step for line in lines)
    return bool(max_over(torch.tensor(int(found), device=job.world.device), job.mesh.axis("world")).item())


def _save(job: Job, *, wait: bool) -> None:
    if job.auditor is not None:
        job.auditor.before_save(job.counters.step)
    watchdog.enter("saving after the step", patience=watchdog.FIRST)
    parts = state.parts(
        job.engine,
        job.mesh,
        counters=job.counters,
        scale=job.scale,
        recipe=job.run.model_dump(mode="json"),
        tokenizer=job.data.tokenizer.describe(),
        data=job.data.key,
    )
    job.saver.settle()
    _record_saved(job)
    (job.saver.save if wait or job.run.train.save_mode == "sync" else job.saver.begin)(**parts)
    watchdog.enter("after saving", patience=1.0)
    _record_saved(job)


def _record_saved(job: Job) -> None:
    step = job.saver.news()
    if step is not None:
        job.records.write({"kind": "event", "event": "saved", "step": step, "path": str(job.checkpoints / f"step-{step}")})


def _finish(job: Job) -> dict[str, Any]:
    run, world = job.run, job.mesh.axis("world")
    before = None if job.seconds else read_summary(job.out)
    if before is not None and before.get("steps") == job.counters.step:
        job.progress.note(f"all {job.counters.step} steps were done before: raise train.steps to go on, or start over with --fresh")
        job.progress.close(before)
        return before
    if not job.evaluated:  # an earlier life made the last step, then died before the summary
        _evaluate(job, record=not _was_evaluated(job))
    watchdog.enter("ending after the step", patience=watchdog.FIRST)
    job.engine.module.eval()
    model, length = logits_of(job.executor, job.shard), run.model.max_length
    text = ""
    if run.train.sample_tokens and run.model.kind == "decoder":
        job.progress.note(f"writing a sample of {run.train.sample_tokens} tokens (train.sample_tokens)")
        much = run.train.sample_tokens
        text = sample(
            model, job.data.tokenizer, prompt=job.data.tokenizer.example, num_tokens=much, max_length=length, device=job.world.device
        )
    counted = size(run.model, run.experts, run.router, vocab_size=run.vocab_size)
    speed = None
    if run.train.measure_speed:
        flops = matmul_flops(DTYPES[run.precision.compute], job.world.device)
        speed = sum_over(torch.tensor(flops, dtype=torch.float64, device=job.world.device), world).item()
    tokens, seconds, dropped, dropped_last, *redone = _totals(job)
    tokens_per_second = tokens / seconds if seconds else 0.0
    summary = {
        "recipe": job.name,
        "steps": job.counters.step,
        **job.evaluated,
        "tokens_per_second": tokens_per_second,
        "train_seconds": seconds,
        "dropped_share": dropped,
        "dropped_share_last": dropped_last,
        "peak_memory_bytes": peak_memory_bytes(job.mesh),
        "predicted": None if job.measured is None else job.measured.against(job.predicted, job.mesh),
        "parameters_total": counted.total,
        "parameters_active": counted.active,
        "flops_per_token": counted.training,
        "matmul_share": None if speed is None else counted.training * tokens_per_second / speed,
        "skipped": job.counters.skipped,
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
            _report(job)
    job.progress.close(summary)
    return summary


def _totals(job: Job) -> list[float]:
    """Tokens, seconds, dropped shares of all and of the last steps, what was made again, earlier lives included: from the records, which
    rank 0 holds."""
    totals = [0.0] * (4 + len(NOTHING))
    if job.world.rank == 0:
        found = read(job.out)
        lines = [line for line in found if line["kind"] == "train"]
        totals = [*(float(sum(line[what] for line in lines)) for what in ("tokens", "step_seconds")), *dropped_shares(lines).values()]
        totals += map(float, sums(found).values())
    return sum_over(torch.tensor(totals, dtype=torch.float64, device=job.world.device), job.mesh.axis("world")).tolist()


def _report(job: Job) -> None:
    from moe.report import write_report

    try:
        write_report(job.out)
    except Exception as error:  # a picture that cannot be drawn must not fail a finished run
        job.progress.note(f"no report ({type(error).__name__}: {error}); try again with: moe report {job.out}")


def _tensor(job: Job, array: Any) -> Tensor:
    return torch.from_numpy(array).to(job.world.device)


def _silent(_: str) -> None:
    return None
