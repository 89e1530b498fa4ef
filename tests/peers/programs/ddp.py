"""A data-parallel trainer in plain torch: a small Transformer under DDP, or on one process. Its first step is recorded.

Rank r of n reads every n-th sequence. Sequences have padding, so each rank divides its loss by the tokens of the global batch.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe.verify import record

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 8, 12, 50, 32, 4
FAULTS = {  # name -> (module or parameter of the first deviation, a word of the cause)
    "gradients summed": ("head.weight", "2 x"),
    "gradients averaged twice": ("head.weight", "1/2"),
    "one parameter not reduced": ("blocks.1.up.weight", "not reduced"),
    "a sequence masked on rank 1": ("head", "masked"),
    "bias lost": ("blocks.1.down", "bias"),
    "stale head": ("head", "stale"),
    "micro-batches not averaged": ("head.weight", "2 x"),
    "every rank reads the same": ("", "samples"),
    "own number of tokens": ("head.weight", "tokens"),
    "positions shifted on rank 1": ("positions", "rank 1"),
    "branch detached": ("blocks.1.attention.out", "missing"),
    "a parameter without optimizer": ("blocks.0.up.weight", "not updated"),
    "decay of a norm": ("blocks.0.norm.weight", "weight decay"),
    "norm counted over ranks": ("total", "1.414 x"),
}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a = self.attention(x)
        x = x + (a.detach() if self.fault == "branch detached" else a)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, fault: str, rank: int) -> None:
        super().__init__()
        self.shift = int(fault == "positions shifted on rank 1" and rank == 1)
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        self.blocks = nn.ModuleList([Block(""), Block(fault)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(torch.arange(LENGTH) + self.shift)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(folder: str, *, fault: str = "", dtype: torch.dtype = torch.float32, seed: int = 0, micro: int = 1) -> None:
    """Train one step, which is recorded."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    net = Model(fault, rank).to(dtype)
    old = net.head.weight.detach().clone()
    torch.nn.init.normal_(net.head.weight, std=0.2)  # as if it were loaded
    batch = torch.randint(1, VOCABULARY, (BATCH, LENGTH + 1))
    batch[1::3, 7:] = 0  # padding
    _put_in(net, fault, old)
    model: nn.Module = DistributedDataParallel(net, find_unused_parameters=fault == "branch detached") if world > 1 else net
    optimizer = _optimizer(net, fault)
    own = batch[0::world] if fault == "every rank reads the same" else batch[rank::world]
    count = (batch[:, 1:] != 0).sum() / world
    if fault == "own number of tokens":
        count = (own[:, 1:] != 0).sum()
    for _ in record(folder, model, optimizer):
        for piece in own.chunk(micro):
            logits, targets = model(piece[:, :-1]), piece[:, 1:].clone()
            if fault == "a sequence masked on rank 1" and rank == 1:
                targets[-1] = 0
            loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=0, reduction="sum") / count
            (loss * (2 if fault == "micro-batches not averaged" else 1)).backward()
        for parameter in (p for p in net.parameters() if p.grad is not None):
            parameter.grad *= {"gradients summed": 2.0, "gradients averaged twice": 0.5}.get(fault, 1.0)
        parameters = list(net.parameters())
        torch.nn.utils.clip_grad_norm_(parameters * 2 if fault == "norm counted over ranks" else parameters, 0.5)
        optimizer.step()


def _put_in(net: Model, fault: str, old: Tensor) -> None:
    if fault == "bias lost":
        down = net.blocks[1].down
        down.forward = lambda x: F.linear(x, down.weight)
    elif fault == "stale head":
        net.head.forward = lambda x: F.linear(x, old + 0 * net.head.weight)
    elif fault == "one parameter not reduced":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["blocks.1.up.weight"])


def _optimizer(net: Model, fault: str) -> torch.optim.Optimizer:
    named = dict(net.named_parameters())
    plain = {n: p for n, p in named.items() if p.dim() == 1 and not (fault == "decay of a norm" and n == "blocks.0.norm.weight")}
    left_out = "blocks.0.up.weight" if fault == "a parameter without optimizer" else ""
    decayed = [p for n, p in named.items() if n not in plain and n != left_out]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": list(plain.values()), "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-6)
