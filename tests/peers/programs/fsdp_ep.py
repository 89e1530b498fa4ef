"""A trainer with FSDP2 and expert parallelism in plain torch: dense parameters are sharded, each rank has a part of the experts.

Rank r of n reads the r-th part of the batch. Rows go to their experts and back by an all_to_all of its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe.verify import record

BATCH, LENGTH, VOCABULARY, WIDTH, HIDDEN, EXPERTS, CHOICES = 8, 10, 40, 24, 36, 4, 2
FAULTS = {  # name -> (module or parameter of the first deviation, a word of the cause)
    "expert gradients not averaged": ("blocks.1.moe.experts", "2 x"),
    "experts of a rank swapped": ("blocks.0.moe.experts", "order"),
    "gates not applied": ("blocks.1.moe", "gates"),
    "gates not normalized": ("blocks.1.moe", "gates"),
    "half the router's gradient": ("blocks.1.moe.router", "backward of the operations"),
    "router detached": ("blocks.1.moe.router", "missing"),
    "rows' gradients in another order": ("blocks.1.moe.experts", "order"),
    "capacity on ranks": ("blocks.0.moe", "dropped"),
    "router not reduced": ("blocks.1.moe.router.weight", "not reduced"),
    "wrong experts on rank 1": ("blocks.0.moe.experts", "wrong slice"),
    "expert order of the weights": ("blocks.1.moe.experts", "permutation"),
    "expert bias lost": ("blocks.1.moe.experts", "lost term"),
    "tokens of rank 1 without experts": ("blocks.0.moe", "masked"),
    "rows return in another order": ("blocks.0.moe", "order of rows"),
    "gradients averaged twice": ("head.weight", "1/2"),
    "experts of rank 1 not updated": ("blocks.0.moe.experts", "not updated"),
    "balance loss by ranks": ("blocks.1.moe.router", "backward of the operations"),
    "bf16 reduction": ("head.weight", "bf16"),
}


class Exchange(torch.autograd.Function):
    """all_to_all of rows; backward sends their gradients back, with `flip` in reverse order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], flip: bool) -> Tensor:
        ctx.send, ctx.receive, ctx.flip = send, receive, flip
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        out = gradient.new_empty(sum(ctx.send), gradient.shape[1])
        dist.all_to_all_single(out, gradient.contiguous(), ctx.send, ctx.receive)
        return (out.flip(0) if ctx.flip else out), None, None, None


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) * WIDTH**-0.5)
        self.b1 = nn.Parameter(torch.randn(EXPERTS, 1, HIDDEN) * 0.1)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) * HIDDEN**-0.5)
        self.order: list[int] | None = None
        self.bias = True

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        out = []
        for e, own in enumerate(rows.split(counts)):
            e = e if self.order is None else self.order[e]
            out.append(F.gelu(own @ self.w1[e] + (self.b1[e] if self.bias else 0 * self.b1[e])) @ self.w2[e])
        return torch.cat(out)


class MoE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.ranks, self.fault, self.balance = 1, "", torch.zeros(())

    def forward(self, x_BLD: Tensor) -> Tensor:
        x = x_BLD.flatten(0, 1)
        probs = self.router(x).float().softmax(-1)
        gates, chosen = probs.topk(CHOICES)
        gates = gates if self.fault == "gates not normalized" else gates / gates.sum(-1, keepdim=True)
        if self.fault == "half the router's gradient":
            gates = gates.detach() + 0.5 * (gates - gates.detach())
        gates = (
            torch.ones_like(gates) if self.fault == "gates not applied" else gates.detach() if self.fault == "router detached" else gates
        )
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        share = counts.float()
        if self.ranks > 1 and self.fault != "balance loss by ranks":
            dist.all_reduce(share)
        if self.fault != "router detached":
            self.balance = 0.1 * EXPERTS * (share / share.sum() * probs.mean(0)).sum()
        order = chosen.flatten().argsort(stable=True)
        rows = self.exchanged(x[order // CHOICES], counts)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        back = back.roll(1) if self.fault == "rows return in another order" else back
        y = (rows[back].unflatten(0, (-1, CHOICES)) * gates[..., None].to(x.dtype)).sum(1)
        if self.fault == "capacity on ranks":
            y = y * (torch.arange(len(y)) % 7 != 3)[:, None]
        if self.fault == "tokens of rank 1 without experts" and dist.get_rank() == 1:
            y = y * 0
        return y.view_as(x_BLD)

    def exchanged(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Send rows, sorted by expert, to the ranks of their experts; return the experts' outputs in the order of `rows`."""
        if self.ranks == 1:
            return self.experts(rows, counts.tolist())
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        here = theirs.view(self.ranks, -1)  # from each rank, for each expert here
        send, receive = counts.view(self.ranks, -1).sum(1).tolist(), here.sum(1).tolist()
        rows = Exchange.apply(rows, send, receive, False)
        expert = torch.arange(here.shape[1]).repeat(self.ranks).repeat_interleave(here.flatten())
        order = expert.argsort(stable=True)
        out = self.experts(rows[order], here.sum(0).tolist())
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return Exchange.apply(out[back], receive, send, self.fault == "rows' gradients in another order")

    def cut(self, rank: int, ranks: int, fault: str) -> None:
        """Keep this rank's experts."""
        self.ranks, self.fault = ranks, fault
        own = 0 if fault == "wrong experts on rank 1" else rank
        for name, parameter in list(self.experts.named_parameters()):
            part = parameter.detach().chunk(ranks)[own].clone()
            setattr(self.experts, name, nn.Parameter(part.flip(0) if fault == "expert order of the weights" else part))
        self.experts.order = [1, 0] if fault == "experts of a rank swapped" else None
        self.experts.bias = fault != "expert bias lost"


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.moe_norm, self.moe = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), MoE()

    def forward(self, x: Tensor) -> Tensor:
        mean = self.norm(x).cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        x = x + self.mix(mean)
        return x + self.moe(self.moe_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main(folder: str, *, fault: str = "", dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Train one step, which is recorded."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(seed)
    model = Model().to(dtype)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1)).chunk(world)[rank]
    layers = [block.moe for block in model.blocks]
    if world > 1:
        at = FAULTS.get(fault, ("",))[0]
        for number, layer in enumerate(layers):
            layer.cut(rank, world, fault if at.startswith(f"blocks.{number}") else "")
        mesh = init_device_mesh("cpu", (world,))
        own = {p for layer in layers for p in layer.experts.parameters()}
        own |= {layers[1].router.weight} if fault == "router not reduced" else set()
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, ignored_params=own)
    frozen = layers[0].experts if fault == "experts of rank 1 not updated" and rank == 1 else None
    of_frozen = {id(p) for p in frozen.parameters()} if frozen is not None else set()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in of_frozen], lr=1e-2, eps=1e-6, foreach=False)
    for step in record(folder, model, optimizer):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        step.note("loss", loss)
        (loss + sum(layer.balance for layer in layers)).backward()
        for layer in layers if fault != "expert gradients not averaged" else layers[:1]:
            for parameter in layer.experts.parameters():
                parameter.grad /= world
        for parameter in (p for p in model.parameters() if p.grad is not None):
            if fault == "gradients averaged twice":
                parameter.grad /= world
            if fault == "bf16 reduction":
                parameter.grad = parameter.grad.bfloat16().to(dtype)
        optimizer.step()
