"""Builds a rank's job from a recipe: mesh, data, model in its engine, checkpoint, records and display.

A run resumes from its own checkpoint, or starts from another run's weights and tokenizer (--init_from), or from random weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import ceil, floor, prod
from pathlib import Path
from typing import Any, Literal

from moe.checks.begins import check_stays
from moe.checks.pipeline import not_recommended
from moe.checks.sequence import without_effect
from moe.data import CorruptedTrain, Dataset, TrainSet, open_data
from moe.data.remarks import LISTING, list_in, remark_lines
from moe.data.tokenizer import check_separator
from moe.model.initialize import global_name
from moe.nn.lora import is_adapter
from moe.parallelize.build import build, whole_layouts
from moe.parallelize.engines import prepare
from moe.parallelize.sequence import shard_of
from moe.plan.job.flops import size
from moe.plan.pipeline import described as described_pipeline
from moe.recipe import hash_table
from moe.recipe.frozen import is_frozen
from moe.recipe.hash_table import Table
from moe.recipe.keys import flat
from moe.recipe.load import resolved_yaml
from moe.recipe.sections import Data, Run
from moe.records.metrics import SUMMARY, Records, read_summary
from moe.records.panel import State
from moe.records.progress import Progress
from moe.records.redone import Restart, going_on
from moe.records.rules import Live
from moe.records.summary import count
from moe.records.tracker import open_tracker
from moe.train.parts.audit import Auditor
from moe.train.parts.callbacks import Callbacks
from moe.train.parts.executor import Executor, start_executor
from moe.train.parts.rebalance import Rebalancer, nothing_to_move
from moe.train.start import state
from moe.train.start.job import Job, Saves, Training
from moe.train.start.own import Own, the_same
from moe.train.start.place import make_writable, set_aside
from moe.train.start.prediction import RESUMING, STATES, WEIGHTS, during
from moe.train.start.restore import base_of, check_base, described, moved_base
from moe.train.start.restore import whole as whole_model
from moe.train.start.resume import KEPT, Resumed, pass_on
from parallel.data.engine import Rule
from parallel.errors import BadInput, counted
from parallel.fixes import Remove
from parallel.mesh.collectives import largest
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World
from parallel.store.checkpoint import keep_newest
from parallel.store.files import step_of
from parallel.store.saver import Saver
from parallel.store.stored import Reader
from parallel.watch.outcome import of_all


@dataclass(frozen=True)
class RunArguments:
    """Arguments of `train` (moe/train/loop/trainer.py) without the recipe. name: the recipe's. origins: recipe key -> source of its value.
    from_step: step of the checkpoint to resume; None: the newest. allow_changes: recipe keys that may differ from the checkpoint's
    although they change what the model computes. code: recipe key whose value is a plugin -> hash of the plugin's file."""

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


@dataclass(frozen=True)
class Start:
    """Checkpoints that a run starts from. resumed: values other than tensors that the run takes from these checkpoints."""

    found: Reader | None  # the run's own checkpoint, which it resumes; None for a new run
    source: Reader | None  # the checkpoint of --init_from; None without --init_from
    base: Reader | None  # the model to which this run adds LoRA adapters; None without LoRA
    resumed: Resumed
    writes: bool = False  # whether this rank writes the run's folder: rank 0, if steps are left


def open_job(run: Run, arguments: RunArguments) -> Job:
    """Build this rank's job, and load the checkpoints from which the run starts (`Start`), if any. Collective. Raises BadInput."""
    out, world = arguments.out, arguments.world
    mesh = process.connect(run.mesh_degrees(), world)
    callbacks = Callbacks(arguments.own.callbacks, mesh.axis("world"))
    start = _find_start(run, arguments, mesh)
    read = partial(
        read_data, run, run.data, tokenizer=start.resumed.tokenizer, log=arguments.say, listing=out / LISTING, given=arguments.own.data
    )
    data = the_same(read, mesh.axis("world")) if run.data.is_own or run.data.source == "chat" else read()
    if data.has_pairs and not run.train.has_own_loss:
        needed, fix = "a loss for pairs: cross-entropy would train both chats", "--train.loss dpo:dpo, with a copy of docs/use/dpo.py"
        raise BadInput("train.loss", got="cross_entropy with pairs of chats", needed=needed, fix=fix)
    run = in_steps(run, data, arguments.say)
    if not (done := _is_done(run, start.found, out, mesh)):
        make_writable(out, world)
    start = replace(start, writes=world.rank == 0 and not done)
    prepare(run, arguments.say)
    executor = start_model(run, mesh, world, rule=arguments.own.rule(run, mesh), table=start.resumed.table)
    if arguments.fresh:
        for folder in (out / "checkpoints", out / KEPT):
            set_aside(folder, world)
    training = Training(executor, LossScale.of(run.precision.loss_scale), Rebalancer(run, executor.engine, mesh))
    restored = _restore(run, mesh, training, data, start)
    # move checkpoints of later steps away: damaged ones that were passed over, or all after --from_step. They would count for train.keep,
    # the number of checkpoints to keep
    aside = None if start.found is None or done else set_aside(out / "checkpoints", world, after=step_of(start.found.path.name))
    if start.writes:
        _write_folder(run, arguments, data, start)
    records, progress = _open_output(run, arguments, start, training.counters.step)
    started = _start_lines(run, arguments, start, training.counters.step, aside, done=done)
    for line in (*started, *restored, *_recipe_lines(run, arguments, start)):
        progress.note(line)
    shard = shard_of(run, mesh, run.train.global_batch)
    saver = Saver(out / "checkpoints", mesh.axis("world"), keep=run.train.keep)
    # after skipped steps, older checkpoints are kept too, because the newest may have damaged weights
    if start.found is not None and start.writes and not training.counters.in_a_row:
        keep_newest(saver.folder, training.counters.step, run.train.keep)
    record, note = records.write, progress.note
    auditor = Auditor(executor.engine, mesh, every=run.train.audit_every, record=record, note=note, folder=saver.folder)
    base = described(start.base) if start.base is not None and run.lora.rank else None
    saved: dict[str, Any] = {"recipe": run.model_dump(mode="json"), "tokenizer": data.tokenizer.describe(), "data": data.key}
    saved |= {"code": arguments.code or None, "base": base, "table": start.resumed.table}
    saves = Saves(saver, saved, begun=None if start.found is None else training.counters.step)
    agree = mesh.axis("world") if run.data.is_own else None
    doctor = Live(run, records.lines()) if start.writes else None
    return Job(run, arguments.name, out, world, mesh, training, data, shard, records, progress, saves, callbacks, auditor, agree, doctor)


def in_steps(run: Run, data: Dataset, say: Callable[[str], None]) -> Run:
    """Return the run with train.steps set to the steps of train.epochs, rounded up, so the last step may read samples of the next epoch.
    Say so, and also if the warm-up is longer than the run. Raises BadInput for data without epochs."""
    epochs, batch = run.train.epochs, run.train.global_batch
    if epochs is None:
        return run
    train = data.train.inner if isinstance(data.train, CorruptedTrain) else data.train
    if not isinstance(train, TrainSet):
        got, needed = f"{epochs:g} with {run.data.name}", "one source with a length: several have no common epoch, an iterable has none"
        raise BadInput("train.epochs", got=got, needed=needed, fix=Remove("it") | "give train.steps")
    steps = ceil(Fraction(str(epochs)) * train.num_windows / batch)  # exact: 1.1 * 100 is above 110 as a float
    further = steps * batch - floor(Fraction(str(epochs)) * train.num_windows)
    rest = f"; in whole steps that is {counted(further, 'sequence')} more than asked" if further else ""
    say(f"train.epochs {epochs:g}: {counted(steps, 'step')} of {counted(batch, 'sequence')}; an epoch has {train.num_windows}{rest}")
    if (warmup := run.optimizer.warmup_steps) > steps:
        say(f"optimizer.warmup_steps {warmup}: these {steps} steps never reach optimizer.lr; set optimizer.warmup_steps to {steps // 10}")
    return run.model_copy(update={"train": run.train.model_copy(update={"steps": steps})})


def _find_start(run: Run, arguments: RunArguments, mesh: Mesh) -> Start:
    """Find the checkpoints that the run starts from, and check that the recipe's model fits them. Collective."""
    check_stays(arguments.out, fresh=arguments.fresh, source=arguments.init_from)
    found = None if arguments.fresh else state.find(arguments.out / "checkpoints", mesh, log=arguments.say, step=arguments.from_step)
    source = None
    if arguments.init_from is not None and found is None:
        begins = state.source(arguments.init_from, mesh, log=arguments.say)
        source = of_all(lambda: whole_model(begins), mesh.axis("world"), what="--init_from")
    check_base(run.lora.rank, source=source, found=found)
    base = source if found is None else base_of(found, moved_base(found, arguments.init_from)) if run.lora.rank else None
    resumed = Resumed.of(found, run, arguments.allow_changes) if source is None else Resumed.begun(source, run, arguments.allow_changes)
    return Start(found, source, base, resumed)


def read_data(
    run: Run, source: Data, *, tokenizer: Any, log: Callable[[str], None], listing: Path | None = None, given: Any = None
) -> Dataset:
    """Open the data `source` for a run's model, and log remarks about its files. tokenizer: stored description of a tokenizer; None: one is
    made from the text. listing: path of the file with all remarks, which the log names. given: samples from a user's program."""
    opened = partial(open_data, source, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed)
    data = opened(tokenizer=tokenizer, log=log, given=given)
    for line in remark_lines(data.index, listing):
        log(line)
    if run.model.document_mask:
        check_separator(data.tokenizer, run.model.document_separator)
    return data


def _restore(run: Run, mesh: Mesh, training: Training, data: Dataset, start: Start) -> list[str]:
    """Load the model from `start`, and a resumed run's training state. Return lines for the user, such as changed keys. Collective."""
    lines: list[str] = []
    whole = whole_layouts(run) if run.degrees.pp > 1 or run.lora.in_blocks else None
    engine, found = training.executor.engine, start.found
    if found is not None:
        training.rebalancer.resume(found.state.get(state.PLACED), where=f"checkpoint {found.path.name}")
    with during(RESUMING):
        if start.base is not None:  # before `resume`, which loads the LoRA adapters and the counters
            state.begin(start.base, engine, mesh, log=lines.append, whole=whole)
        counters, scale, recipe = training.counters, training.scale, run.model_dump(mode="json")
        state.resume(found, engine, mesh, counters=counters, scale=scale, data=data.key, recipe=recipe, log=lines.append, whole=whole)
    return lines


def _write_folder(run: Run, arguments: RunArguments, data: Dataset, start: Start) -> None:
    """Write the recipe, remarks about data, files of an imported model and the hash router's table of experts into the run's folder. Raises
    BadInput if the folder was renamed or removed since `make_writable`."""
    origins = arguments.origins if run.train.epochs is None else arguments.origins | {"train.steps": "train.epochs"}
    try:
        (arguments.out / "recipe.yaml").write_text(resolved_yaml(run, origins))
    except OSError as error:
        got, needed = f"{arguments.out}/recipe.yaml: {error.strerror}", "a folder that stays in place and can be written"
        raise BadInput("--out", got=got, needed=needed, fix="start again, or choose another --out") from None
    list_in(arguments.out, data.index)
    if start.source is not None:
        pass_on(start.source.path, arguments.out)
    if start.resumed.table is not None:
        (arguments.out / f"{hash_table.STATE}.json").write_text(json.dumps(start.resumed.table))


def _open_output(run: Run, arguments: RunArguments, start: Start, step: int) -> tuple[Records, Progress]:
    """Open metrics.jsonl, trackers and the display. Write an event if the run resumes at `step` or starts from another run's weights."""
    out, world, first, resumed = arguments.out, arguments.world, arguments.world.rank == 0, start.resumed
    goes_on = start.found is not None or (arguments.restart is not None and not arguments.fresh and arguments.restart.continues(out))
    again = going_on(out, step, arguments.restart) if goes_on and first else {}
    config = {key: value for key, value in flat(run).items() if not isinstance(value, list | dict)}
    trackers = {
        str(name): partial(open_tracker, name, out, recipe=arguments.name, config=config, goes_on=goes_on) for name in run.train.trackers
    }
    records = Records(out if start.writes else None, resume_step=step if goes_on else None, say=arguments.say, trackers=trackers)
    kind: Literal["auto", "none"] = "auto" if first and arguments.display else "none"
    shown = State(run.train.steps, recipe=arguments.name, world=world.size, lines=title(run, world))
    if goes_on:
        about = resumed.recorded(run) if start.source is None else {}
        worlds = {"world": world.size} | ({} if resumed.world is None else {"world_before": resumed.world})
        records.event("resumed", step=step, **worlds, **again, **about)
    if start.source is not None:
        records.event("begun", step=0, **{"from": str(start.source.path)}, **resumed.recorded(run))
    return records, Progress(shown, out=out, kind=kind)


def _recipe_lines(run: Run, arguments: RunArguments, start: Start) -> Iterator[str]:
    """Yield lines for the user about recipe keys without effect, changed plugins, and combinations of keys that are not recommended."""
    if why := nothing_to_move(run):
        yield f"experts.rebalance_every {run.experts.rebalance_every} has no effect: {why}"
    steps, warmup = run.train.steps, run.optimizer.warmup_steps
    if warmup > steps:
        yield f"optimizer.warmup_steps {warmup} are more than the steps, {steps}: the rate ends at {steps / warmup:.0%} of optimizer.lr"
    if run.train.freeze and start.found is None and start.source is None:
        yield f"train.freeze: {', '.join(run.train.freeze)} keep their random first values, because there is no --init_from"
    before = {} if start.found is None else start.found.state.get("code", {})
    for key, digest in arguments.code.items():
        if before.get(key, digest) != digest:
            yield f"changed since the checkpoint: the code of {key} {run.plugins()[key]}"
    yield from without_effect(run)
    for reason in not_recommended(run):
        yield f"not recommended: {reason}"
    yield from start.resumed.unused(arguments.allow_changes)


def _start_lines(run: Run, arguments: RunArguments, start: Start, step: int, aside: Path | None, *, done: bool) -> Iterator[str]:
    """Yield lines for the user about the checkpoints that the run starts from. aside: folder to which checkpoints of later steps were
    moved. done: the run has no steps left."""
    if done:
        key, asked = ("train.steps", run.train.steps) if run.train.epochs is None else ("train.epochs", run.train.epochs)
        yield f"{key} {asked:g} was reached before: raise {key} to continue, or start over with --fresh"
    elif start.found is not None:
        yield f"resumed from {arguments.out / 'checkpoints'} at step {step} (--fresh starts over)"
    if aside is not None:
        yield f"later checkpoints are set aside, in {aside}"
    if start.source is not None:
        yield f"starts from the weights and the tokenizer of {start.source.path}"
    elif arguments.init_from is not None and not (run.lora.rank and start.found and moved_base(start.found, arguments.init_from)):
        yield f"--init_from {arguments.init_from} has no effect: the run continues from its own checkpoint (--fresh starts over)"


def _is_done(run: Run, found: Reader | None, out: Path, mesh: Mesh) -> bool:
    """Return whether nothing is left to do, because the checkpoint `found` and summary.json are both of the last step. Collective."""
    world = mesh.axis("world")

    def look() -> bool:
        if found is None or world.index:
            return False
        step = found.state["counters"]["step"]
        return bool(step >= run.train.steps and (read_summary(out) or {}).get("steps") == step)

    return bool(largest(float(of_all(look, world, what=SUMMARY)), world))


def start_model(run: Run, mesh: Mesh, world: World, *, rule: Rule | None = None, table: Table | None = None) -> Executor:
    """Build this rank's share of the model; return its executor. rule: a user's optimizer; None: the recipe's. table: token id ->
    experts, for hash routers. Collective."""
    with during(WEIGHTS):
        model, layouts = build(run, mesh, device=world.device, table=table)
    with during(STATES):
        return start_executor(run, model, layouts, mesh, rule=rule)


def title(run: Run, world: World) -> list[str]:
    """Return lines that describe a run: its devices, layout, precision, parameters, pipeline and router."""
    d, p, tokens = run.degrees, run.precision, run.train.global_batch * run.model.read_length
    parameters = size(run)
    attention = f"{run.sequence.kind}, {run.sequence.position_order}" + (f", heads {run.sequence.heads}" if run.sequence.heads > 1 else "")
    shown = {"pp": "", "tp": f" ({_tensor(run)})", "sp": f" ({attention})", "dp": "", "ep": "", "etp": ""}
    degrees = {name: getattr(d, name) for name in shown}
    layout = " ".join(f"{name} {degree}{shown[name]}" for name, degree in degrees.items() if degree != 1 or name in ("dp", "ep"))
    lines = [
        f"{world.size} x {world.device.type} · {layout} · {run.engine_text} · {p.compute} compute, {p.master} master",
        f"{count(parameters.total)} parameters, {count(parameters.active)} active · {tokens:,} tokens a step",
    ]
    if run.lora.rank or run.train.freeze:
        lines.append(f"{trained_parameters(run):,} parameters are trained, {'of adapters' if run.lora.rank else 'the others are frozen'}")
    if run.head_copies() > 1:
        heads = run.model.num_kv_heads or run.model.num_heads
        lines.append(f"key-value heads: {heads} on {run.tp_grid().units} ranks of tp, so there are {run.head_copies()} copies of each")
    if d.pp > 1:
        lines.append(described_pipeline(run))
    if run.model.layers_with_experts():
        own = ", ".join(f"{key} {'null' if value is None else value}" for key, value in run.router.own.items())
        lines.append(f"router {run.router.preset}{', but ' if own else ''}{own}")
    return lines


def trained_parameters(run: Run) -> int:
    """Return the number of trained parameters: of the LoRA adapters if there are any, else of all weights. Modules in train.freeze are
    not counted."""
    layouts = {global_name(name): layout for name, layout in whole_layouts(run).items()}
    trained = is_adapter if run.lora.rank else lambda name: not is_frozen(name, run.train.freeze)
    return sum(prod(layouts[name].shape) for name in layouts if trained(name))


def _tensor(run: Run) -> str:
    if run.tp_grid().sequences > 1:
        return f"{run.tensor.kind}: {run.tp_grid()}"
    chunks = f", overlapped in {run.tensor.overlap_chunks} chunks" if run.tensor.overlap_chunks > 1 else ""
    return f"{run.tensor.kind}{', slices of sequences' if run.tensor.sequence_parallel else ''}{chunks}"
