"""`moe verify --peer torch`: a small Transformer, on one process and with torch's own kinds of parallelism.

ddp, fsdp2            each rank has different samples
tensor, sequence      torch's tensor-parallel styles; with `sequence`, activations are sharded along the tokens outside of attention and ffn
gpipe, 1f1b, interleaved, zbv   schedules of torch.distributed.pipelining on two ranks, with micro-batches of one sample
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from moe.verify.peer import VOCABULARY, Pair, adamw, batch, loss_of, train
from moe.verify.yours.recorder import record

PACKAGES = {"torch": "torch"}
SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zbv": "ZBVZeroBubble"}
MODELS = ("ddp", "fsdp2", "tensor", "sequence", *SCHEDULES)
DEGREES, ROUTED = ("tp", "fsdp"), ()
_WIDTH, _HEADS, _BLOCKS, _STAGES = 32, 4, 4, 2


def load() -> None:
    """Import the modules that the ranks need."""
    import torch.distributed.fsdp
    import torch.distributed.pipelining.schedules
    import torch.distributed.tensor.parallel  # noqa: F401


def pairs(models: tuple[str, ...], degrees: dict[str, int], pin: bool) -> Iterator[Pair]:
    """Yield a Pair (a run on one process and one on several ranks, to compare) for each name in `models` whose axis is in `degrees`.
    The axis of ddp and fsdp2 is fsdp; of tensor and sequence, tp. Pipelines need no entry: they have _STAGES ranks."""
    for model in models:
        axis = "fsdp" if model in ("ddp", "fsdp2") else "tp" if model in ("tensor", "sequence") else "pp"
        if (ranks := (degrees | {"pp": _STAGES}).get(axis)) is not None:
            many = partial(_pipeline if axis == "pp" else _many, model)
            yield Pair(model, f"{'dp' if axis == 'fsdp' else axis}{ranks}", ranks, _one, many)


class Block(nn.Module):
    """Attention and a feed-forward network. The number of heads follows from the size of the projections, which tensor parallelism
    shards."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(_WIDTH, _WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(3 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (p(y).unflatten(-1, (-1, _WIDTH // _HEADS)).transpose(1, 2) for p in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        hidden: Tensor = F.gelu(self.up(self.ffn_norm(x)))
        x = x + self.down(hidden)
        return x


class Model(nn.Module):
    """A decoder, or its pipeline stage `index` of `stages`. A stage's parameters have the same names as in the whole decoder."""

    def __init__(self, index: int = 0, stages: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        embedding, blocks = nn.Embedding(VOCABULARY, _WIDTH), [Block() for _ in range(_BLOCKS)]
        ends = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, VOCABULARY, bias=False)
        each = _BLOCKS // stages
        self.embedding = embedding if index == 0 else None
        self.blocks = nn.ModuleDict({str(n): blocks[n] for n in range(index * each, (index + 1) * each)})
        self.norm, self.head = ends if index == stages - 1 else (None, None)  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def _one(folder: Path) -> None:
    model = Model()
    train(folder, nn.ModuleDict(dict(model.named_children())), model, batch())


def _many(kind: str, folder: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    rank, world, model = dist.get_rank(), dist.get_world_size(), Model()
    mesh, parts = init_device_mesh("cpu", (world,)), nn.ModuleDict(dict(model.named_children()))
    if kind in ("tensor", "sequence"):
        cut(model, mesh, sequence=kind == "sequence")
        train(folder, parts, model, batch())
        return
    whole: nn.Module = model
    if kind == "ddp":
        whole = DistributedDataParallel(model)
    else:
        for part in (*model.blocks.values(), model):
            fully_shard(part, mesh=mesh)
    train(folder, parts, whole, batch().chunk(world)[rank])


def cut(model: Model, mesh: Any, *, sequence: bool) -> None:
    """Apply torch's tensor-parallel styles: heads and hidden units are sharded over the ranks. With `sequence`, each rank computes
    LayerNorm only for its own tokens."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    tokens = Shard(1)
    for block in model.blocks.values():
        into = ColwiseParallel(input_layouts=tokens) if sequence else ColwiseParallel()
        out = RowwiseParallel(output_layouts=tokens) if sequence else RowwiseParallel()
        plan: dict[str, Any] = {name: into for name in ("q", "k", "v", "up")} | {name: out for name in ("out", "down")}
        plan |= {name: SequenceParallel() for name in ("attention_norm", "ffn_norm")} if sequence else {}
        parallelize_module(block, mesh, plan)
    if sequence:
        first = RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens)
        head = ColwiseParallel(input_layouts=tokens, output_layouts=Replicate())
        parallelize_module(model, mesh, {"embedding": first, "norm": SequenceParallel(), "head": head})


def _pipeline(kind: str, folder: Path) -> None:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    rank, world = dist.get_rank(), dist.get_world_size()
    chosen = get_schedule_class(SCHEDULES[kind])
    own = [rank] if kind in ("gpipe", "1f1b") else [rank, rank + world] if kind == "interleaved" else [rank, 2 * world - 1 - rank]
    stages = world * len(own)
    models = [Model(index, stages) for index in own]
    tokens, made = batch(), list[Any]()
    for model, index in zip(models, own, strict=True):
        given = tokens[:1, :-1] if index == 0 else torch.zeros(1, tokens.shape[1] - 1, _WIDTH, requires_grad=True)
        shapes = {"input_args": given, "output_args": model(given)}  # without these, torch would run the stage once more to find shapes
        made.append(PipelineStage(model, index, stages, torch.device("cpu"), **shapes))
    schedule = chosen(made if len(own) > 1 else made[0], n_microbatches=len(tokens), loss_fn=loss_of)
    parts = nn.ModuleDict({name: part for m in models for name, part in m.named_children()})
    parts["blocks"] = nn.ModuleDict({n: block for m in models for n, block in m.blocks.items()})
    optimizer, losses = adamw(parts), list[Tensor]()
    for step in record(folder, parts, optimizer):
        schedule.step(*((tokens[:, :-1],) if 0 in own else ()), target=tokens[:, 1:] if stages - 1 in own else None, losses=losses)
        if losses:
            step.note("loss", torch.stack(losses).mean())
        optimizer.step()
