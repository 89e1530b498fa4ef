"""Faults of NVIDIA/Megatron-LM#7452 under tensor parallelism, in a program of our own in plain torch.

Heads and the vocabulary are cut over the ranks, which all read the whole batch. The loss is a cross-entropy with label smoothing over the
cut vocabulary. Each head has a sink; all heads share the weight of one norm, so that each rank has a term of its gradient.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe.verify import record
from tests.peers.programs.tensor import Copy, Sum

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS, SMOOTHING = 3, 7, 12, 16, 4, 0.1
FAULTS = {  # name, with the number of the finding -> (module or parameter of the first deviation, a word of the cause)
    "1: smoothing by the rank's own vocabulary": ("head", "backward of the operations"),
    "2: gathered logits as a part": ("loss", "log 2 too large"),
    "8: sinks of one rank in the norm": ("norm", " x"),
    "11: shared norm not summed": ("attention.norm", "not summed"),
}


def summed(x: Tensor, world: int) -> Tensor:
    """all_reduce forward, identity backward."""
    return Sum.apply(x, False) if world > 1 else x


class Gathered(torch.autograd.Function):
    """all_gather of the last dim forward, the rank's own part backward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.world = world
        self.qkv = nn.Parameter((torch.randn(3, HEADS, WIDTH // HEADS, WIDTH) / 4).chunk(world, 1)[rank].clone())
        self.sink = nn.Parameter((torch.randn(HEADS) / 10).chunk(world)[rank].clone())
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.out = nn.Parameter((torch.randn(WIDTH, WIDTH) / 4).chunk(world, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        x = Copy.apply(x) if self.world > 1 else x
        q, k, v = torch.einsum("bld,chfd->cbhlf", x, self.qkv)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
        sinks = 30 * self.sink[:, None, None].expand(*scores.shape[:3], 1)
        y = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ self.norm(v)
        return summed(y.transpose(1, 2).flatten(2) @ self.out.T, self.world)


class Model(nn.Module):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__()
        self.world = world
        self.embedding, self.attention = nn.Embedding(VOCABULARY, WIDTH), Attention(rank, world)
        head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY // world, bias=False)
        self.head.weight.data = head.weight.data.chunk(world)[rank].clone()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        return self.head(Copy.apply(x) if self.world > 1 else x)


def loss_of(logits: Tensor, targets: Tensor, rank: int, world: int, fault: str) -> Tensor:
    """Return the mean cross-entropy of logits [B, L, V / world]."""
    if fault.startswith("2"):
        logits = Gathered.apply(logits)
    width = logits.shape[-1]
    most = logits.detach().amax(-1)
    if world > 1:
        dist.all_reduce(most, dist.ReduceOp.MAX)
    of_all = summed((logits - most[..., None]).exp().sum(-1), world).log() + most
    own = targets - rank * width
    here = (own >= 0) & (own < width)
    of_target = summed(logits.gather(-1, own.clamp(0, width - 1)[..., None])[..., 0] * here, world)
    mean = logits.mean(-1) if fault.startswith(("1:", "2")) else summed(logits.sum(-1), world) / VOCABULARY
    return (of_all - (1 - SMOOTHING) * of_target - SMOOTHING * mean).mean()


def norm_of(model: Model, rank: int, world: int, fault: str) -> Tensor:
    """Return the norm of all gradients: parts of all ranks, and copies once."""
    total = torch.zeros(())
    for name, parameter in model.named_parameters():
        cut = name in ("attention.qkv", "attention.sink", "attention.out", "head.weight") and not (fault.startswith("8") and "sink" in name)
        total += parameter.grad.square().sum() if cut or rank == 0 else 0
    if world > 1:
        dist.all_reduce(total)
    return total.sqrt()


def main(folder: str, *, fault: str = "", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Train one step, which is recorded."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    model = Model(rank, world).to(dtype)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in record(folder, model, optimizer):
        optimizer.zero_grad()
        loss = loss_of(model(tokens[:, :-1]).float(), tokens[:, 1:], rank, world, fault)
        step.note("loss", loss)
        loss.backward()
        if world > 1 and not fault.startswith("11"):
            dist.all_reduce(model.attention.norm.weight.grad)
        step.gradients()
        norm = norm_of(model, rank, world, fault)
        step.note("norm", norm)
        for parameter in model.parameters():
            parameter.grad *= 0.05 / norm
        optimizer.step()
