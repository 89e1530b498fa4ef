"""Runs ten steps of a layout by the trainer's own code on forked ranks, and gathers whole tensors with global names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.model.names import global_name
from moe.nn.lora import parts
from moe.parallelize.build import build, whole_layouts
from moe.parallelize.engines import check_given, optimizer_of
from moe.parallelize.sequence import shard_of
from moe.plan.pipeline import schedule_of
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.loop.stream import stream
from moe.train.parts.executor import Executor, start_executor
from moe.train.parts.numbers import LayerNumbers, Numbers
from moe.train.start.state import extra_owned
from moe.verify.cases import OVERFLOWS, Case
from moe.verify.in_blocks import in_blocks
from moe.verify.in_parts import in_parts
from moe.verify.in_slices import in_slices
from moe.verify.older import OlderWeights
from moe.verify.plain.batches import batch
from moe.verify.tape import TAPED, Step, Tape, listen, of_ranks, plain
from moe.verify.twin import STEPS, Result
from parallel.data.engine import Engine
from parallel.data.kinds.catalog import ENGINES, PLAIN
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.clip import GradientNorm
from parallel.numerics.precision import LossScale
from parallel.optim.given import Given
from parallel.process import process
from parallel.process.fork import each_on_ranks
from parallel.process.process import World
from parallel.store.checkpoint import pieces

Ran = tuple[Result, Tape | None] | str  # result and tape of a case, or its ranks' errors
Inside = Callable[[], AbstractContextManager[Any]]  # a context that every rank enters around each case
# limit for all ranks together: each group of a rank has a gloo thread that wakes a hundred times a second until the process ends
MESHES = 16
LIMIT_S = 120.0  # seconds for one case on up to 4 ranks; ten tiny steps take a second or two, and a busy machine many times that


def compute(
    case: Case,
    *,
    rank: int = 0,
    kernels: str = "cpu",
    meshes: dict[Degrees, Mesh] | None = None,
    tape: Tape | None = None,
    delayed_as: Case | None = None,
) -> Result:
    """Run ten steps of one layout as this rank. Every rank returns the parts that it owns. `meshes`: meshes that were already made.

    `delayed_as`: on one process, take gradients at weights as old as on the stages of that case.
    """
    run = check_run(case.run(), case.world)
    run = run.model_copy(update={"experts": run.experts.model_copy(update={"kernels": kernels})})
    degrees, meshes = run.mesh_degrees(), {} if meshes is None else meshes
    if degrees not in meshes:
        meshes[degrees] = process.connect(degrees, World(rank, case.world))
    mesh = meshes[degrees]
    model, layouts = build(run, mesh, device=torch.device("cpu"))
    if case.slices:
        in_slices(model, case)
    if case.parts > 1:  # after in_slices: a part of the heads attends in slices too
        in_parts(model, replace(case, world=case.parts, tp=case.parts, tensor="1d").run(), first=case.first_part)
    if case.blocks > 1:
        in_blocks(model, case.blocks)
    if run.optimizer.is_own:
        rule = optimizer_of(run.optimizer)
        assert isinstance(rule, Given)
        check_given(rule, run, whole_layouts(run), mesh)
    executor = start_executor(run, model, layouts, mesh)
    if tape is not None:
        listen(model, tape)
    if case.delayed and case.pp > 1:
        return _streamed(case, run, executor, mesh, tape)
    return _stepped(case, run, executor, mesh, tape, OlderWeights(executor.engine.module, delayed_as or case))


def _stepped(case: Case, run: Run, executor: Executor, mesh: Mesh, tape: Tape | None, older: OlderWeights) -> Result:
    engine, shard, scale = executor.engine, shard_of(run, mesh, case.batch), LossScale.of(run.precision.loss_scale)
    spoil = _spoiler(engine, mesh) if case.overflow else None
    losses: list[float] = []
    kept: tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(STEPS):
        taped, spoilt, used = tape is not None and step < TAPED, case.overflow and step == OVERFLOWS, scale.value
        if spoil is not None:
            spoil["now"] = spoilt
        with older.at(step):
            numbers = accumulate(
                executor,
                shard.of_batch(batch(step, padded=case.padded, length=run.model.read_length, size=case.batch)),
                shard=shard,
                microbatches=case.microbatches,
                seed=run.train.seed,
                step=step,
                loss_scale=used,
            )
        losses.append(numbers.loss)
        gradients = owned(engine, mesh, "gradient", used) if kept is None or (taped and not spoilt) else {}
        norm = finish(
            engine,
            numbers,
            world=mesh.axis("world"),
            scale=scale,
            lr=run.optimizer.lr,
            clip_norm=run.optimizer.clip_norm,
            device=torch.device("cpu"),
        )
        weights = _weights(engine, mesh) if kept is None or taped else {}
        kept = kept or (numbers.balance_loss, norm.total, gradients, weights)
        if tape is not None and taped:
            norms = {} if spoilt else norm.families | {"total": norm.total}
            tape.steps.append(Step(numbers.loss, _reports(numbers), gradients, norms, owned(engine, mesh, "exp_avg", 1.0), weights))
    assert kept is not None
    return Result(losses, *kept)


def _spoiler(engine: Engine, mesh: Mesh) -> dict[str, bool]:
    """A switch: while `now` is True, one parameter's gradient is infinite on the last rank, before gradients are summed."""
    on = {"now": False}
    if mesh.rank == mesh.axis("world").size - 1:
        spoilt = next(p for name, p in reversed(list(engine.module.named_parameters())) if ".experts." in name or ".ffn." in name)
        spoilt.register_hook(lambda grad: grad * torch.inf if on["now"] else grad)
    return on


def _reports(numbers: Numbers) -> dict[str, Tensor]:
    def row(n: LayerNumbers) -> Tensor:
        return torch.tensor([n.balance_loss, n.importance_loss, n.load_loss, n.z_loss, n.kept, *n.choices], dtype=torch.float64)

    return {f"layers.{n.layer}.router": row(n) for n in numbers.layers}


def _streamed(case: Case, run: Run, executor: Executor, mesh: Mesh, tape: Tape | None) -> Result:
    """Run one step and drain the pipeline; its gradients are Adam's first moments. Then run the other steps without draining in between."""
    engine, shard = executor.engine, shard_of(run, mesh, case.batch)
    updates: list[Step] = []
    if tape is not None:
        _watch_updates(engine, mesh, updates)
    steps: list[tuple[Numbers, GradientNorm]] = []
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    for count in (1, STEPS - 1):
        steps += stream(
            executor,
            [shard.of_batch(batch(len(steps) + n, length=case.length, size=case.batch)) for n in range(count)],
            schedule=schedule_of(run, batches=count),
            shard=shard,
            world=mesh.axis("world"),
            seed=run.train.seed,
            step=len(steps),
            rate=lambda n: run.optimizer.lr,
        )
        kept = kept or (owned(engine, mesh, "exp_avg", 1 - run.optimizer.beta1), _weights(engine, mesh))
    assert kept is not None
    for step, (numbers, norm) in zip(updates, steps, strict=False):
        step.loss, step.reports, step.norms = numbers.loss, _reports(numbers), norm.families | {"total": norm.total}
    if tape is not None:
        tape.steps += updates
    numbers, norm = steps[0]
    return Result([numbers.loss for numbers, _ in steps], numbers.balance_loss, norm.total, *kept)


def _watch_updates(engine: Engine, mesh: Mesh, updates: list[Step]) -> None:
    """Record gradients, moments and weights of the first updates of this rank's stage. The executor makes these updates, so hooks record
    them.
    """
    optimizer: torch.optim.Optimizer = engine.optimizer  # type: ignore[attr-defined]
    made = [0]

    def before(*_: Any) -> None:
        made[0] += 1
        if made[0] <= TAPED:
            updates.append(Step(gradients=owned(engine, mesh, "gradient", 1.0)))

    def after(*_: Any) -> None:
        if made[0] <= TAPED:
            updates[-1].moments = owned(engine, mesh, "exp_avg", 1.0)
            updates[-1].weights = owned(engine, mesh, "weight", 1.0)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _weights(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    """All weights, including the routers' biases."""
    biases = {name: bias_E.clone() for name, bias_E in extra_owned(engine.module, engine.layouts, mesh)}
    return owned(engine, mesh, "weight", 1.0) | biases


def owned(engine: Engine, mesh: Mesh, what: str, scale: float) -> dict[str, Tensor]:
    """This rank's part of every parameter's gradient or state, divided by `scale`. Each tensor is whole, with zeros elsewhere."""
    found: dict[str, Tensor] = {}
    layouts = engine.layouts if what == "weight" else parts(engine.layouts)[0]  # frozen parameters have neither gradients nor moments
    for name, layout in layouts.items():
        tensor = engine.gradient(name) if what == "gradient" else engine.state(name)[what]
        if layout.is_owner(mesh):
            for p in pieces(global_name(name), layout, mesh, tensor):
                # other tiles and ranks hold the rest; summing over ranks gives the whole tensor
                whole = found.setdefault(p.name, torch.zeros(p.shape))
                whole[tuple(slice(start, start + n) for start, n in zip(p.start, p.tensor.shape, strict=True))] = p.tensor.float() / scale
    return found


# --- on forked ranks --------------------------------------------------------------------------------------------------------


def run_world(
    chosen: list[Case], world: int, *, taped: bool = False, inside: Inside = nullcontext, timeout_s: float | None = None
) -> Iterator[tuple[Case, Ran]]:
    """Run all cases of one world size on forked ranks, and yield each result as soon as it is done.

    If ranks fail, their errors are the result of the case that they were running, and the remaining cases run on new ranks. `timeout_s` is
    the limit for a case of up to four ranks, and doubles with their number beyond that; None: LIMIT_S.
    """
    left, loaded = list(chosen), {ENGINES[PLAIN].load}
    limit = (LIMIT_S if timeout_s is None else timeout_s) * max(1, world // 4)
    while left:
        left[0].engine.load()  # once, before ranks are forked: DeepSpeed takes seconds, for which rows before it need not wait
        loaded.add(left[0].engine.load)
        ready, done = _few_meshes(takewhile(lambda case: case.engine.load in loaded, left)), 0
        try:
            for parts in each_on_ranks(_ranks, world, ready, taped, inside, timeout_s=limit):
                yield left[done], _gather(parts)
                done += 1
        except RuntimeError as error:
            if done == len(ready):
                raise
            yield left[done], str(error)
            done += 1
        left = left[done:]


def _few_meshes(cases: Iterable[Case]) -> list[Case]:
    """The first of these cases whose meshes together stay within MESHES on each rank; at least one."""
    found: list[Case] = []
    meshes: set[Degrees] = set()
    for case in cases:
        meshes.add(case.run().mesh_degrees())
        if len(meshes) > max(1, MESHES // case.world):
            break
        found.append(case)
    return found


def _ranks(rank: int, chosen: list[Case], taped: bool, inside: Inside) -> Iterator[dict[str, Any]]:
    meshes: dict[Degrees, Mesh] = {}  # reused by later cases: process groups are never closed, and each keeps its threads
    for case in chosen:
        tape = Tape.of(case) if taped else None
        with inside():
            found = asdict(compute(case, rank=rank, meshes=meshes, tape=tape))
        yield {"result": found, "tape": None if tape is None else plain(tape)}


def _gather(parts: list[dict[str, Any]]) -> tuple[Result, Tape | None]:
    first = parts[0]["result"]
    for part in parts[1:]:
        for what in ("gradients", "weights"):
            for name, tensor in part["result"][what].items():
                first[what][name] = first[what][name] + tensor if name in first[what] else tensor
    tapes = [part["tape"] for part in parts]
    return Result(**first), None if tapes[0] is None else of_ranks(tapes)
