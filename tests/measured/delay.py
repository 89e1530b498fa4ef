"""Measures how gradients at older weights change the loss: PipeDream, 2BW, and the same age on all stages (vertical sync).

Tiny models of eight layers are trained on the source text of Python's standard library. All variants have the same first weights, batches
and learning rates. One process simulates the pipeline: gradients are computed at the weights of `age` updates ago, and update the newest
weights. The pipeline runtime computes the same (tests/moe/train/loop/test_stream.py). Gradients are not clipped, because a PipeDream stage
does not know the gradient norm of the whole model when it updates.

    PipeDream of p stages   age p - 1 - s on stage s        vertical sync   age p - 1 on all stages        2BW   age 1

`python -m tests.measured delay --json FILE`.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from moe.checks.together import check_run
from moe.data import open_data
from moe.data.token_shard import TokenShard
from moe.model.transformer import Transformer
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.parallelize.stages import parts_of, stages_with
from moe.plan.pipeline import schedule_of
from moe.recipe.sections import Run
from moe.records.results import write_json
from moe.train.loop.step import accumulate, finish, validation_loss
from moe.train.parts.executor import Single
from moe.train.parts.learning_rate import learning_rate
from parallel.errors import BadInput
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World

CPU = torch.device("cpu")
Ages = Callable[[int], int]  # stage -> age, in updates, of the weights at which its gradients are computed
VARIANTS: dict[str, tuple[int, Ages]] = {  # variant -> (number of stages, ages)
    "none": (1, lambda stage: 0),
    "two_bw": (8, lambda stage: 1),
    "pipedream, 4 stages": (4, lambda stage: 3 - stage),
    "pipedream, 8 stages": (8, lambda stage: 7 - stage),
    "pipedream, 8 stages, vertical sync": (8, lambda stage: 7),
}
MODELS = ("dense", "sparse")


def values_of(model: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the recipe of a tiny model with eight layers. model: dense or sparse."""
    sizes = {"num_layers": 8, "d_model": 64, "num_heads": 2, "d_ff": 256, "ffn": "relu", "norm": "layernorm", "max_length": 128}
    values: dict[str, Any] = {
        "model": sizes | {"tied_embeddings": False, "init_scale": 0.1, "moe_every": 4 if model == "sparse" else 0},
        "optimizer": {"lr": 0.003, "warmup_steps": 30, "clip_norm": None},
        "train": {"steps": steps, "global_batch": 8, "eval_sequences": 64, "seed": seed},
    }
    if model == "sparse":
        values |= {"experts": {"num_experts": 4}, "router": {"preset": "switch", "capacity_factor": 2.0}}
    return values


def ages_of(variant: str, values: dict[str, Any], model: Transformer) -> dict[str, int]:
    """Return name of a parameter -> age, in updates, of the weights at which its gradient is computed. Age 0 is left out."""
    stages, age = VARIANTS[variant]
    if stages == 1:
        return {}
    staged = Run(**values, degrees={"pp": stages, "dp": 1}, pipeline={"schedule": "1f1b", "microbatches": stages})
    parts = parts_of(staged, schedule_of(staged))
    found = {name: age(stages_with(model, name, parts)[0]) for name, _ in model.named_parameters()}
    return {name: of for name, of in found.items() if of}


def losses_of(variant: str, values: dict[str, Any]) -> tuple[list[float], float]:
    """Train a variant. Return (training loss of each step, validation loss after the last)."""
    run = check_run(Run(**values), 1)
    mesh = process.connect(run.mesh_degrees(), World(0, 1))
    data = open_data(run.data, max_length=run.model.max_length, vocab_size=run.vocab_size, seed=run.train.seed, log=lambda _: None)
    model, layouts = build(run, mesh, device=CPU)
    assert isinstance(model, Transformer)
    executor, scale = Single(start_engine(run, model, layouts, mesh)), LossScale.of("none")
    shard, held = (TokenShard.whole(n, run.model.max_length) for n in (run.train.global_batch, run.train.eval_sequences))
    weights, ages = dict(model.named_parameters()), ages_of(variant, values, model)
    history: deque[dict[str, Tensor]] = deque(maxlen=1 + max(ages.values(), default=0))
    losses = []
    for step in range(run.train.steps):
        history.append({name: weights[name].detach().clone() for name in ages})
        _put(weights, {name: history[max(0, len(history) - 1 - age)][name] for name, age in ages.items()})
        sequences = torch.from_numpy(data.train.batch(step, shard))
        numbers = accumulate(executor, sequences, shard=shard, microbatches=1, seed=run.train.seed, step=step)
        _put(weights, history[-1])
        rate = learning_rate(step, run.optimizer, total=run.train.steps)
        finish(executor.engine, numbers, world=mesh.axis("world"), scale=scale, lr=rate, clip_norm=None, device=CPU)
        losses.append(numbers.loss)
    sequences = torch.from_numpy(data.validation.held(held).sequences)
    return losses, validation_loss(executor, sequences, shard=held, at_once=16)


def _put(weights: dict[str, torch.nn.Parameter], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        weights[name].data.copy_(value)


Job = tuple[str, str, int]  # model, variant, seed


def _some(rank: int, ranks: int, jobs: list[Job], steps: int) -> list[tuple[list[float], float]]:
    return [losses_of(variant, values_of(model, seed, steps)) for model, variant, seed in jobs[rank::ranks]]


def rows_of(models: list[str], steps: int, seeds: int, *, at_once: int = 2) -> list[dict[str, Any]]:
    """Train every variant with every seed. Return a table row for each model, variant and seed. at_once: trainings at the same time."""
    jobs: list[Job] = list(product(models, VARIANTS, range(seeds)))
    found = run_on_ranks(_some, at_once, at_once, jobs, steps, timeout_s=1800)
    rows = []
    for number, (model, variant, seed) in enumerate(jobs):
        losses, loss = found[number % at_once][number // at_once]
        rows.append(
            {"what": "delay", "model": model, "variant": variant, "seed": seed, "steps": steps, "validation_loss": loss}
            | {"training_loss": statistics.mean(losses[-20:])}
        )
    plain = {(row["model"], row["seed"]): row["validation_loss"] for row in rows if row["variant"] == "none"}
    return [row | {"over_none": row["validation_loss"] - plain[row["model"], row["seed"]]} for row in rows]


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{'model':<8}{'weights older':<36}{'validation loss':>16}{'over none, by seed':>32}"
    for model, variant in dict.fromkeys((row["model"], row["variant"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["variant"]) == (model, variant)]
        each = " ".join(f"{row['over_none']:+.4f}" for row in mine)
        yield f"{model:<8}{variant:<36}{statistics.mean(row['validation_loss'] for row in mine):>16.4f}{each:>32}"


def main(*, steps: int = 250, seeds: int = 3, only: str | None = None, json: str | None = None) -> int:
    """`python -m tests.measured delay`. Returns 1 if a loss is not finite."""
    if only not in (None, *MODELS):
        raise BadInput("--only", got=only, needed=f"one of {', '.join(MODELS)}", fix=f"--only {MODELS[0]}")
    torch.set_num_threads(1)
    rows = rows_of([only] if only else list(MODELS), steps, seeds)
    for line in _table(rows):
        print(line, flush=True)
    if json:
        write_json(json, verb="bench delay", rows=rows, steps=steps, seeds=seeds)
    return 0 if all(row["validation_loss"] < float("inf") for row in rows) else 1
