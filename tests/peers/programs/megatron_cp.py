"""Faults of NVIDIA/Megatron-LM#7452 under context parallelism, in a program of our own in plain torch.

Each rank has one half of every sequence; keys and values of all tokens are gathered. The last tokens of sequences are padding: they have
no loss, no expert and no share in the balance loss. Gradients are averaged over the ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.verify import record

BATCH, LENGTH, VOCABULARY, WIDTH, EXPERTS = 4, 12, 40, 16, 4
FAULTS = {  # name, with the number of the finding -> (module or parameter of the first deviation, a word of the cause)
    "5: padding of another group's rank": ("moe", "mask"),
    "9: mean over the rank's own tokens": ("head.weight", "number of tokens"),
    "10: own count after the sum over ranks": ("moe.router", "backward of the operations"),
}


class Gathered(torch.autograd.Function):
    """all_gather of the tokens forward; backward sums the ranks' gradients and takes the rank's part."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size(), 1)[dist.get_rank()]


class MoE(nn.Module):
    """Each token's best expert, with a balance loss of the whole batch: E sum_e (share of tokens) (mean probability)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.balance = torch.zeros(())

    def forward(self, x: Tensor, padding: Tensor, *, world: int, fault: str) -> Tensor:
        probs = self.router(x).float().softmax(-1) * ~padding[..., None]
        gate, chosen = probs.max(-1)
        own, count = (~padding).sum(), F.one_hot(chosen[~padding], EXPERTS).sum(0)
        mean = probs.sum((0, 1)) / int(own)
        tokens = own if fault.startswith("10") else own.clone()  # the sum is in place
        if world > 1:
            dist.all_reduce(tokens)
            dist.all_reduce(count)
        self.balance = 0.1 * EXPERTS * (count / tokens * mean).sum() * own / tokens * world
        return torch.einsum("bld,bldf->blf", x, self.experts[chosen]) * gate[..., None].to(x.dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.q, self.k = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.moe, self.head = MoE(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, padding: Tensor, rank: int, world: int, fault: str) -> Tensor:
        x = self.embedding(tokens)
        k, v = self.k(x), x
        if world > 1:
            k, v = Gathered.apply(k), Gathered.apply(v)
        later = torch.arange(LENGTH) > rank * tokens.shape[1] + torch.arange(tokens.shape[1])[:, None]
        x = x + (self.q(x) @ k.mT / WIDTH**0.5).masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.head(x + self.moe(x, padding, world=world, fault=fault))


def main(folder: str, *, fault: str = "", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Train one step, which is recorded."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    model = Model().to(dtype)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    padding = torch.arange(LENGTH) >= torch.tensor([12, 9, 8, 7])[:, None]
    inputs, targets, own = (t.chunk(world, 1)[rank] for t in (tokens[:, :-1], tokens[:, 1:], padding))
    count = (~(own if fault.startswith("9") else padding)).sum() / (1 if fault.startswith("9") else world)
    of_router = padding.chunk(world, 1)[0] if fault.startswith("5") else own
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, foreach=False)
    for step in record(folder, model, optimizer):
        optimizer.zero_grad()
        each = F.cross_entropy(model(inputs, of_router, rank, world, fault).float().flatten(0, 1), targets.flatten(), reduction="none")
        loss = (each * ~own.flatten()).sum() / count
        step.note("loss", loss.detach())
        (loss + model.moe.balance).backward()
        for parameter in model.parameters() if world > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()
