"""What a training software keeps and how it works, as coefficients: a plan says what is trained where, a Stack by which modules.

Bytes per token of a layer of D width, w heads * channels, k kv_heads * channels and F hidden units; c bytes per element of activations:

    norms        2 (norm D) + 2 c D            what each norm reads, and its output, which the products after it read
    attention    c (2 w + 2 k) + 4 heads       q, k, v, attention's output and the log-sum-exp; `core` scores: 5 heads L more
    hidden       c n F                         n: tensors of the hidden size, `plain` or `gated`
    masks        2 masks D                     of the two residual connections

Sources: Korthikanti et al. (arXiv 2205.05198), section 4; this project's own is counted against autograd (moe/plan/activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Part = Literal["norms", "products_read", "core", "attention", "activation", "masks", "experts", "network"]


@dataclass(frozen=True)
class Stack:
    """`norm`: bytes per element that a norm keeps of its input. `plain`, `gated`: hidden tensors that a network keeps.

    `core`: scores keeps the softmax of all pairs, fused none of them. `selective`: the parts that selective recomputation drops.
    `logits`: bytes per logit where the loss peaks. `gathered`: layers whole at once where parameters are sharded.
    """

    name: str
    norm: int = 2
    plain: float = 2
    gated: float = 3
    core: Literal["fused", "scores"] = "fused"
    masks: Literal["always", "dropout"] = "dropout"
    selective: tuple[Part, ...] = ("core",)
    logits: float = 10
    gathered: int = 2


OURS = Stack("moe", norm=4, gated=4, selective=("network",))
MEGATRON = Stack("megatron", masks="always")
MEGATRON_2022 = Stack("megatron-2022", masks="always", core="scores")
TORCHTITAN = Stack("torchtitan", gated=4, selective=("norms", "activation"), logits=14)
FSDP = Stack("fsdp", gated=4, logits=14)
DEEPSPEED = Stack("deepspeed", gated=4, core="scores", logits=14)
NANOTRON = Stack("nanotron", gated=4, logits=14)
EAGER = Stack("hf-eager", norm=8, gated=5, core="scores", logits=14)
STACKS = {s.name: s for s in (OURS, MEGATRON, MEGATRON_2022, TORCHTITAN, FSDP, DEEPSPEED, NANOTRON, EAGER)}
