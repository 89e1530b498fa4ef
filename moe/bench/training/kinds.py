"""Step time of each kind of data parallelism: two processes, one thread each, a dense Transformer of 3M parameters.

    torch        torch's DistributedDataParallel around the same model, used plainly: clip_grad_norm_, AdamW
    ours         the kind through the recipe, with the trainer's own step
    deepspeed    for DeepSpeed's kinds: its engine with the same configuration, used as its documentation says, with its own clipping

The three step in turn, round by round, on the same tokens from the same weights, so their losses must agree too. A ratio of times is the
median over rounds. Each kind runs in its own processes. `moe bench kinds --rounds 15 --json FILE`.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe.bench.timing import in_turn, ratio
from moe.bench.training.sharded import CPU, ShardedKind, Started, kinds_of, load_engines, start, tokens_of
from moe.launch import exit_codes
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.parallelize.engines import optimizer_of
from moe.recipe.sections import Run, Sharding
from moe.records.results import write_json
from moe.train.loop.step import finish
from parallel.mesh.mesh import Mesh
from parallel.numerics.precision import LossScale
from parallel.process.fork import run_on_ranks

BATCH, LENGTH = 8, 128
ALLOWED = 1.03  # relative to plain DeepSpeed's time
AGREE = 1e-3  # relative difference of losses after all rounds: rounding errors grow from step to step
Step = Callable[[int], float]  # step number -> loss on this rank


def recipe(kind: ShardedKind, ranks: int) -> dict[str, Any]:
    """Recipe values of the model, with this kind of data parallelism."""
    return {
        "model": {"num_layers": 4, "d_model": 256, "num_heads": 4, "d_ff": 1024, "max_length": LENGTH},
        "sharding": kind.sharding,
        "degrees": {"dp": ranks},
        "optimizer": {"lr": 0.001, "warmup_steps": 0},
        "train": {"global_batch": ranks * BATCH, "eval_sequences": ranks},
    }


def ours(started: Started, rank: int) -> Step:
    """A step of the trainer."""
    o, world = started.run.optimizer, started.mesh.axis("world")

    def step(number: int) -> float:
        batch = tokens_of(rank, sequences=BATCH, length=LENGTH, step=number)
        numbers = started.accumulate(batch, step=number)
        finish(started.engine, numbers, world=world, scale=LossScale.of("none"), lr=o.lr, clip_norm=o.clip_norm, device=CPU)
        return numbers.loss

    return step


def _model(run: Run, mesh: Mesh) -> Transformer:
    """The model as DDP needs it: whole on every rank."""
    return build(run.model_copy(update={"sharding": Sharding()}), mesh, device=CPU)[0]


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    tokens = tokens_of(rank, sequences=BATCH, length=LENGTH, step=number)
    loss: Tensor = model(tokens[:, :-1], Context.of(tokens[:, :-1], step=number), tokens[:, 1:]).loss
    return loss / (BATCH * LENGTH)


def plain_torch(started: Started, rank: int) -> Step:
    """A step of torch DDP, as in its tutorial."""
    run = started.run
    model = DistributedDataParallel(_model(run, started.mesh))
    adamw = optimizer_of(run.optimizer)
    optimizer = adamw.build(adamw.groups((name.removeprefix("module."), p) for name, p in model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] = run.optimizer.lr

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = _loss(model, rank, number)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.optimizer.clip_norm or math.inf)
        optimizer.step()
        return float(loss.detach())

    return step


def plain_deepspeed(started: Started, rank: int) -> Step:
    """A step of DeepSpeed's engine, with the configuration that this project gives it, and its own clipping."""
    from parallel.data.deepspeed import start_deepspeed

    run = started.run
    config = copy.deepcopy(started.engine.engine.config)  # type: ignore[attr-defined]
    model, adamw = _model(run, started.mesh), optimizer_of(run.optimizer)
    optimizer = adamw.build(adamw.groups(model.named_parameters()))
    for group in optimizer.param_groups:
        group["lr"] = run.optimizer.lr
    config.pop("gradient_allreduce_op", None)  # DeepSpeed alone averages and clips gradients itself
    settings = config | {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": run.optimizer.clip_norm or 0.0}
    engine, *_ = start_deepspeed().initialize(model=model, optimizer=optimizer, dist_init_required=False, config=settings)

    def step(number: int) -> float:
        loss = _loss(engine, rank, number)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def measure(rank: int, ranks: int, kind: ShardedKind, rounds: int, folder: str) -> dict[str, Any]:
    """Seconds of each round and losses of each step on this rank, by implementation."""
    started = start(kind, recipe(kind.with_path(folder), ranks), rank, ranks)
    steps: dict[str, Step] = {"torch": plain_torch(started, rank), "ours": ours(started, rank)}
    if kind.by_deepspeed:
        steps["deepspeed"] = plain_deepspeed(started, rank)
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def work(name: str) -> Callable[[], None]:
        def run() -> None:
            dist.barrier()
            losses[name].append(steps[name](len(losses[name])))
            dist.barrier()

        return run

    return {"seconds": in_turn({name: work(name) for name in steps}, rounds=rounds, device=CPU), "losses": losses}


def row_of(kind: ShardedKind, found: list[dict[str, Any]]) -> dict[str, Any]:
    """One kind's row from its ranks' numbers. Times are the first rank's."""
    seconds: dict[str, list[float]] = found[0]["seconds"]
    last = {name: statistics.mean(rank["losses"][name][-1] for rank in found) for name in seconds}
    apart = max(abs(loss / last["torch"] - 1) for loss in last.values())
    row: dict[str, Any] = {"kind": kind.name, "ranks": len(found), "seconds": statistics.median(seconds["ours"])}
    row |= {"torch_seconds": statistics.median(seconds["torch"]), "over_torch": ratio(seconds["ours"], seconds["torch"])}
    row |= {"loss": last["ours"], "losses_apart": apart, "passed": apart <= AGREE}
    if "deepspeed" in seconds:
        over = ratio(seconds["ours"], seconds["deepspeed"])
        row |= {"deepspeed_seconds": statistics.median(seconds["deepspeed"]), "over_deepspeed": over}
        row["passed"] = row["passed"] and over <= ALLOWED
    return row


def main(*, kinds: str | None = None, rounds: int = 15, json: str | None = None) -> int:
    """`moe bench kinds`: returns 1 if losses differ, or if a kind of DeepSpeed's takes more than 3 % longer than its engine alone."""
    chosen = kinds_of(kinds)
    torch.set_num_threads(1)
    load_engines(chosen)
    rows: list[dict[str, Any]] = []
    print(f"{'kind':<10}{'ms a step':>10}{'over torch DDP':>16}{'over plain DeepSpeed':>22}{'losses apart':>14}")
    for kind in chosen:
        with tempfile.TemporaryDirectory() as folder:
            row = row_of(kind, run_on_ranks(measure, 2, 2, kind, rounds, folder, timeout_s=300))
        rows.append(row)
        plain = f"{row['over_deepspeed']:.3f}" if "over_deepspeed" in row else "-"
        said = "" if row["passed"] else "  FAIL"
        print(
            f"{kind.name:<10}{1000 * row['seconds']:>10.1f}{row['over_torch']:>16.3f}{plain:>22}{row['losses_apart']:>14.1e}{said}",
            flush=True,
        )
    if json:
        write_json(json, verb="bench kinds", rows=rows, rounds=rounds, allowed=ALLOWED)
    return exit_codes.of(all(row["passed"] for row in rows))
