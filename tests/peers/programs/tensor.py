"""A tensor-parallel trainer in plain torch: attention cut by hand with two autograd functions, the feed-forward part by DTensor styles.

All ranks read the whole batch. Dropout has the same random numbers on every rank, outside the cut parts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from moe.verify import record

BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 6, 10, 40, 32, 4
FAULTS = {  # name -> (module or parameter of the first deviation, a word of the cause)
    "bias on each rank": ("blocks.1.attention", "a bias counts 2 times"),
    "input gradient not summed": ("blocks.1.norm", "not summed"),
    "wrong slice of the output weight": ("blocks.0.attention.out.weight", "wrong slice"),
    "fused weight cut in one block": ("blocks.1.attention.out", "cut in one piece"),
    "fused weight cut by DTensor": ("blocks.1.attention.out", "cut in one piece"),
    "dropout of its own on each rank": ("blocks.0.dropout", "dropout"),
    "output not summed": ("blocks.1.attention", "not summed"),
    "output summed twice": ("blocks.0.attention", "2 x"),
    "copies' gradients summed": ("blocks.1.norm.weight", "2 x"),
    "output gradient summed again": ("blocks.1.attention.out", "2 x"),
    "heads' scale of the whole": ("blocks.0.attention.out", "operations before"),
    "norm counts copies twice": ("embedding.weight", "clipping"),
    "bias lost on rank 1": ("blocks.1.attention.qkv", "a bias counts 0 times"),
    "copies drift apart": ("blocks.1.norm.bias", "rank 1"),
}


class Copy(torch.autograd.Function):
    """Identity forward, all_reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """all_reduce forward, identity backward; with `again`, all_reduce backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, again: bool) -> Tensor:
        ctx.again = again
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        if ctx.again:
            dist.all_reduce(gradient)
        return gradient, None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.ranks, self.fault = HEADS, 1, ""
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def cut(self, rank: int, ranks: int, mesh: DeviceMesh, fault: str) -> None:
        """Keep this rank's heads."""
        self.heads, self.ranks, self.fault = HEADS // ranks, ranks, fault
        own = 0 if fault == "wrong slice of the output weight" else rank
        self.out.weight = nn.Parameter(self.out.weight.chunk(ranks, 1)[own].detach().clone())
        if fault == "fused weight cut by DTensor":  # each rank gets a run of rows: q and half of k, or the rest
            parallelize_module(self, mesh, {"qkv": ColwiseParallel()})
            return
        blocks = 1 if fault == "fused weight cut in one block" else 3
        rows = torch.arange(3 * WIDTH).reshape(blocks, ranks, -1)[:, rank].flatten()
        self.qkv.weight, self.qkv.bias = nn.Parameter(self.qkv.weight[rows].detach()), nn.Parameter(self.qkv.bias[rows].detach())
        if fault == "bias lost on rank 1" and rank == 1:
            self.qkv.forward = lambda x: F.linear(x, self.qkv.weight) + 0 * self.qkv.bias

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.ranks > 1 and self.fault not in ("input gradient not summed", "fused weight cut by DTensor"):
            x = Copy.apply(x)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scale = WIDTH**-0.5 if self.fault == "heads' scale of the whole" else (WIDTH // HEADS) ** -0.5
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2).reshape(batch, length, -1)
        y = self.out(mixed)
        if self.fault == "bias on each rank":
            return Sum.apply(y + self.bias, False)
        if self.ranks > 1 and self.fault != "output not summed":
            y = Sum.apply(y, self.fault == "output gradient summed again")
        if self.fault == "output summed twice":
            return Sum.apply(y + self.bias, False)
        return y + self.bias


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.dropout = nn.LayerNorm(WIDTH), Attention(), nn.Dropout(0.2)
        self.ffn_norm = nn.LayerNorm(WIDTH)
        self.ffn = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.ffn(self.ffn_norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

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
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    torch.manual_seed(seed + 1)
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for number, block in enumerate(model.blocks):
            faulty = next((int(n.split(".")[1]) for n, _ in [FAULTS.get(fault, ("blocks.9", ""))] if n.startswith("blocks")), 9)
            faulty = 1 if fault == "input gradient not summed" else faulty
            block.attention.cut(rank, world, mesh, fault if number == faulty else "")
            parallelize_module(block.ffn, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if fault == "dropout of its own on each rank":
            torch.manual_seed(seed + 1 + rank)
        if fault == "copies drift apart" and rank == 1:
            with torch.no_grad():
                model.blocks[1].norm.bias += 0.01
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)
    for step in record(folder, model, optimizer):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        if fault == "copies' gradients summed":
            dist.all_reduce(model.blocks[1].norm.weight.grad)
        step.gradients()
        clip(model, world, fault)
        step.note("loss", loss)
        optimizer.step()


def clip(model: nn.Module, world: int, fault: str) -> None:
    """Clip by the norm of the whole gradient: parts are summed over ranks, copies are counted once."""
    square = torch.zeros(())
    for name, parameter in model.named_parameters():
        cut = "qkv" in name or "out.weight" in name or hasattr(parameter, "placements") and parameter.placements[0].is_shard()
        gradient = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        square += gradient.float().square().sum() * (1 if cut or world == 1 or fault == "norm counts copies twice" else 1 / world)
    if world > 1:
        dist.all_reduce(square)
    factor = (0.5 / square.sqrt()).clamp(max=1)
    for parameter in model.parameters():
        parameter.grad.mul_(factor.to(parameter.grad.dtype))
