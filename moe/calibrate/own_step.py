"""Seconds of this project's own training step, on running ranks: model, engine, batch and update as in the trainer.

    in_turn(rank, ranks, recipes)     recipes' values -> for each the median step of the slowest rank

No data is read and nothing is recorded: tokens are random, the same on all ranks of a replica.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.parallelize.build import build
from moe.parallelize.engines import prepare
from moe.parallelize.sequence import shard_of
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import Executor, start_executor
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.process import World

CPU = torch.device("cpu")
STEPS = 9
WARM_UP = 4  # steps until the process has all its memory: before, pages are cleared at their first touch


@dataclass(frozen=True)
class Trained:
    """A recipe trained on running ranks."""

    run: Run
    mesh: Mesh
    shard: TokenShard
    executor: Executor

    @staticmethod
    def start(values: dict[str, Any], world: World) -> Trained:
        run = check_run(build_run(values), world.size)
        mesh = process.connect(run.mesh_degrees(), world)
        prepare(run, lambda _: None)
        model, layouts = build(run, mesh, device=CPU)
        return Trained(run, mesh, shard_of(run, mesh, run.train.global_batch), start_executor(run, model, layouts, mesh))

    def step(self, number: int) -> None:
        take_step(self.run, self.mesh, self.executor, self.shard, tokens_of(self.shard, self.run.vocab_size, number), number)


def in_turn(rank: int, ranks: int, recipes: list[dict[str, Any]], *, alone: bool = False) -> list[float]:
    """Return the median of STEPS steps of each recipe after WARM_UP, maximum over ranks. Recipes take turns, so that a change of the
    machine's speed affects all alike.

    `alone`: each rank trains by itself, at the same time as the others, and its seconds are CPU time.
    """
    clock = time.process_time if alone else time.perf_counter
    trained = [Trained.start(values, World() if alone else World(rank, ranks, rank, ranks)) for values in recipes]
    seconds: list[list[float]] = [[] for _ in trained]
    for number in range(WARM_UP + STEPS):
        for one, of in zip(trained, seconds, strict=True):
            if ranks > 1:
                dist.barrier()
            began = clock()
            one.step(number)
            of.append(clock() - began)
    found = torch.tensor([median(of[WARM_UP:]) for of in seconds], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def take_step(run: Run, mesh: Mesh, executor: Executor, shard: TokenShard, batch: Tensor, step: int) -> None:
    """Compute gradients and update. Collective."""
    numbers = accumulate(executor, batch, shard=shard, microbatches=run.pipeline.microbatches, seed=0, step=step)
    world, scale = mesh.axis("world"), LossScale.of("none")
    finish(executor.engine, numbers, world=world, scale=scale, lr=1e-3, clip_norm=1.0, device=CPU)


def tokens_of(shard: TokenShard, vocab: int, step: int) -> Tensor:
    """Return the rank's part of a batch of random tokens."""
    generator = torch.Generator().manual_seed(step)
    part: Tensor = shard.of_batch(torch.randint(vocab, (shard.num_sequences, shard.length + 1), generator=generator))
    return part
