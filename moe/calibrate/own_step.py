"""Seconds of this project's own training step, on running ranks: model, engine, batch and update as in the trainer.

No data is read and nothing is recorded: tokens are random, the same on all ranks of a replica.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

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
WARM_UP = 4  # steps not timed: the first use of memory takes longer


@dataclass(frozen=True)
class Trained:
    """One rank's part of a training run: a recipe's model in its engine, and this rank's share of the tokens."""

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
        """Take a step with a batch of random tokens: gradients and update. Collective."""
        tokens = (self.shard.num_sequences, self.shard.length + 1)
        whole = torch.randint(self.run.vocab_size, tokens, generator=torch.Generator().manual_seed(number))
        microbatches, world, scale = self.run.pipeline.microbatches, self.mesh.axis("world"), LossScale.of("none")
        batch = self.shard.of_batch(whole)
        numbers = accumulate(self.executor, batch, shard=self.shard, microbatches=microbatches, seed=0, step=number)
        finish(self.executor.engine, numbers, world=world, scale=scale, lr=1e-3, clip_norm=1.0, device=CPU)


def in_turn(rank: int, ranks: int, recipes: list[dict[str, Any]], alone: bool = False) -> list[float]:
    """Return for each recipe (a dict of values) the slowest rank's median seconds of a step. Recipes take turns step by step, so that a
    change of the machine's speed affects all alike. alone: each rank trains a model of its own, and seconds are CPU time.
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
