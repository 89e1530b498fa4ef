"""Speed of a whole training step of a sparse model, compared with its peers: two processes, ep 2, one thread each.

The same Transformer three times, with different MoE layers and engines: ours; DeepSpeed's MoE with expert parallelism under its
engine; transformers' Switch block, all experts in every process, under torch DDP. Same tokens, same FLOPs per token, same
capacity factor, same optimizer and clipping. Steps run in turn, round by round; ratios are medians over rounds.
`moe bench step --peers deepspeed,transformers --json FILE`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe.checks.together import check_run
from moe.data.token_shard import TokenShard
from moe.launch import exit_codes
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.parallelize.build import build
from moe.parallelize.engines import start_engine
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.router.losses import join
from moe.train.loop.step import accumulate, finish
from moe.train.parts.executor import Single
from parallel.errors import BadInput, did_you_mean
from parallel.numerics.precision import LossScale
from parallel.process import process
from parallel.process.fork import run_on_ranks
from parallel.process.malloc import keep_freed_memory
from parallel.process.process import World

# B sequences of a rank, L length, D model

WORLD, BATCH, LENGTH, VOCABULARY, CAPACITY = 2, 8, 256, 256, 1.25
PEERS = ("deepspeed", "transformers")
Step = Callable[[int], float]  # step number -> its loss


def main(*, peers: str = "deepspeed,transformers", only: str | None = None, rounds: int = 9, json: str | None = None) -> int:
    """`moe bench step`: prints tokens per second of each; returns 1 if a loss is not finite or does not fall."""
    names = list(PEERS) if peers == "all" else [] if peers == "none" else peers.split(",")
    for name in names:
        if name not in PEERS:
            near = did_you_mean(name, list(PEERS))
            raise BadInput(
                "--peers", got=name, needed=f"all, none, or of {', '.join(PEERS)}", fix=f"did you mean {near}?" if near else "--peers all"
            )
    precisions = [p for p in ("fp32", "bf16") if only is None or only in p]
    if not precisions:
        raise BadInput("--only", got=only, needed="fp32 or bf16", fix="leave it out")
    torch.set_num_threads(1)
    keep_freed_memory()
    if "deepspeed" in names:
        from parallel.data.deepspeed import load_deepspeed

        load_deepspeed()  # once, before forking
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        found = run_on_ranks(_on_rank, WORLD, precision, names, rounds, timeout_s=900)[0]
        print(f"\n{precision}\n  {'trained by':<14} {'tokens/s':>9} {'ours over it':>13} {'first loss':>11} {'last loss':>10}")
        for name, (seconds, losses) in found.items():
            speed = statistics.median(seconds)
            faster = statistics.median(b / a for a, b in zip(found["ours"][0], seconds, strict=True))
            row = {
                "implementation": name,
                "precision": precision,
                "tokens_per_second": WORLD * BATCH * LENGTH / speed,
                "ours_over_it": faster,
            }
            row |= {"first_loss": losses[0], "last_loss": losses[-1], "passed": bool(losses[-1] < losses[0])}
            rows.append(row)
            print(f"  {name:<14} {row['tokens_per_second']:>9.0f} {faster:>13.2f} {losses[0]:>11.3f} {losses[-1]:>10.3f}", flush=True)
    if json:
        from moe.records.results import write_json

        write_json(json, verb="bench step", rows=rows, rounds=rounds, ranks=WORLD)
    return exit_codes.of(all(row["passed"] for row in rows))


def recipe(precision: str, *, ep: int) -> Run:
    """The recipe of a small Switch Transformer: 4 layers of width 256, each with 64 experts of 512 hidden units."""
    return build_run(
        {
            "model": {
                "num_layers": 4,
                "d_model": 256,
                "num_heads": 4,
                "d_ff": 512,
                "ffn": "relu",
                "norm": "layernorm",
                "max_length": LENGTH,
                "moe_every": 1,
            },
            "experts": {"num_experts": 64},
            "router": {"preset": "switch", "group": "rank", "capacity_factor": CAPACITY, "jitter": 0.0, "min_capacity": 4},
            "degrees": {"dp": WORLD, "ep": ep},
            "precision": {"compute": precision},
            "optimizer": {"lr": 0.001, "warmup_steps": 0},
            "train": {"global_batch": WORLD * BATCH},
        }
    )


def tokens_of(step: int, rank: int) -> Tensor:
    """Int64 [B, L + 1]: repeated bytes, which a small model soon predicts better than chance."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start_B1 = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride_B1 = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (start_B1 + stride_B1 * torch.arange(LENGTH + 1)) % VOCABULARY


def _on_rank(rank: int, precision: str, names: list[str], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    steps: dict[str, Step] = {"ours": ours(rank, precision)}
    if "deepspeed" in names:
        steps["deepspeed"] = deepspeed(rank, precision)
    if "transformers" in names:
        steps["transformers"] = transformers(rank, precision)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, list[float]] = {name: [] for name in steps}
    warmups = 2
    for number in range(warmups + rounds):
        for name in list(steps)[:: 1 if number % 2 == 0 else -1]:
            dist.barrier()
            started = time.perf_counter()
            loss = steps[name](number)
            dist.barrier()
            if number >= warmups:
                seconds[name].append(time.perf_counter() - started)
            losses[name].append(loss)
    return {name: (seconds[name], losses[name]) for name in steps}


def ours(rank: int, precision: str) -> Step:
    """A step of the trainer, with its metrics."""
    run = check_run(recipe(precision, ep=WORLD), WORLD)
    mesh = process.connect(run.mesh_degrees(), World(rank, WORLD))
    device = torch.device("cpu")
    model, layouts = build(run, mesh, device=device)
    executor, scale = Single(start_engine(run, model, layouts, mesh)), LossScale.of("none")

    def step(number: int) -> float:
        tokens = tokens_of(number, rank)
        numbers = accumulate(executor, tokens, shard=TokenShard.holding(mesh, tokens.shape), microbatches=1, seed=0, step=number)
        o, world = run.optimizer, mesh.axis("world")
        finish(executor.engine, numbers, world=world, scale=scale, lr=o.lr, clip_norm=o.clip_norm, device=device)
        return numbers.loss

    return step


class _Other(nn.Module):
    """Another system's layer instead of ours. Its balance loss, if it has one, joins the backward pass in the same way."""

    def __init__(self, layer: nn.Module, *, returns_loss: bool) -> None:
        super().__init__()
        self.layer, self.returns_loss = layer, returns_loss

    def forward(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, None]:
        if not self.returns_loss:
            return self.layer(x_BLD), None
        y_BLD, loss, _ = self.layer(x_BLD)
        return join(y_BLD, 0.01 * loss, scale=context.auxiliary_scale), None


def _with_layers(precision: str, make: Callable[[Run], nn.Module]) -> tuple[Transformer, Run]:
    """The Transformer of the recipe with another system's MoE layers. Parameters are in the compute dtype."""
    run = recipe(precision, ep=1)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    torch.manual_seed(0)
    model = Transformer(run.model, run.experts, run.router, vocab_size=VOCABULARY, compute=dtype)
    for block in model.layers:
        if block.moe is not None:
            block.moe = make(run).to(dtype)
    return model, run


def _loss(model: nn.Module, tokens: Tensor, number: int) -> Tensor:
    context = Context.of(tokens[:, :-1], step=number)
    return F.cross_entropy(model(tokens[:, :-1], context).logits_BLV.flatten(0, 1), tokens[:, 1:].flatten())


def deepspeed(rank: int, precision: str) -> Step:
    """A step of DeepSpeed's engine, ZeRO off, around its MoE layer; in bf16 the experts have fp32 master weights."""
    from parallel.data.deepspeed import start_deepspeed

    package = start_deepspeed()
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    def make(run: Run) -> nn.Module:
        width, hidden = run.model.d_model, run.model.d_ff
        expert = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False))
        layer = MoE(
            width, expert, num_experts=run.experts.of_layer(0), ep_size=WORLD, k=1, capacity_factor=CAPACITY, min_capacity=4, use_rts=False
        )
        return _Other(layer, returns_loss=True)

    model, run = _with_layers(precision, make)
    o = run.optimizer
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": o.clip_norm,
        "zero_optimization": {"stage": 0},
    }
    if precision == "bf16":
        settings["bf16"] = {"enabled": True}
    engine, _, _, _ = package.initialize(model=model, optimizer=optimizer, dist_init_required=False, config=settings)

    def step(number: int) -> float:
        loss = _loss(engine, tokens_of(number, rank), number)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def transformers(rank: int, precision: str) -> Step:
    """A step of torch DDP around transformers' Switch block, which counts slots per sequence."""
    from transformers.models.switch_transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    def make(run: Run) -> nn.Module:
        experts = run.experts.of_layer(0)
        settings = SwitchTransformersConfig(
            d_model=run.model.d_model,
            d_ff=run.model.d_ff,
            num_experts=experts,
            expert_capacity=int(CAPACITY * LENGTH / experts),
            router_jitter_noise=0.0,
            dropout_rate=0.0,
        )
        return _Other(SwitchTransformersSparseMLP(settings), returns_loss=False)

    model, run = _with_layers(precision, make)
    # an expert without tokens has no gradient in this block, so DDP must look for unused parameters
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    o = run.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)

    def step(number: int) -> float:
        loss = _loss(wrapped, tokens_of(number, rank), number)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_norm or 1.0)
        optimizer.step()
        return float(loss.detach())

    return step
