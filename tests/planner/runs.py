"""Predicted bytes compared with this project's own trainer: a small recipe with each kind of data parallelism, counting every live tensor.

Each case runs two steps on gloo ranks of this machine and takes the peak of the second step, which includes moments
(tests/counted/alive.py). The prediction is made by moe/plan/memory/memory.py for the recipe's network and plan and the same rank, without
the memory of allocator and context, which is not counted either. With experts on several ranks, the busiest rank is compared, and the
prediction counts its share of the second step's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe.bench.training.sharded import kind_of, load_engines, tokens_of
from moe.calibrate.own_step import CPU
from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.parallelize.build import build
from moe.parallelize.engines import prepare
from moe.plan.choose.recipe_of import with_values
from moe.plan.job.of_recipe import network_of, plan_of
from moe.plan.memory.memory import memory
from moe.plan.memory.stack import OURS_ON_CPU
from moe.recipe.load import build_run
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import start_executor
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.process import World
from tests.counted.alive import Alive
from tests.planner.steps import busiest_of

WITHIN = 0.10
RANKS = 2
MODEL = {"num_layers": 4, "d_model": 192, "num_heads": 6, "d_ff": 768, "max_length": 160, "vocab_size": 1024, "ffn": "swiglu"}
EXPERTS = {"experts": {"num_experts": 4}, "router": {"preset": "switch", "capacity_factor": None}}
CASES: dict[str, dict[str, Any]] = {
    "ddp": {"degrees": {"dp": 2}},
    "fsdp": {"degrees": {"dp": 2}, "sharding": {"kind": "fsdp"}},
    "zero1": {"degrees": {"dp": 2}, "sharding": {"kind": "zero", "stage": 1}},
    "zero2": {"degrees": {"dp": 2}, "sharding": {"kind": "zero", "stage": 2}},
    "zero3": {"degrees": {"dp": 2}, "sharding": {"kind": "zero", "stage": 3}},
    "tp 2": {"degrees": {"dp": 1, "tp": 2}},
    "pp 2": {"degrees": {"dp": 1, "pp": 2}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
    "ep 2": {"degrees": {"dp": 2, "ep": 2}, "model": {"moe_every": 2}, **EXPERTS},
    "ep 2 skewed": {
        **{"degrees": {"dp": 2, "ep": 2}, "model": {"moe_every": 1}, **EXPERTS},
        **{"router": {"capacity_factor": None, "select": "tests.planner.runs:skewed"}},
    },
    "freeze": {
        **{"degrees": {"dp": 2, "ep": 2}, "model": {"moe_every": 2, "tied_embeddings": False}, **EXPERTS},
        **{"train": {"freeze": ["embedding", "experts", "layers.0"]}},
    },
    "frozen stage": {
        **{"degrees": {"dp": 1, "pp": 2}, "model": {"tied_embeddings": False}, "pipeline": {"schedule": "1f1b", "microbatches": 4}},
        **{"train": {"freeze": ["embedding", "layers.0"]}},
    },
    "lora": {"degrees": {"dp": 2}, "lora": {"rank": 4}},
    "lora ep 2": {
        **{"degrees": {"dp": 2, "ep": 2}, "model": {"moe_every": 1}, **EXPERTS, "experts": {"num_experts": 16}},
        **{"lora": {"rank": 4, "targets": ["attention", "experts"]}, "recompute": {"kind": "full"}},
    },
    "lora tp 2": {"degrees": {"dp": 1, "tp": 2}, "lora": {"rank": 8, "targets": ["attention", "dense"]}},
    "lora pp 2": {"degrees": {"dp": 1, "pp": 2}, "lora": {"rank": 8}, "pipeline": {"schedule": "zb_h1", "microbatches": 4}},
    "lora 157M": {
        **{"degrees": {"dp": 1}, "lora": {"rank": 8}, "train": {"global_batch": 4, "eval_sequences": 4}},
        "model": {"num_layers": 14, "d_model": 768, "num_heads": 12, "d_ff": 2304, "vocab_size": 32768, "tied_embeddings": False},
    },
}
ALONE = ("lora 157M",)  # cases on one rank, in fp32 alone: without instructions for bf16 a step takes minutes


def recipe(case: str, precision: str) -> dict[str, Any]:
    values = CASES[case]
    model = MODEL | values.get("model", {})
    train = {"global_batch": 16, "eval_sequences": 16} | values.get("train", {})
    return values | {"model": model, "train": train, "precision": {"compute": precision}, "optimizer": {"warmup_steps": 0}}


def skewed(preferred_TE: Tensor, num_choices: int) -> Tensor:
    """Return the expert of each token, [T, 1] int64. About four of five tokens go to the first two experts, which rank 0 holds."""
    uniform_T1 = 1000 * preferred_TE[:, :1] % 1
    return torch.bucketize(uniform_T1, torch.tensor([0.4, 0.8, 0.9]))


def measure(rank: int, ranks: int, case: str, precision: str) -> dict[str, Any]:
    """Return a row with this rank's peak bytes in the second step and the predicted bytes."""
    run = check_run(build_run(recipe(case, precision)), ranks)
    mesh = process.connect(run.mesh_degrees(), World(rank, ranks))
    prepare(run, lambda _: None)
    shard_shape = (run.train.global_batch // mesh.axis("dp").size, run.model.max_length + 1)
    batches = [tokens_of(rank, sequences=shard_shape[0], length=run.model.max_length, step=step) for step in range(2)]
    with Alive(batches) as alive:
        model, layouts = build(run, mesh, device=CPU)
        executor = start_executor(run, model, layouts, mesh)
        for step, batch in enumerate(batches):
            shard, alive.most = TokenShard.holding(mesh, batch.shape), alive.now
            numbers = accumulate(executor, batch, shard=shard, microbatches=run.pipeline.microbatches, seed=0, step=step)
            scale = LossScale.of("none")
            finish(executor.engine, numbers, world=mesh.axis("world"), scale=scale, lr=1e-3, clip_norm=1.0, device=CPU)
        measured = alive.most
    busiest = busiest_of(numbers, mesh.axis("ep"), one_layer=run.recompute.kind == "full")
    run = with_values(run.resolve(ranks), {"dispatch.busiest": max(1.0, busiest)})
    said = memory(network_of(run), plan_of(run), OURS_ON_CPU)[mesh.axis("pp").index]
    row = {"case": case, "precision": precision, "busiest": busiest}
    return row | {"measured_bytes": measured, "predicted_bytes": said.allocated, "parts": said.parts}


def rows(only: str | None = None) -> list[dict[str, Any]]:
    """Print and return a row for each case, of the rank with the largest error."""
    torch.set_num_threads(1)
    chosen = [case for case in CASES if only is None or only in case]
    load_engines([kind_of(case) for case in chosen if case in ("fsdp", "zero1", "zero2", "zero3")])
    print(f"{'case':<12}{'precision':>10}{'busiest':>9}{'measured':>15}{'predicted':>15}{'error':>9}")
    found = []
    for case in chosen:
        for precision in ("fp32",) if case in ALONE else ("fp32", "bf16"):
            count = 1 if case in ALONE else RANKS
            ranks = run_on_ranks(measure, count, count, case, precision, timeout_s=300)
            row = max(ranks, key=lambda r: (r["busiest"], abs(r["predicted_bytes"] / r["measured_bytes"] - 1)))
            row["error"] = row["predicted_bytes"] / row["measured_bytes"] - 1
            row["passed"] = abs(row["error"]) <= WITHIN
            sizes = f"{row['measured_bytes']:>15,}{row['predicted_bytes']:>15,.0f}"
            print(
                f"{case:<12}{precision:>10}{row['busiest']:>9.2f}{sizes}{row['error']:>9.2%}{'' if row['passed'] else '  FAIL'}", flush=True
            )
            found.append(row)
    return found
