"""Trains a recipe: the loop around one step, with evaluation, checkpoints, records, and an orderly end.

    each step: data -> step.accumulate -> step.finish -> records;  every n steps: evaluate, save;  after a signal: save and end

A signal only sets a flag, which is summed over ranks with the step's numbers, so that all ranks end after the same step.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe.checks.sharding import check_installed
from moe.checks.together import check_run
from moe.plan.choose.predicted import Prediction
from moe.recipe.changes import check_allowed
from moe.recipe.sections import Run
from moe.records.redone import Restart
from moe.records.tracker import check_trackers
from moe.train.loop.advance import advance
from moe.train.loop.recorded import count, evaluate, finish, record, refuse_endless_skips, was_evaluated
from moe.train.parts.callbacks import Callback
from moe.train.parts.energy_clocks import planned_clocks
from moe.train.parts.profile import Recording, first_of_its_stage
from moe.train.start import state
from moe.train.start.job import Job
from moe.train.start.opening import RunArguments, open_job
from moe.train.start.own import Own
from moe.train.start.place import asked_to_stop, check_precision, settle_precision
from moe.train.start.prediction import Measured, foretell
from parallel.optim.given import Factory
from parallel.process import process
from parallel.process.deterministic import deterministic
from parallel.process.process import World
from parallel.store.lock import alone_in
from parallel.watch import watchdog
from parallel.watch.outcome import of_all


class Stopped(Exception):
    """Raised after a signal has stopped the run and a checkpoint is saved."""


def train(
    run: Run,
    *,
    name: str = "run",
    out: str | Path | None = None,
    origins: dict[str, str] | None = None,
    fresh: bool = False,
    from_step: int | None = None,
    allow_changes: Sequence[str] = (),
    world: World | None = None,
    display: bool = True,
    cluster: str | None = None,
    force: bool = False,
    init_from: str | Path | None = None,
    restart: Restart | None = None,
    profile: bool = False,
    callbacks: Sequence[Callback] = (),
    data: Any = None,
    optimizer: Factory | None = None,
) -> dict[str, Any]:
    """Train a run and return its summary (the fields of summary.json). It resumes from the newest checkpoint in `out`, if there is one.

    Call it in one process, or on every rank that a launcher started. name: the recipe's name in records. out: the run's folder (default:
    runs/NAME). origins: recipe key -> source of its value. fresh: rename earlier checkpoints instead of resuming. from_step: resume from
    this step's checkpoint, and rename later ones. allow_changes: recipe keys that may differ from the checkpoint's although they change
    what the model computes. world: this process's rank and the number of ranks (default: from the launcher's environment variables).
    display: whether rank 0 prints the run's progress. cluster: cluster file for the prediction of memory and time (default: this
    machine's). force: start even if the prediction says that the run does not fit into memory. init_from: another run's folder or
    checkpoint; its weights and tokenizer are the initial ones. restart: set by a launcher that restarted the run. profile: record the time
    of each region of the code for a few steps.

    A user's program may give, the same on every rank: callbacks (moe/train/parts/callbacks.py); data, samples instead of text
    (moe/data/given.py); optimizer, a function of torch's parameter groups (parallel/optim/given.py).

    Raises BadInput for wrong arguments before anything is written, and during the run for gradients that are repeatedly not finite; Stopped
    after a signal has ended the run and a checkpoint is saved; Ended if a callback raised an exception or an audit found damage that it
    cannot repair."""
    world = world or process.read_environment()
    check_allowed(allow_changes)
    run = (own := Own(callbacks, data, optimizer)).named_in(run)
    asked, run = run, check_run(run, world.size)
    check_installed(run)
    process.start(world, timeout_s=run.train.timeout_s)
    if run.train.trackers:  # only rank 0 uses trackers, so only rank 0 needs the packages
        of_all(lambda: check_trackers(() if world.rank else run.train.trackers), process.everyone(world), what="train.trackers")
    code = of_all(lambda: Own.code(run), process.everyone(world), what="plugins") if run.plugins() else {}
    run = settle_precision(run, world)
    slow = check_precision(run, world)
    out, init_from = Path(out or Path("runs") / name), None if init_from is None else Path(init_from)
    arguments = RunArguments(name, out, world, origins or {}, fresh, from_step, allow_changes, display, init_from, restart, own, code)
    if slow is not None:
        arguments.say(slow)
    predicted = foretell(run, asked, world, cluster=cluster, force=force, say=arguments.say)
    with deterministic(run.train.deterministic), contextlib.ExitStack() as held:
        of_all(lambda: None if world.rank else held.enter_context(alone_in(out)), process.everyone(world), what="--out")
        return _train(run, arguments, predicted, profile)


def _train(run: Run, arguments: RunArguments, predicted: Prediction | None, profile: bool) -> dict[str, Any]:
    watchdog.enter("preparing", patience=watchdog.FIRST)
    job = open_job(run, arguments)
    figures = job.figures
    figures.predicted, figures.measured = predicted, Measured(arguments.world)
    if profile and first_of_its_stage(job.mesh):
        name, device = f"rank-{arguments.world.rank}", arguments.world.device
        figures.recording = Recording(arguments.out / "profile", name, note=job.progress.note, device=device)
    with asked_to_stop() as asked:
        try:
            with planned_clocks(run, job.training.executor, job.mesh, arguments.world, note=job.progress.note):
                _loop(job, asked)
            summary = finish(job)
            job.tell("on_train_end", summary)
            return summary
        finally:
            if figures.recording is not None:
                figures.recording.close()
            job.saves.saver.leave()
            job.progress.close()
            job.records.close()


def _loop(job: Job, asked: Callable[[], bool]) -> None:
    run, counters, began, recording = job.run, job.counters, job.counters.step, job.figures.recording
    due: Callable[[int], bool] = lambda every: every > 0 and counters.step % every == 0  # noqa: E731
    unsaved = False  # True if a save was due but is postponed, because the last steps were skipped
    job.tell("on_train_begin", {})
    if 0 < counters.step < run.train.steps and due(run.train.eval_every) and not was_evaluated(job):
        job.tell("on_evaluate", evaluate(job))
    while counters.step < run.train.steps and job.stopped is None:
        started = time.perf_counter()
        watchdog.enter("starting the step", step=counters.step + 1, patience=watchdog.FIRST if began == counters.step else 1.0)
        made = advance(job, asked) if recording is None else recording.of(lambda: advance(job, asked))
        watchdog.enter("after the step", patience=1.0)
        seconds = (time.perf_counter() - started) / len(made)
        for one in made:
            count(job, one.norm)
            line = record(job, one, seconds)
            refuse_endless_skips(job, one.norm)
            job.training.rebalancer.after_step(one.numbers, step=counters.step, updates=counters.updates, record=job.records.write)
            job.tell("on_step_end", line)
        _announce_saves(job)
        last, flags = counters.step == run.train.steps or job.stopped is not None, made[-1].numbers.flags
        unsaved = unsaved or due(run.train.save_every)
        # a save that is due waits while steps are skipped: weights may be damaged, and the save would remove an older, good checkpoint
        if last or flags or (unsaved and not counters.in_a_row):
            _save(job, wait=last or bool(flags))  # before the evaluation, so that a failed evaluation cannot lose these steps
            unsaved = False
        if last or due(run.train.eval_every):
            job.tell("on_evaluate", evaluate(job))
        if flags and not last:
            job.records.event("stopped", step=counters.step)
            job.progress.note(f"stopped by a signal at step {counters.step}; the same command continues from here")
            raise Stopped
    if job.stopped is not None and counters.step < run.train.steps:
        _end_early(job)


def _end_early(job: Job) -> None:
    """End a run that a callback stopped: save, unless this step is saved already, and evaluate, unless this step was evaluated."""
    step = job.counters.step
    if job.saves.begun != step:
        _save(job, wait=True)
    job.saves.saver.settle()
    _announce_saves(job)
    if job.figures.evaluated_at != step:
        evaluate(job, record=not was_evaluated(job))
    job.records.event("stopped", step=step, by=job.stopped)
    job.progress.note(f"stopped at step {step} by {job.stopped}; started again, the run continues from here")


def _save(job: Job, *, wait: bool) -> None:
    training, saves = job.training, job.saves
    if job.auditor is not None:
        job.auditor.before_save(job.counters.step)
    watchdog.enter("saving after the step", patience=watchdog.FIRST)
    placed = training.rebalancer.state()
    parts = state.parts(job.engine, job.mesh, counters=job.counters, scale=training.scale, placed=placed, **saves.described)
    saves.saver.settle()
    _announce_saves(job)
    if wait or job.run.train.save_mode == "sync":
        saves.saver.save(**parts, prune=not job.counters.in_a_row)
    else:
        saves.saver.begin(**parts)
    saves.begun = job.counters.step
    watchdog.enter("after saving", patience=1.0)
    _announce_saves(job)


def _announce_saves(job: Job) -> None:
    """Write the event "saved" if rank 0 finds a new checkpoint complete; call on_save if all ranks know of a new one. Collective."""
    saves = job.saves

    def line(step: int) -> dict[str, Any]:
        return {"kind": "event", "event": "saved", "step": step, "path": str(saves.saver.folder / f"step-{step}")}

    if (step := saves.saver.news()) is not None:
        job.records.write(line(step))
    if (known := saves.saver.known) is not None and known != saves.told:
        saves.told = known
        job.tell("on_save", line(known))
