"""A transformers trainer: a tiny Qwen3-MoE from a checkpoint, with transformers' FSDP2 and expert parallelism over the same ranks.

Rank r of n reads the r-th part of the batch in two micro-batches. Sequences have padding on the left. FAULTS are edits of this text: see
run.py.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe.verify import record

BATCH, LENGTH, MICRO = 8, 10, 2
OPEN = 8  # values that are not compared: 4-dimensional masks of micro-batches and scalars


def tiny(seed: int, dtype: torch.dtype, folder: str) -> None:
    """Write a checkpoint with random weights."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)


def loaded(folder: str, dtype: torch.dtype, world: int) -> Any:
    """Return the model: whole, or with dense weights in FSDP2's shards and each expert on one rank."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.integrations import accelerate

    vars(accelerate)["is_accelerate_available"] = lambda *_: True  # it is not used without a device map
    parallel = {"distributed_config": DistributedConfig(fsdp_size=world, ep_size=world)} if world > 1 else {}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **parallel)


def clip(model: Any, most: float) -> Tensor:
    """Clip gradients by their norm, and return it. Experts and other weights have different meshes, so torch's function refuses them."""
    norms = [p.grad.norm().full_tensor() if hasattr(p.grad, "full_tensor") else p.grad.norm() for p in model.parameters()]
    norm = torch.stack(norms).norm()
    for parameter in model.parameters():
        parameter.grad.mul_((most / norm).clamp(max=1))
    return norm


def main(folder: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
    """Train one step, which is recorded."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    tiny(seed, dtype, f"{folder}/weights")  # rank 0 writes
    dist.barrier()
    model = loaded(f"{folder}/weights", dtype, world)
    batch = torch.randint(1, 64, (BATCH, LENGTH))
    mask = torch.ones_like(batch)
    mask[1::3, :4] = 0  # padding on the left
    labels = batch.masked_fill(mask == 0, -100)
    count = (labels[:, 1:] != -100).sum()
    own: list[Tensor] = [each.chunk(world)[rank] for each in (batch, mask, labels)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6, foreach=False)
    model.train()
    for step in record(folder, model, optimizer):
        for tokens, seen, wanted in zip(*(each.chunk(MICRO) for each in own), strict=True):
            places = (seen.cumsum(1) - 1).clamp(min=0)
            out = model(tokens, attention_mask=seen, position_ids=places, labels=wanted, num_items_in_batch=count, use_cache=False)
            (out.loss * world).backward()  # FSDP2 takes the mean over ranks
        step.gradients()
        step.note("norm", clip(model, 0.1))
        optimizer.step()


FAULTS = {  # name -> (module or parameter of the first deviation, a word of the cause, text of the program, text instead of it)
    "gradients summed": ("lm_head.weight", "2 x", "(out.loss * world)", "(out.loss * world * MICRO)"),
    "no mean over ranks": ("lm_head.weight", "1/2", "(out.loss * world)", "(out.loss)"),
    "each rank divides by its own tokens": ("lm_head.weight", "tokens", "_batch=count", "_batch=(own[2] != -100).sum()"),
    "mask not given": ("model.layers.0.self_attn", "mask", "attention_mask=seen, ", ""),
    "padding in the loss": ("lm_head", "mask", "labels=wanted", "labels=tokens"),
    "gates not normalized": ("model.layers.0.mlp", "gates", "dtype=dtype, **parallel", "dtype=dtype, norm_topk_prob=False, **parallel"),
    "rate of all ranks": ("model.embed_tokens.weight", "learning rate", "lr=1e-2", "lr=1e-2 * world"),
    "norm of each rank's part": ("model.embed_tokens.weight", "clipping", "p.grad.norm().full_tensor()", "p.grad.to_local().norm()"),
    "expert gradients halved": (
        "model.layers.1.mlp.experts",
        "1/2",
        "    step.grad",
        "    [p.grad.mul_(0.5) for n, p in model.named_parameters() if 'experts' in n]\n        step.grad",
    ),
    "another base of positions": (
        "model.rotary_emb",
        "other values",
        "dtype=dtype, **parallel",
        "dtype=dtype, rope_parameters={'rope_type': 'default', 'rope_theta': 50.0}, **parallel",
    ),
    "every rank reads the same": ("", "samples", "each.chunk(world)[rank]", "each.chunk(world)[0]"),
}
