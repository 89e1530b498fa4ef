"""Measures a whole training step of a sparse model on two processes with one thread each (ep 2), and compares it with other systems.

The same Transformer is trained three times, with different MoE layers and engines: this project's; DeepSpeed's MoE with expert parallelism
in DeepSpeed's engine; transformers' Switch block with all experts on every rank under torch DDP. Tokens, FLOPs per token, capacity factor,
optimizer and clipping are the same. In each round every system takes one step. A ratio compares two times of the same round; the median
over rounds is printed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe.bench.timing import chosen_peers, conclude, in_turn, ratio
from moe.bench.training.sharded import kind_of, start
from moe.model.transformer import Transformer
from moe.nn.context import Context
from moe.recipe.load import build_run
from moe.recipe.sections import Run
from moe.router.losses import join
from parallel.data.kinds import PLAIN
from parallel.errors import BadInput
from parallel.numerics.precision import DTYPES
from parallel.process.fork import run_on_ranks
from parallel.process.libc import keep_freed_memory

# B sequences of a rank, L length, D model

Step = Callable[[int], float]  # takes the training step with this number and returns this rank's loss
WORLD, BATCH, LENGTH, VOCABULARY, CAPACITY = 2, 8, 256, 256, 1.25  # ranks, B, L, number of token ids, capacity factor


def main(*, peers: str = "deepspeed,transformers", only: str | None = None, rounds: int = 9, json: str | None = None) -> int:
    """`moe bench step`: prints each system's tokens per second. Returns 1 if a loss is not finite or does not fall."""
    names = chosen_peers(peers, PEERS)
    precisions = [p for p in ("fp32", "bf16") if only is None or only in p]
    if not precisions:
        raise BadInput("--only", got=only, needed="fp32 or bf16", fix="leave it out")
    torch.set_num_threads(1)
    keep_freed_memory()
    if "deepspeed" in names:
        from parallel.data.deepspeed import load_deepspeed

        load_deepspeed()  # imported before ranks are forked, so that not every rank imports it
    rows: list[dict[str, Any]] = []
    for precision in precisions:
        all_seconds, all_losses = run_on_ranks(_on_rank, WORLD, precision, names, rounds, timeout_s=900)[0]
        print(f"\n{precision}\n  {'trained by':<14} {'tokens/s':>9} {'ours over it':>13} {'first loss':>11} {'last loss':>10}")
        for name, seconds in all_seconds.items():
            first, last = all_losses[name][0], all_losses[name][-1]
            speed, faster = WORLD * BATCH * LENGTH / statistics.median(seconds), ratio(seconds, all_seconds["ours"])
            row = {"implementation": name, "precision": precision, "tokens_per_second": speed, "ours_over_it": faster}
            rows.append(row | {"first_loss": first, "last_loss": last, "passed": bool(last < first)})
            print(f"  {name:<14} {speed:>9.0f} {faster:>13.2f} {first:>11.3f} {last:>10.3f}", flush=True)
    return conclude(json, "step", rows, rounds=rounds, ranks=WORLD)


def recipe(precision: str, *, ep: int) -> dict[str, Any]:
    """Return a recipe (section -> key -> value) of a Switch Transformer: 4 layers, each with 64 experts of 512 hidden units. precision:
    compute dtype, fp32 or bf16. ep: number of ranks over which experts are split."""
    sizes = {"num_layers": 4, "d_model": 256, "num_heads": 4, "d_ff": 512, "max_length": LENGTH, "moe_every": 1}
    return {
        "model": sizes | {"ffn": "relu", "norm": "layernorm"},
        "experts": {"num_experts": 64},
        "router": {"preset": "switch", "group": "rank", "capacity_factor": CAPACITY, "jitter": 0.0, "min_capacity": 4},
        "degrees": {"dp": WORLD, "ep": ep},
        "precision": {"compute": precision},
        "optimizer": {"lr": 0.001, "warmup_steps": 0},
        "train": {"global_batch": WORLD * BATCH},
    }


def tokens_of(step: int, rank: int) -> Tensor:
    """Return the token ids of a rank in a training step, int64 [B, L + 1]. Ids of a sequence rise by a constant (modulo the
    vocabulary), which a small model soon learns."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    start_B1 = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    stride_B1 = torch.randint(1, 4, (BATCH, 1), generator=generator)
    return (start_B1 + stride_B1 * torch.arange(LENGTH + 1)) % VOCABULARY


def _on_rank(rank: int, precision: str, names: list[str], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    started = start(kind_of(PLAIN), recipe(precision, ep=WORLD), rank, WORLD)
    steps: dict[str, Step] = {"ours": lambda number: started.step(tokens_of(number, rank), step=number).loss}
    return timed_steps(steps | {name: PEERS[name](rank, precision) for name in PEERS if name in names}, rounds)


def timed_steps(steps: dict[str, Step], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Take training steps with each function of `steps` in turn. Return (name -> seconds of each round, name -> loss of each step)."""
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def run(name: str) -> None:
        losses[name].append(steps[name](len(losses[name])))
        dist.barrier()

    return in_turn({name: partial(run, name) for name in steps}, rounds=rounds, before=dist.barrier), losses


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer, clip_norm: float | None, loss_of: Callable[[int], Tensor]) -> Step:
    """Return a training step in plain torch, with clipping to clip_norm (None: no clipping). loss_of(step number): returns the loss."""

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of(number)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        optimizer.step()
        return float(loss.detach())

    return step


def deepspeed_step(engine: Any, loss_of: Callable[[int], Tensor]) -> Step:
    """Return a training step of DeepSpeed's engine. loss_of(step number): returns the loss."""

    def step(number: int) -> float:
        loss = loss_of(number)
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


class _Other(nn.Module):
    """Another system's MoE layer in this project's Transformer. returns_loss: the layer also returns a balance loss, which is added to the
    model's loss with weight 0.01."""

    def __init__(self, layer: nn.Module, *, returns_loss: bool) -> None:
        super().__init__()
        self.layer, self.returns_loss = layer, returns_loss

    def forward(self, x_BLD: Tensor, context: Context) -> tuple[Tensor, None]:
        if not self.returns_loss:
            return self.layer(x_BLD), None
        y_BLD, loss, _ = self.layer(x_BLD)
        return join(y_BLD, 0.01 * loss, scale=context.auxiliary_scale), None


def _with_layers(precision: str, make: Callable[[Run], nn.Module]) -> tuple[Transformer, Run]:
    """Return (the benchmark's Transformer in the compute dtype, with MoE layers made by `make`; its recipe)."""
    run, dtype = build_run(recipe(precision, ep=1)), DTYPES[precision]
    torch.manual_seed(0)
    model = Transformer(run.model, run.experts, run.router, vocab_size=VOCABULARY, compute=dtype)
    for block in model.layers:
        if block.moe is not None:
            block.moe = make(run).to(dtype)
    return model, run


def _adamw(parameters: Any, run: Run) -> torch.optim.Optimizer:
    o = run.optimizer
    return torch.optim.AdamW(parameters, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay)


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    tokens = tokens_of(number, rank)
    logits_BLV = model(tokens[:, :-1], Context.of(tokens[:, :-1], step=number)).logits_BLV
    return F.cross_entropy(logits_BLV.flatten(0, 1), tokens[:, 1:].flatten())


def _deepspeed(rank: int, precision: str) -> Step:
    """Return a training step with DeepSpeed's MoE layers in DeepSpeed's engine, without ZeRO; in bf16 it has fp32 master weights."""
    from parallel.data.deepspeed import start_deepspeed

    package = start_deepspeed(torch.device("cpu"))
    from deepspeed.moe.layer import MoE
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    def make(run: Run) -> nn.Module:
        width, hidden = run.model.d_model, run.model.d_ff
        expert = nn.Sequential(nn.Linear(width, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, width, bias=False))
        capacity: dict[str, Any] = {"k": 1, "capacity_factor": CAPACITY, "min_capacity": 4, "use_rts": False}
        return _Other(MoE(width, expert, num_experts=run.experts.of_layer(0), ep_size=WORLD, **capacity), returns_loss=True)

    model, run = _with_layers(precision, make)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": 1}
    settings |= {"gradient_clipping": run.optimizer.clip_norm, "zero_optimization": {"stage": 0}}
    settings |= {"bf16": {"enabled": True}} if precision == "bf16" else {}
    engine, *_ = package.initialize(model=model, optimizer=_adamw(groups, run), dist_init_required=False, config=settings)
    return deepspeed_step(engine, lambda number: _loss(engine, rank, number))


def _transformers(rank: int, precision: str) -> Step:
    """Return a training step with transformers' Switch blocks under torch DDP. These blocks count capacity for each sequence."""
    from transformers.models.switch_transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    def make(run: Run) -> nn.Module:
        experts = run.experts.of_layer(0)
        sizes: dict[str, Any] = {"d_model": run.model.d_model, "d_ff": run.model.d_ff, "num_experts": experts}
        capacity = int(CAPACITY * LENGTH / experts)
        settings = SwitchTransformersConfig(**sizes, expert_capacity=capacity, router_jitter_noise=0.0, dropout_rate=0.0)
        return _Other(SwitchTransformersSparseMLP(settings), returns_loss=False)

    model, run = _with_layers(precision, make)
    # find_unused_parameters: an expert without tokens gets no gradient, for which DDP would otherwise wait forever
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    return torch_step(model, _adamw(model.parameters(), run), run.optimizer.clip_norm, lambda number: _loss(wrapped, rank, number))


PEERS: dict[str, Callable[[int, str], Step]] = {"deepspeed": _deepspeed, "transformers": _transformers}
