"""Build a job from a recipe: mesh, data, model in its engine, checkpoint, records and display.

checkpoint of this run  ->  resumed               none, but another run's (--init_from)  ->  its weights and tokenizer
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from moe.checks.sequence import without_effect
from moe.checks.verdict import not_recommended
from moe.data import open_data
from moe.data.remarks import LISTING, list_in, remark_lines
from moe.data.tokenizer import check_separator
from moe.parallelize.build import build, whole_layouts
from moe.parallelize.engines import prepare
from moe.parallelize.sequence import shard_of
from moe.recipe import hash_table
from moe.recipe.hash_table import Table
from moe.recipe.keys import flat
from moe.recipe.load import resolved_yaml
from moe.recipe.sections import Run
from moe.records.metrics import SUMMARY, Records, read_summary
from moe.records.progress import open_progress
from moe.records.redone import Restart, going_on
from moe.records.title import title
from moe.records.tracker import open_tracker
from moe.train.parts.audit import Auditor
from moe.train.parts.callbacks import Callbacks
from moe.train.parts.executor import Executor, start_executor
from moe.train.parts.rebalance import Rebalancer, nothing_to_move
from moe.train.start import state
from moe.train.start.adapters import base_of, check_base, described
from moe.train.start.adapters import whole as whole_model
from moe.train.start.job import Job
from moe.train.start.kept import KEPT, pass_on
from moe.train.start.out_of_memory import RESUMING, STATES, WEIGHTS, during
from moe.train.start.own import Own, the_same
from moe.train.start.place import make_writable, set_aside
from moe.train.start.resume import Resumed
from moe.train.start.state import Counters
from parallel.data.engine import Rule
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World
from parallel.store.checkpoint import keep_newest
from parallel.store.saver import Saver
from parallel.store.stored import Reader
from parallel.watch.outcome import of_all


@dataclass(frozen=True)
class RunArguments:
    """Arguments of a run other than its recipe; the fields are the arguments of `train` (moe/train/loop/trainer.py)."""

    name: str
    out: Path
    world: World
    origins: dict[str, str]
    fresh: bool
    from_step: int | None
    allow_changes: Sequence[str]
    display: bool
    init_from: Path | None
    restart: Restart | None
    own: Own = Own()
    code: dict[str, str] = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Print the line on rank 0, if the run has a display."""
        if self.world.rank == 0 and self.display:
            print(line)


def open_job(run: Run, arguments: RunArguments) -> Job:
    """Return this rank's job, restored from the newest checkpoint. Collective. Raises BadInput."""
    world, out, first = arguments.world, arguments.out, arguments.world.rank == 0
    mesh = process.connect(run.mesh_degrees(), world)
    callbacks = Callbacks(arguments.own.callbacks, mesh.axis("world"))
    found = None if arguments.fresh else state.find(out / "checkpoints", mesh, log=arguments.say, step=arguments.from_step)
    done = _is_done(run, found, out, mesh)
    if not done:
        make_writable(out, world)
    writes = first and not done
    source = None
    if arguments.init_from is not None and found is None:
        begins = state.source(arguments.init_from, mesh, log=arguments.say)
        source = of_all(lambda: whole_model(begins), mesh.axis("world"), what="--init_from")
    check_base(run.lora.rank, source=source, found=found)
    base = source if found is None else base_of(found, _moved(arguments)) if run.lora.rank else None
    resumed = Resumed.of(found, run, arguments.allow_changes) if source is None else Resumed.begun(source, run, arguments.allow_changes)
    read = partial(
        open_data,
        run.data,
        max_length=run.model.max_length,
        vocab_size=run.vocab_size,
        seed=run.train.seed,
        tokenizer=resumed.tokenizer,
        log=arguments.say,
        given=arguments.own.data,
    )
    data = the_same(read, mesh.axis("world")) if run.data.is_own else read()
    for line in remark_lines(data.index, out / LISTING):
        arguments.say(line)
    if run.model.document_mask:
        check_separator(data.tokenizer, run.model.document_separator)
    prepare(run, arguments.say)
    executor = start_model(run, mesh, world, rule=arguments.own.rule(run, mesh), table=resumed.table)
    scale, counters = LossScale.of(run.precision.loss_scale), Counters()
    if arguments.fresh:
        for folder in (out / "checkpoints", out / KEPT):
            set_aside(folder, world)
    whole = whole_layouts(run) if run.degrees.pp > 1 else None
    rebalancer = Rebalancer(run, executor.engine, mesh)
    if found is not None:
        rebalancer.resume(found.state.get(state.PLACED), where=f"checkpoint {found.path.name}")
    with during(RESUMING):
        if base is not None:  # before `resume`, which sets the counters
            state.begin(base, executor.engine, mesh, log=arguments.say, whole=whole)
        state.resume(
            found,
            executor.engine,
            mesh,
            counters=counters,
            scale=scale,
            data=data.key,
            recipe=run.model_dump(mode="json"),
            log=arguments.say,
            whole=whole,
        )
    aside = None if arguments.from_step is None else set_aside(out / "checkpoints", world, after=arguments.from_step)
    if writes:
        (out / "recipe.yaml").write_text(resolved_yaml(run, arguments.origins))
        list_in(out, data.index)
        if source is not None:
            pass_on(source.path, out)
        if resumed.table is not None:
            (out / f"{hash_table.STATE}.json").write_text(json.dumps(resumed.table))
    goes_on = found is not None or (arguments.restart is not None and not arguments.fresh and arguments.restart.has_records(out))
    again = going_on(out, counters.step, arguments.restart) if goes_on and first else {}
    config = {key: value for key, value in flat(run).items() if not isinstance(value, list | dict)}
    trackers = {
        str(name): partial(open_tracker, name, out, recipe=arguments.name, config=config, goes_on=goes_on) for name in run.train.trackers
    }
    records = Records(out if writes else None, resume_step=counters.step if goes_on else None, say=arguments.say, trackers=trackers)
    progress = open_progress(
        run.train.steps,
        recipe=arguments.name,
        world=world.size,
        lines=title(run, world),
        out=out,
        kind="auto" if first and arguments.display else "none",
    )
    if why := nothing_to_move(run):
        progress.note(f"experts.rebalance_every {run.experts.rebalance_every} has no effect: {why}")
    before = {} if found is None else found.state.get("code", {})
    changed = [key for key, digest in arguments.code.items() if before.get(key, digest) != digest]
    for line in (
        *(f"changed since the checkpoint: the code of {key} {run.plugins()[key]}" for key in changed),
        *without_effect(run),
        *(f"not recommended: {reason}" for reason in not_recommended(run)),
        *resumed.unused(arguments.allow_changes),
    ):
        progress.note(line)
    if found is not None:
        progress.note(f"resumed from {out / 'checkpoints'} at step {counters.step} (--fresh starts over)")
    if aside is not None:
        progress.note(f"later checkpoints are set aside, in {aside}")
    if goes_on:
        about = resumed.recorded() if source is None else {}
        worlds = {"world": world.size} | ({} if resumed.world is None else {"world_before": resumed.world})
        records.write({"kind": "event", "event": "resumed", "step": counters.step, **worlds, **again, **about})
    if source is not None:
        progress.note(f"begins with the weights and the tokenizer of {source.path}")
        records.write({"kind": "event", "event": "begun", "step": 0, "from": str(source.path)} | resumed.recorded())
    elif arguments.init_from is not None and not (run.lora.rank and _moved(arguments)):
        progress.note(f"--init_from {arguments.init_from} has no effect: the run continues from its own checkpoint (--fresh starts over)")
    shard = shard_of(run, mesh, run.train.global_batch)
    saver = Saver(out / "checkpoints", mesh.axis("world"), keep=run.train.keep)
    if found is not None and writes and not counters.in_a_row:  # else the run may have to resume from an older one
        keep_newest(saver.folder, counters.step, run.train.keep)
    auditor = Auditor(
        executor.engine, mesh, every=run.train.audit_every, record=records.write, note=progress.note, checkpoints=saver.folder
    )
    return Job(
        run,
        arguments.name,
        out,
        world,
        mesh,
        executor,
        data,
        shard,
        records,
        progress,
        scale,
        rebalancer,
        saver,
        counters,
        auditor=auditor,
        callbacks=callbacks,
        code=arguments.code,
        own_data=run.data.is_own,
        saved_at=None if found is None else counters.step,
        base=described(base) if base is not None and run.lora.rank else None,
        table=resumed.table,
    )


def _is_done(run: Run, found: Reader | None, out: Path, mesh: Mesh) -> bool:
    """Return whether all steps were made and summed up before. Then nothing is trained or written. Rank 0 looks. Collective."""
    world = mesh.axis("world")

    def look() -> bool:
        if found is None or world.index:
            return False
        step = found.state["counters"]["step"]
        return bool(step >= run.train.steps and (read_summary(out) or {}).get("steps") == step)

    return bool(largest(float(of_all(look, world, what=SUMMARY)), world))


def _moved(arguments: RunArguments) -> Path | None:
    """Return the given present place of an adapter run's base: a checkpoint's folder, or None."""
    given = arguments.init_from
    return given if given is not None and (given / "manifest.json").is_file() else None


def start_model(run: Run, mesh: Mesh, world: World, *, rule: Rule | None = None, table: Table | None = None) -> Executor:
    """Return the executor of this rank's share of the model. `rule`: a user's own optimizer. `table`: of hash routers, from a checkpoint.
    Collective."""
    with during(WEIGHTS):
        model, layouts = build(run, mesh, device=world.device, table=table)
    with during(STATES):
        return start_executor(run, model, layouts, mesh, rule=rule)
