"""Measures the step time of each kind of data parallelism: two processes with one thread each, a dense Transformer of 3M parameters.

    torch        torch's DistributedDataParallel around the same model, as in its tutorial: clip_grad_norm_, AdamW
    ours         the trainer's step with this kind in the recipe
    deepspeed    for kinds that use DeepSpeed: its engine alone with the same configuration, and its own clipping

The three take their steps in turn, on the same tokens and from the same first weights, so their losses must agree. Ratios are of times in
the same round; the table has their median. Each kind runs in new processes. `python -m tests.measured kinds --rounds 15 --json FILE`.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe.bench.timing import ratio
from moe.bench.training.sharded import ShardedKind, adamw_of, kinds_of, load_engines, start, tokens_of
from moe.bench.training.step import Step, deepspeed_step, timed_steps, torch_step
from moe.calibrate.own_step import CPU, Training
from moe.launch import exit_codes
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.recipe.sections import Sharding
from moe.records.results import write_json
from parallel.process.fork import run_on_ranks

BATCH, LENGTH = 8, 128
ALLOWED = 1.03  # largest allowed ratio of our step time to the step time of DeepSpeed's engine alone
AGREE = 1e-3  # largest allowed relative difference of the losses in the last round, up to which rounding errors grow


def recipe(kind: ShardedKind, ranks: int) -> dict[str, Any]:
    """Return a recipe (section -> key -> value) with this kind of data parallelism."""
    return {
        "model": {"num_layers": 4, "d_model": 256, "num_heads": 4, "d_ff": 1024, "max_length": LENGTH},
        "sharding": kind.sharding,
        "degrees": {"dp": ranks},
        "optimizer": {"lr": 0.001, "warmup_steps": 0},
        "train": {"global_batch": ranks * BATCH, "eval_sequences": ranks},
    }


def measure(rank: int, ranks: int, kind: ShardedKind, rounds: int, folder: str) -> dict[str, Any]:
    """Train on this rank. Return `seconds` of each round and `losses` of each step, by "torch", "ours" and, for some kinds, "deepspeed"."""
    started = start(kind, recipe(kind.with_path(folder), ranks), rank, ranks)
    model = DistributedDataParallel(_whole_model(started))
    optimizer = adamw_of(started.run, ((name.removeprefix("module."), p) for name, p in model.named_parameters()))
    steps: dict[str, Step] = {
        "torch": torch_step(model, optimizer, started.run.optimizer.clip_norm, lambda number: _loss(model, rank, number)),
        "ours": lambda number: started.step(_tokens(rank, number), step=number).loss,
    }
    if kind.by_deepspeed:
        steps["deepspeed"] = _deepspeed(started, rank)
    seconds, losses = timed_steps(steps, rounds)
    return {"seconds": seconds, "losses": losses}


def _tokens(rank: int, number: int) -> Tensor:
    return tokens_of(rank, sequences=BATCH, length=LENGTH, step=number)


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    tokens = _tokens(rank, number)
    loss: Tensor = model(tokens[:, :-1], Context.of(tokens[:, :-1], step=number), tokens[:, 1:]).loss
    return loss / (BATCH * LENGTH)


def _whole_model(started: Training) -> Transformer:
    return build(started.run.model_copy(update={"sharding": Sharding()}), started.mesh, device=CPU)[0]


def _deepspeed(started: Training, rank: int) -> Step:
    from parallel.data.deepspeed import start_deepspeed

    model, config = _whole_model(started), copy.deepcopy(started.engine.engine.config)  # type: ignore[attr-defined]
    config.pop("gradient_allreduce_op", None)  # without this key, DeepSpeed averages gradients
    settings = config | {"train_micro_batch_size_per_gpu": BATCH, "gradient_clipping": started.run.optimizer.clip_norm or 0.0}
    optimizer = adamw_of(started.run, model.named_parameters())
    engine, *_ = start_deepspeed(CPU).initialize(model=model, optimizer=optimizer, dist_init_required=False, config=settings)
    return deepspeed_step(engine, lambda number: _loss(engine, rank, number))


def row_of(kind: ShardedKind, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the kind's table row. found: the results of `measure`, one for each rank; times are from rank 0."""
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
    """Returns 1 if losses differ, or if our step with DeepSpeed takes over 3 % longer than DeepSpeed's engine alone."""
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
        cells = f"{1000 * row['seconds']:>10.1f}{row['over_torch']:>16.3f}{plain:>22}{row['losses_apart']:>14.1e}"
        print(f"{kind.name:<10}{cells}{'' if row['passed'] else '  FAIL'}", flush=True)
    if json:
        write_json(json, verb="bench kinds", rows=rows, rounds=rounds, allowed=ALLOWED)
    return exit_codes.of(all(row["passed"] for row in rows))
