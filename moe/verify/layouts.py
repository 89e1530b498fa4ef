"""Runs ten steps of a case (a tiny model in one layout) with the trainer's own code on forked ranks. Gathers weights and gradients
as unsharded tensors, under their names in checkpoints."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.checks.together import check_run
from moe.model.transformer import extra_state
from moe.parallelize.build import build, whole_layouts
from moe.parallelize.engines import check_given, optimizer_of
from moe.parallelize.sequence import shard_of
from moe.plan.pipeline import schedule_of
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish, stream
from moe.train.parts.executor import Executor, start_executor
from moe.train.parts.learning_rate import learning_rate
from moe.train.parts.numbers import LayerNumbers, Numbers
from moe.train.parts.rebalance import Rebalancer
from moe.train.start.state import extra_owned
from moe.verify.cases import OVERFLOWS, Case
from moe.verify.in_parts import in_blocks, in_parts, in_slices
from moe.verify.plain.batches import batch
from moe.verify.tape import TAPED, Step, Tape, listen, of_ranks, owned, parts_of, plain
from moe.verify.twin import STEPS, Result, ages, spread, version_read
from parallel.data.engine import Engine
from parallel.data.kinds import ENGINES, PLAIN
from parallel.mesh.mesh import Degrees, Mesh
from parallel.numerics.clip import GradientNorm
from parallel.numerics.precision import LossScale
from parallel.optim.given import Given
from parallel.process import process
from parallel.process.fork import each_on_ranks

_CPU = torch.device("cpu")
Ran = tuple[Result, Tape | None] | str  # outcome of a case: (result, record of its first steps or None), or the text of its ranks' errors
Inside = Callable[[], AbstractContextManager[Any]]  # makes the context manager in which every rank runs a case
# largest number of meshes x ranks in one set of processes: each mesh starts gloo threads, which slow all ranks until the process ends
MESHES = 16
LAST = "last module that ran: "  # prefix of a line in a failed rank's error; Tape.last (a module and a step) follows
LIMIT_S = 120.0  # time limit for one case on up to 4 ranks. Ten tiny steps take 1 to 2 s, but more on a busy machine


class Watcher(Protocol):
    """Observer of a rank's steps (moe/verify/types/watch.py). A rank calls `built` first, `summed` when gradients are summed over
    ranks, and `updated` after an optimizer step. All methods are collective."""

    def built(self, engine: Engine, mesh: Mesh) -> None: ...

    def summed(self, numbers: Numbers, *, kind: str = "gradient", scale: float = 1.0) -> None: ...

    def updated(self, norm: GradientNorm, *, loss_scale: float = 1.0) -> None: ...


def compute(
    case: Case,
    *,
    rank: int = 0,
    kernels: str | None = None,
    meshes: dict[Degrees, Mesh] | None = None,
    tape: Tape | None = None,
    delayed_as: Case | None = None,
    device: torch.device = _CPU,
    watch: Watcher | None = None,
) -> Result:
    """Run the steps of a case (ten, or case.steps) as rank `rank`. Return its Result, in which tensors are zero outside the part that this
    rank owns (see `owned`). kernels: value of experts.kernels; None: the case's. meshes: meshes of earlier cases, to be reused. tape:
    records the first steps. delayed_as: a case with PipeDream or 2BW; `case`, on one process, then computes gradients with the older
    weights that the stages of `delayed_as` use. watch: is called during each step (see `Watcher`).
    """
    run = check_run(case.run(), case.world)
    run = run.model_copy(update={"experts": run.experts.model_copy(update={"kernels": kernels or case.kernels})})
    degrees, meshes = run.mesh_degrees(), {} if meshes is None else meshes
    if degrees not in meshes:
        meshes[degrees] = process.connect(degrees, process.World(rank, case.world, place=device.type))
    mesh = meshes[degrees]
    model, layouts = build(run, mesh, device=device, spread=spread)
    if tape is not None:
        shards = ((name, model.get_parameter(name)) for name in layouts)
        # FSDP and DeepSpeed's stage 3 (ds_id) have divided their shards over more ranks
        own = ((name, shard) for name, shard in shards if not (isinstance(shard, DTensor) or hasattr(shard, "ds_id")))
        tape.first = parts_of(own, layouts, mesh)
    if case.slices:
        in_slices(model, case)
    if case.parts > 1:  # after in_slices, because in_parts copies the layers
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
    if watch is not None:
        watch.built(executor.engine, mesh)
    if case.delayed and case.pp > 1:
        return _streamed(case, run, executor, mesh, tape, device, watch)
    return _stepped(case, run, executor, mesh, tape, _OlderWeights(executor.engine.module, delayed_as or case), device, watch)


def _stepped(
    case: Case,
    run: Run,
    executor: Executor,
    mesh: Mesh,
    tape: Tape | None,
    older: _OlderWeights,
    device: torch.device,
    watch: Watcher | None,
) -> Result:
    """Run the steps of a case in which the pipeline, if any, is empty between steps. older: the weights with which gradients are computed.
    The other arguments: as in `compute`."""
    engine, shard = executor.engine, shard_of(run, mesh, case.batch)
    # an overflow halves a dynamic scale. It is a power of 2, so it rounds nothing in fp32, and later gradients are compared within 1e-5
    scale = LossScale.of("dynamic" if case.overflow else run.precision.loss_scale)
    spoil = _spoiler(engine, mesh) if case.overflow else {}
    clip_norm, world = run.optimizer.clip_norm, mesh.axis("world")
    rebalancer, updates = Rebalancer(run, engine, mesh), 0
    losses: list[float] = []
    first: tuple[float, float, dict[str, Tensor], dict[str, Tensor]] | None = None
    for step in range(case.steps or STEPS):
        taped, spoilt, used = tape is not None and step < TAPED, case.overflow and step == OVERFLOWS, scale.value
        spoil["now"] = spoilt
        whole = batch(step, padded=case.padded, packed=case.packed, length=run.model.read_length, size=case.batch)
        tokens = shard.of_batch(whole).to(device)
        with older.at(step):
            numbers = accumulate(
                executor, tokens, shard=shard, microbatches=case.microbatches, seed=run.train.seed, step=step, loss_scale=used
            )
        losses.append(numbers.loss)
        if watch is not None:
            watch.summed(numbers)
        gradients = owned(engine, mesh, "gradient", used) if first is None or (taped and not spoilt) else {}
        # a recipe as it is keeps its highest rate, because a warm-up of many steps would hide faults of the update
        lr = run.optimizer.lr if case.values else learning_rate(updates, run.optimizer, total=run.train.steps)
        norm = finish(engine, numbers, world=world, scale=scale, lr=lr, clip_norm=clip_norm, device=device)
        updates += norm.finite
        if watch is not None:
            watch.updated(norm, loss_scale=used)
        weights = _weights(engine, mesh) if first is None or taped else {}
        first = first or (numbers.balance_loss, norm.total, gradients, weights)
        if tape is not None and taped:
            norms = {} if spoilt else norm.families | {"total": norm.total}
            tape.steps.append(Step(numbers.loss, _reports(numbers), gradients, norms, owned(engine, mesh, "exp_avg", 1.0), weights))
        if watch is None:  # its laws name experts by the ranks that hold them at first
            rebalancer.after_step(numbers, step=step + 1, updates=updates, record=lambda _: None)
    assert first is not None
    return Result(losses, *first)


class _OlderWeights:
    """Makes one process compute gradients with the older weights that the pipeline stages of the case `delayed_as` use (PipeDream, 2BW)."""

    def __init__(self, model: nn.Module, delayed_as: Case) -> None:
        self.tensors: dict[str, Tensor] = dict(model.named_parameters()) | extra_state(model)
        self.ages = ages(delayed_as, list(self.tensors))
        self.history: list[dict[str, Tensor]] = []

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Return a context manager in which the model has the older weights with which the gradients of `step` are computed. Enter it once
        for each step, in order."""
        if not self.ages:
            yield
            return
        self.history.append({name: tensor.detach().clone() for name, tensor in self.tensors.items()})
        self._put({name: self.history[version_read(step, age)][name] for name, age in self.ages.items()})
        yield
        self._put(self.history[-1])

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.tensors[name].copy_(value)


def _spoiler(engine: Engine, mesh: Mesh) -> dict[str, bool]:
    """Make one parameter's gradient infinite on the last rank while the value of the key "now" in the returned dict is True."""
    on = {"now": False}

    def spoil(grad: Tensor | None) -> Tensor | None:  # None: the weight gradient is deferred (parallel/numerics/weight_gradient.py)
        return grad * torch.inf if on["now"] and grad is not None else grad

    if mesh.rank == mesh.axis("world").size - 1:
        named = reversed(list(engine.module.named_parameters()))
        path, _, last = next(n for n, p in named if p.requires_grad and (".experts." in n or ".ffn." in n)).rpartition(".")
        module = engine.module.get_submodule(path)

        def gathered(*_: Any) -> None:
            first.remove()
            getattr(module, last).register_hook(spoil)

        first = module.register_forward_pre_hook(gathered)  # FSDP gathers the weight just before
    return on


def _reports(numbers: Numbers) -> dict[str, Tensor]:
    """Return a dict: name of a router -> [5 + E]: balance, importance, load and z loss, number of choices with a slot, choices of each
    expert. The plain twin reports the same figures (`_report` in twin.py)."""

    def row(n: LayerNumbers) -> Tensor:
        return torch.tensor([n.balance_loss, n.importance_loss, n.load_loss, n.z_loss, n.kept, *n.choices], dtype=torch.float64)

    return {f"layers.{n.layer}.router": row(n) for n in numbers.layers}


def _streamed(
    case: Case, run: Run, executor: Executor, mesh: Mesh, tape: Tape | None, device: torch.device, watch: Watcher | None
) -> Result:
    """Run a case of PipeDream or 2BW: step 0, after which the pipeline drains, then the other steps without draining. `stream` returns
    after the updates, so the gradients of step 0 are computed from Adam's state: exp_avg / (1 - beta1)."""
    engine, shard, world = executor.engine, shard_of(run, mesh, case.batch), mesh.axis("world")
    updates: list[Step] = []
    if tape is not None:
        _watch_updates(engine, mesh, updates)
    steps: list[tuple[Numbers, GradientNorm]] = []
    first: tuple[dict[str, Tensor], dict[str, Tensor]] | None = None
    for count in filter(None, (1, (case.steps or STEPS) - 1)):
        batches = [shard.of_batch(batch(len(steps) + n, length=case.length, size=case.batch)).to(device) for n in range(count)]
        how: dict[str, Any] = {"seed": run.train.seed, "step": len(steps), "rate": lambda n: run.optimizer.lr}
        steps += stream(executor, batches, schedule=schedule_of(run, batches=count), shard=shard, world=world, **how)
        if watch is not None:
            watch.summed(steps[0][0], kind="exp_avg", scale=1 - run.optimizer.beta1)
            watch.updated(steps[0][1])
        first = first or (owned(engine, mesh, "exp_avg", 1 - run.optimizer.beta1), _weights(engine, mesh))
    assert first is not None
    for step, (numbers, norm) in zip(updates, steps, strict=False):
        step.loss, step.reports, step.norms = numbers.loss, _reports(numbers), norm.families | {"total": norm.total}
    if tape is not None:
        tape.steps += updates
    numbers, norm = steps[0]
    return Result([numbers.loss for numbers, _ in steps], numbers.balance_loss, norm.total, *first)


def _watch_updates(engine: Engine, mesh: Mesh, updates: list[Step]) -> None:
    """Add hooks to the optimizer that append a Step (gradients, exp_avg, weights) to `updates` at each of its first TAPED updates."""
    optimizer: torch.optim.Optimizer = engine.optimizer  # type: ignore[attr-defined]
    begun = [0]  # number of updates so far, which is equal on all ranks

    def before(*_: Any) -> None:
        begun[0] += 1
        if begun[0] <= TAPED:
            updates.append(Step(gradients=owned(engine, mesh, "gradient", 1.0)))

    def after(*_: Any) -> None:
        if begun[0] <= TAPED:
            updates[-1].moments = owned(engine, mesh, "exp_avg", 1.0)
            updates[-1].weights = owned(engine, mesh, "weight", 1.0)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _weights(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    """Return a dict: name -> weight or router's selection bias, which is zero outside the part that this rank owns (see `owned`)."""
    biases = {name: bias_E.to(_CPU, copy=True) for name, bias_E in extra_owned(engine.module, engine.layouts, mesh)}
    return owned(engine, mesh, "weight", 1.0) | biases


# --- on forked ranks --------------------------------------------------------------------------------------------------------


def run_world(
    chosen: list[Case], world: int, *, taped: bool = False, inside: Inside = nullcontext, timeout_s: float | None = None
) -> Iterator[tuple[Case, Ran]]:
    """Run cases of `world` ranks. Yield (case, its result) when a case has ended. If its ranks fail, the result is the text of their
    errors, and new processes run the other cases. taped: also record the first steps. inside: makes the context manager in
    which every rank runs a case. timeout_s: limit for a case of up to four ranks (eight ranks have twice this time); None: LIMIT_S."""
    for case, parts in on_forks(partial(_forked, taped=taped, inside=inside), chosen, world, timeout_s=timeout_s):
        yield case, parts if isinstance(parts, str) else gathered(parts)


def on_forks(
    function: Callable[[int, list[Case]], Iterator[Any]], chosen: list[Case], world: int, *, timeout_s: float | None = None
) -> Iterator[tuple[Case, list[Any] | str]]:
    """Run function(rank, cases), which yields a result for each case, on `world` ranks. Yield (case, results of all ranks, or the text of
    their errors)."""
    left, loaded = list(chosen), {ENGINES[PLAIN].load}
    limit = limit_of(world, timeout_s)
    while left:
        left[0].engine.load()  # imported before ranks are forked, and only if a case needs it
        loaded.add(left[0].engine.load)
        ready, done = few_meshes(takewhile(lambda case: case.engine.load in loaded, left)), 0
        try:
            for parts in each_on_ranks(function, world, ready, timeout_s=limit):
                yield left[done], parts
                done += 1
        except RuntimeError as error:
            if done == len(ready):
                raise
            yield left[done], str(error)
            done += 1
        left = left[done:]


def _forked(rank: int, chosen: list[Case], taped: bool, inside: Inside) -> Iterator[dict[str, Any]]:
    """Bind this process to one core, and yield this rank's results of the cases, as `ran_by` does."""
    on_one_core(rank)
    yield from ran_by(rank, chosen, taped, inside)


def on_one_core(rank: int) -> None:
    """Bind all threads of this rank to one core. Otherwise gloo's thread would spin on another core while a thread of the rank holds a
    lock. On two cores, this took a third of the processor time."""
    if sys.platform.startswith("linux"):
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):  # includes gloo's threads, which have already been started
            os.sched_setaffinity(int(thread), {cores[rank % len(cores)]})


def limit_of(world: int, timeout_s: float | None) -> float:
    """Return the seconds that a case of `world` ranks may take."""
    return (LIMIT_S if timeout_s is None else timeout_s) * max(1, world // 4)


def few_meshes(cases: Iterable[Case]) -> list[Case]:
    """Return the first cases in `cases`, as many as one set of processes may run: together they need at most MESHES / ranks different
    meshes. Return at least one case."""
    found: list[Case] = []
    meshes: set[Degrees] = set()
    for case in cases:
        meshes.add(case.run().mesh_degrees())
        if len(meshes) > max(1, MESHES // case.world):
            break
        found.append(case)
    return found


def ran_by(
    rank: int, chosen: list[Case], taped: bool, inside: Inside = nullcontext, *, device: torch.device = _CPU
) -> Iterator[dict[str, Any]]:
    """Yield this rank's result of each case, and its tape (the recorded outputs of its modules) if `taped`, as values that processes can
    exchange."""
    meshes: dict[Degrees, Mesh] = {}  # reused by all cases, because a mesh's process groups are never closed
    for case in chosen:
        tape = Tape.of(case) if taped else None
        with inside():
            try:
                found = asdict(compute(case, rank=rank, meshes=meshes, tape=tape, device=device))
            except Exception as error:
                error.add_note("" if tape is None else LAST + tape.last)
                raise
        yield {"result": found, "tape": None if tape is None else plain(tape)}


def gathered(parts: list[dict[str, Any]]) -> tuple[Result, Tape | None]:
    """Return (result, tape or None) of a case. parts: for each rank, the value that `ran_by` yielded. Sums tensors over ranks, because each
    is zero outside the rank's part, and merges tapes."""
    first = parts[0]["result"]
    for part in parts[1:]:
        for what in ("gradients", "weights"):
            for name, tensor in part["result"][what].items():
                first[what][name] = first[what][name] + tensor if name in first[what] else tensor
    tapes = [part["tape"] for part in parts]
    return Result(**first), None if tapes[0] is None else of_ranks(tapes)
