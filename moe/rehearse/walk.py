"""Runs build, two steps and a save of one rank, by the trainer's own code, without computing anything.

    connect -> build -> engine, executor          parameters
    step 0                                        gradients; the optimizer's moments are allocated
    step 1                                        like every later step: its collectives are counted, its peak is the run's
    save                                          each owned tensor gathered and taken to the host; nothing is written

Tokens are zeros in the recipe's shapes, routing is balanced, and every other rank is assumed to be like this one (parallel/rehearse/).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moe.data import Dataset
from moe.data.token_shard import TokenShard
from moe.parallelize.sequence import shard_of
from moe.plan.pipeline import continuous
from moe.recipe.sections import Run
from moe.records.metrics import Records
from moe.records.progress import open_progress
from moe.train.loop.advance import advance
from moe.train.parts.rebalance import Rebalancer
from moe.train.start import state
from moe.train.start.job import Batches, Job, Output, Saves, Training
from moe.train.start.opening import start_model
from moe.train.start.place import check_precision, settle_precision
from parallel.data.engine import Engine
from parallel.mesh.traffic import Count
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World
from parallel.rehearse.ledger import Ledger
from parallel.rehearse.pretended import Pretended
from parallel.rehearse.stage import rehearsal
from parallel.store import checkpoint
from parallel.store.saver import Saver


@dataclass(frozen=True)
class Walked:
    """Memory and messages of a rank. Bytes are on this rank's device: `held` by kind at the peak of a step; `saved_bytes` of its part of a
    checkpoint. `counts`: of one step."""

    rank: int
    world: int
    device: str
    build_s: float
    step_s: float
    save_s: float
    built_bytes: int
    peak_bytes: int
    held: dict[str, int]
    counts: dict[tuple[str, str], Count]
    saved_bytes: int
    parameters: dict[str, tuple[int, ...]]


class _Zeros:
    """Training sequences of nothing but token 0."""

    def batch(self, step: int, shard: TokenShard) -> npt.NDArray[np.int64]:
        return np.zeros(shard.shape, np.int64)


def walk(run: Run, world: World, *, steps: int = 2) -> Walked:
    """Rehearse a checked run of the world's size, and return the last step's figures. If a pipeline is not drained between batches, a step
    is as many batches as it has ranks, at least 2.

    Raises BadInput as the run itself would, and RehearsalError for a contradiction.
    """
    run = run.model_copy(update={"train": run.train.model_copy(update={"compile": False})})  # nothing is computed, compiled or not
    if continuous(run):
        run = run.model_copy(update={"pipeline": run.pipeline.model_copy(update={"drain_every": max(2, int(run.degrees.pp))})})
    with rehearsal(world) as pretended:
        return _walk(run, world, pretended, steps)


def open_job(run: Run, world: World) -> Job:
    """Return a job as the trainer opens it, with zero tokens and no folder. Collective."""
    run = settle_precision(run, world)
    check_precision(run, world)
    mesh = process.connect(run.mesh_degrees(), world)
    executor = start_model(run, mesh, world)
    return Job(
        run=run,
        name="rehearsal",
        out=Path(),
        world=world,
        mesh=mesh,
        training=Training(executor, LossScale.of(run.precision.loss_scale), Rebalancer(run, executor.engine, mesh)),
        batches=Batches(cast(Dataset, _Data()), shard_of(run, mesh, run.train.global_batch)),
        output=Output(Records(None), open_progress(run.train.steps, recipe="", kind="none")),
        saves=Saves(Saver(Path(), mesh.axis("world"), keep=1)),
    )


def take_step(job: Job) -> None:
    """Make the next step, or the next few of a pipeline that is not drained. Only their collectives are counted. Collective."""
    job.mesh.communicator.reset_counts()
    made = advance(job, lambda: False)
    job.counters.step += len(made)
    job.counters.updates += len(made)


def _walk(run: Run, world: World, pretended: Pretended, steps: int) -> Walked:
    ledger, started = pretended.ledger, time.perf_counter()
    job = open_job(run, world)
    engine, built_s = job.engine, time.perf_counter() - started
    ledger.name("parameters", (local(parameter) for parameter in engine.module.parameters()))
    built, built_at = ledger.now, ledger.mark()
    with mock.patch.object(engine, "step", _naming(engine, ledger, built_at)):
        for _ in range(steps):
            started = time.perf_counter()
            ledger.begin()
            take_step(job)
    step_s, counts = time.perf_counter() - started, job.mesh.communicator.counts()
    held, most = ledger.at_peak(), ledger.most
    started, saved = time.perf_counter(), 0
    for tensors in checkpoint.in_files(state.held(engine, job.mesh)):
        saved += sum(tensor.nbytes for _, tensor in tensors)
    return Walked(
        rank=world.rank,
        world=world.size,
        device=str(world.device),
        build_s=built_s,
        step_s=step_s,
        save_s=time.perf_counter() - started,
        built_bytes=built,
        peak_bytes=most,
        held=held,
        counts=counts,
        saved_bytes=saved,
        parameters={name: tuple(local(p).shape) for name, p in engine.module.named_parameters()},
    )


@dataclass(frozen=True)
class _Data:
    train: _Zeros = _Zeros()


def _naming(engine: Engine, ledger: Ledger, built: int) -> Callable[[float], None]:
    """Return the engine's step, with names for gradients before it and for optimizer states after it."""
    step = engine.step

    def named(lr: float) -> None:
        ledger.name("gradients", _gradients(engine))
        ledger.name_alive("optimizer", before=built)  # tensors made by the engine with the model, and outside parameters and gradients
        now = ledger.mark()
        step(lr)
        ledger.name_alive("optimizer", since=now)

    return named


def _gradients(engine: Engine) -> Iterator[Tensor]:
    yield from (gradient for _, gradient in engine.owned_gradients())
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield local(parameter.grad)


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor that torch's FSDP has cut; other tensors unchanged."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found
