"""Runs training steps on ranks and measures their seconds. Model, engine, executor and optimizer update are those of `moe train`, but no
data is read and nothing is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.parallelize.build import build
from moe.parallelize.engines import prepare
from moe.parallelize.sequence import shard_of
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import Executor, Single, start_executor
from moe.train.parts.numbers import Numbers
from parallel.data.engine import Engine
from parallel.mesh.layout import Layout
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process import process

CPU = torch.device("cpu")
STEPS = 9  # number of timed steps
WARM_UP = 4  # number of untimed steps before the timed ones, because memory is slower at its first use
Peer = Callable[[Run, Transformer, dict[str, Layout]], Engine]  # puts a model into another system's engine


@dataclass(frozen=True)
class Training:
    """One rank of a recipe's training run. The executor has the engine, which has the model. layouts: parameter name -> its sharding."""

    run: Run
    mesh: Mesh
    model: Transformer
    layouts: dict[str, Layout]
    executor: Executor

    @staticmethod
    def start(values: dict[str, Any], world: process.World, *, peer: Peer | None = None) -> Training:
        """Start the run of a recipe (section -> key -> value). peer: makes another system's engine; None: this project's. Collective."""
        run = check_run(build_run(values), world.size)
        mesh = process.connect(run.mesh_degrees(), world)
        prepare(run, print)
        model, layouts = build(run, mesh, device=CPU)
        executor = start_executor(run, model, layouts, mesh) if peer is None else Single(peer(run, model, layouts))
        return Training(run, mesh, model, layouts, executor)

    @property
    def engine(self) -> Engine:
        return self.executor.engine

    @cached_property
    def shard(self) -> TokenShard:
        """The sequences and positions of the recipe's batch that this rank reads. Cached, so that timed steps do not make it again."""
        return shard_of(self.run, self.mesh, self.run.train.global_batch)

    def accumulate(self, tokens: Tensor, *, step: int, microbatches: int = 1, shard: TokenShard | None = None) -> Numbers:
        """Run this rank's tokens forward and backward. tokens: [sequences, length + 1]. shard: which sequences and positions of the batch
        `tokens` has; None: all ranks have tensors of this shape, and sp ranks have consecutive positions. Collective."""
        shard = shard or TokenShard.holding(self.mesh, tokens.shape)
        return accumulate(self.executor, tokens, shard=shard, microbatches=microbatches, seed=0, step=step)

    def step(self, tokens: Tensor, *, step: int, microbatches: int = 1, shard: TokenShard | None = None) -> Numbers:
        """Take training step number `step`: `accumulate` with these arguments, then the optimizer's update. Collective."""
        numbers, o = self.accumulate(tokens, step=step, microbatches=microbatches, shard=shard), self.run.optimizer
        world, scale = self.mesh.axis("world"), LossScale.of("none")
        finish(self.engine, numbers, world=world, scale=scale, lr=o.lr, clip_norm=o.clip_norm, device=CPU)
        return numbers

    def random_step(self, number: int) -> Numbers:
        """Take training step `number` on the recipe's batch of random tokens. Collective."""
        shard = self.shard
        shape, generator = (shard.num_sequences, shard.length + 1), torch.Generator().manual_seed(number)
        batch = shard.of_batch(torch.randint(self.run.vocab_size, shape, generator=generator))
        return self.step(batch, step=number, microbatches=self.run.pipeline.microbatches, shard=shard)


def in_turn(rank: int, ranks: int, recipes: list[dict[str, Any]], alone: bool = False) -> list[float]:
    """Return for each recipe (section -> key -> value) the median seconds of a training step on the slowest rank. The recipes take their
    steps in turn, so that changes of the machine's speed affect them equally. alone: each rank trains its own models, without collectives
    in a step, and CPU seconds are measured instead of elapsed ones."""
    clock = time.process_time if alone else time.perf_counter
    runs = [
        Training.start(values, process.World(place="cpu") if alone else process.World(rank, ranks, rank, ranks, "cpu"))
        for values in recipes
    ]
    seconds: list[list[float]] = [[] for _ in runs]
    for number in range(WARM_UP + STEPS):
        for run, of in zip(runs, seconds, strict=True):
            if ranks > 1:
                dist.barrier()
            began = clock()
            run.random_step(number)
            of.append(clock() - began)
    found = torch.tensor([median(of[WARM_UP:]) for of in seconds], dtype=torch.float64)
    if ranks > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
