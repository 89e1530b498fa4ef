"""A DeepSpeed trainer: dense parameters in ZeRO-2, and DeepSpeed's MoE layer, whose experts are spread over the ranks.

Rank r of n reads the r-th part of the batch in two micro-batches. One process trains by plain torch, with all experts. Sequences have
padding. FAULTS are edits of this text: see run.py.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.verify import record
from parallel.data.deepspeed import start_deepspeed

BATCH, LENGTH, VOCABULARY, WIDTH, EXPERTS, MICRO = 8, 10, 40, 24, 4, 2
OPEN = 21  # values that are not compared: slots of the MoE layer, balance losses, DeepSpeed's own norm


class Block(nn.Module):
    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        from deepspeed.moe.layer import MoE

        self.norm, self.mix, self.moe_norm = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.moe = MoE(WIDTH, expert, EXPERTS, ep_size=ranks, k=2, min_capacity=80, use_rts=False, top2_2nd_expert_sampling=False)
        own = self.moe.deepspeed_moe.experts.deepspeed_experts
        for index, one in enumerate(own):
            draws = torch.Generator().manual_seed(seed + rank * len(own) + index)
            for parameter in one.parameters():
                parameter.data.normal_(std=0.2, generator=draws)
        gate = self.moe.deepspeed_moe.gate
        gate.wg.weight.data.normal_(generator=torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.mix(mean)
        y, _, _ = self.moe(self.moe_norm(x))
        return x + y


class Model(nn.Module):
    def __init__(self, rank: int, ranks: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(rank, ranks, 100 * (10 * seed + number)) for number in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(folder: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Train one step, which is recorded."""
    deepspeed, rank, world = start_deepspeed(torch.device("cpu")), dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    with redirect_stdout(StringIO()):
        model = Model(rank, world, seed).to(dtype)
        for block in model.blocks if world == 1 else ():
            block.moe.set_deepspeed_parallelism()
    batch = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1))
    batch[1::3, 7:] = 0  # padding
    own, count = batch.chunk(world)[rank], (batch[:, 1:] != 0).sum()
    parameters = [{"params": list(model.parameters()), "name": "all"}]
    if world > 1:
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        parameters = split_params_into_different_moe_groups_for_optimizer(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-2, eps=1e-6, foreach=False)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world // MICRO,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
    }
    engine = model
    if world > 1:
        with redirect_stdout(StringIO()):
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    for step in record(folder, engine, *(() if world > 1 else (optimizer,))):
        for micro in own.chunk(MICRO):
            logits = engine(micro[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), micro[:, 1:].flatten(), ignore_index=0, reduction="sum") / count
            if world == 1:
                loss.backward()
                continue
            engine.backward(loss * world * MICRO)  # DeepSpeed takes the mean over ranks and micro-batches
            if engine.is_gradient_accumulation_boundary():
                step.gradients()
            engine.step()
        if world == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()


FAULTS = {  # name -> (module or parameter of the first deviation, a word of the cause, text of the program, text instead of it)
    "mean over micro-batches by hand, too": ("head.weight", "1/2", "loss * world * MICRO)", "loss * world)"),
    "each rank divides by its own tokens": (
        "head.weight",
        "tokens",
        "batch.chunk(world)[rank], (batch",
        "(o := batch.chunk(world)[rank]), (o",
    ),
    "padding is not ignored": ("head", "mask", "ignore_index=0", "ignore_index=-1"),
    "clipped at DeepSpeed's own norm": ("embedding.weight", "clipping", '"gradient_clipping": 0.1', '"gradient_clipping": 1.0'),
    "experts begin alike on each rank": ("blocks.0.moe", "wrong slice", "seed + rank * len(own) + index", "seed + index"),
    "capacity of a rank's tokens": ("blocks.0.moe", "dropped", "min_capacity=80", "min_capacity=8"),
    "second expert at random": ("blocks.0.moe", "other choices", "expert_sampling=False", "expert_sampling=True"),
    "branch detached": ("blocks.1.mix", "zero", "x = x + self.mix(mean)", "x = x + self.mix(mean).detach()"),
    "stale master weights": (
        "embedding.weight",
        "stale master weights",
        "    for step",
        "    engine.optimizer.single_partition_of_fp32_groups[0].data.mul_(2)\n    for step",
    ),
    "weights not refreshed from the masters": (
        "embedding.weight",
        "not refreshed",
        "            engine.step()",
        "            old = [p.detach().clone() for p in model.parameters()]\n            engine.step()\n"
        "            [p.data.copy_(o) for p, o in zip(model.parameters(), old)]",
    ),
    "bf16 sums": ("head.weight", "bf16", '"zero_optimization"', '"communication_data_type": "bf16", "zero_optimization"'),
    "rate of all ranks": ("embedding.weight", "learning rate", "lr=1e-2", "lr=1e-2 * world"),
    "every rank reads the same": ("", "samples", "batch.chunk(world)[rank]", "batch.chunk(world)[0]"),
}
