"""What a training software keeps and how it works, as coefficients: a plan says what is trained where, a Stack by which modules.

Bytes per token of a layer of D width, w = heads * channels, k = kv_heads * channels and F hidden units; c bytes of an element:

    norm_inputs     2 norm D + 2 statistics      what the two norms read; RMSNorm `rms` D more, where its steps are kernels of their own
    norm_outputs    2 c D                        what the products after them read
    attention       c (2 w + 2 k) + lse heads    q, k, v, attention's output and the log-sum-exp; keys `repeated` for all heads: k = w
                    over_ranks c w more          its output in another order of dims, where sequences are cut
    core            (2 c + 1) heads L            of `scores`: the softmax of all pairs, its dropout's mask and output; `fused` keeps none
                    c heads L                    of Colossal-AI's ring: the softmax of all pairs, on any software
    with T5's bias  attention and core (12 + c) w + 4 heads L where `biased` is `scores`, else attention as it is and c heads L^2 a
                    micro-batch; and 9 L^2 a micro-batch
    network         c (n - a) F                  n, `plain` or `gated`: tensors of the hidden size, of which a, `activation_of`, are what
    activation      c a F                        comes out of the activation
    masks           2 D                          of dropout behind attention and network; `always`: even where it is 0
    cross           all of these for attention to an encoder: a norm, its output, q and attention's output of a token, k and v of each
                    of the encoder's tokens, a mask; with `scores` those of all pairs
    experts         c (rows D + n F) + maps      for each of a token's choices, and 8 bytes a token and expert for the router

`selective`: the share of each part that selective recomputation keeps; parts not named are kept. Sources: Korthikanti et al. (arXiv
2205.05198), section 4, has these for Megatron-LM; this project's own are compared with autograd (tests/moe/plan/job/test_activations.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from moe.plan.job.hashed import hashed_once

Part = Literal["norm_inputs", "norm_outputs", "attention", "core", "cross", "network", "activation", "masks", "experts"]
PARTS: tuple[Part, ...] = ("norm_inputs", "norm_outputs", "attention", "core", "cross", "network", "activation", "masks", "experts")


@hashed_once
@dataclass(frozen=True)
class Stack:
    """Fields as above, and how states are handled.

    `mask`: bytes of its element, or those of a tensor's. `logits`: bytes per logit where the loss peaks, of which `logits_kept` wait
    for the backward pass; `logits_shared`: more of them where ranks of tp share the vocabulary. `gathers`: what of sharded parameters
    is whole at once, layers or a number of elements, or at each moment what gathered.py says. `reads_again`: with sequence parallelism
    the products gather their input again in the backward pass instead of keeping it. `outputs`: of stages, whether they are kept after
    they were sent. `casts`: weights wider than the compute dtype are cast, and autograd keeps the cast. `bucket_elements`: gradients
    that travel together, in a buffer of that size, of `bucket_bytes` each. `reduce_bytes`: of an element of a gradient that arrives
    whole and is reduced to shards. `gradients`: between steps, kept in buffers of the software's own, or freed, except where an
    engine's buckets keep them.
    """

    name: str
    norm: int = 2
    rms: int = 0
    statistics: int = 0
    lse: int = 4
    keys: Literal["grouped", "repeated"] = "grouped"
    core: Literal["fused", "scores"] = "fused"
    biased: Literal["fused", "scores"] = "fused"
    plain: int = 2
    gated: int = 3
    activation_of: int = 1
    masks: Literal["always", "dropout"] = "dropout"
    mask: Literal["byte", "element"] = "byte"
    expert_rows: int = 1
    expert_plain: int = 2
    expert_gated: int = 3
    maps: int = 8
    selective: tuple[tuple[Part, float], ...] = (("core", 0.0),)
    logits: float = 10
    logits_kept: float = 4
    logits_shared: float = 0
    gathers: Literal["layers", "elements", "moments"] = "layers"
    gathered: float = 2
    reads_again: bool = True
    outputs: Literal["freed", "kept"] = "freed"
    casts: bool = False
    bucket_elements: float = 0
    bucket_bytes: int = 2
    reduce_bytes: int = 4
    gradients: Literal["kept", "freed"] = "kept"
    over_ranks: int = 0


# Ours: norms and losses in fp32, a network's products written one by one; experts' kernels compute the activation again. Logits of shared
# vocabularies: the log-sum-exp's gradient in three steps, the target's apart, and the logits themselves.
OURS = Stack(
    "moe",
    norm=4,
    statistics=4,
    keys="repeated",
    gated=4,
    mask="element",
    maps=0,
    expert_rows=2,
    expert_plain=1,
    expert_gated=2,
    selective=(("norm_outputs", 0.5), ("norm_inputs", 0.5), ("masks", 0.5), ("network", 0.0), ("activation", 0.0), ("experts", 0.0)),
    logits=12,
    logits_shared=8,
    reads_again=False,
    casts=True,
    gathers="moments",
    bucket_elements=8 * 2**20,
    bucket_bytes=4,
    gradients="freed",
    over_ranks=1,
)
# On a CPU torch computes RMSNorm step by step and keeps x / rms(x) too, in fp32; CUDA's kernel does not. Its fused attention there gives no
# gradient of a bias.
OURS_ON_CPU = replace(OURS, name="moe on a cpu", rms=4, biased="scores")
# Megatron-LM: fused activations keep gate and up and their product; its fused bias-dropout-add writes masks for any probability.
# Logits: 2 in 16 bits, 4 in fp32 and 4 for their exponentials.
MEGATRON = Stack("megatron", masks="always", logits=10)
MEGATRON_2022 = Stack("megatron-2022", masks="always", core="scores", lse=0, logits=10)
# Its pipeline keeps what stages sent, and DeepSpeed's buckets are of 5e8 elements.
MEGATRON_DEEPSPEED = Stack(
    "megatron-deepspeed", masks="always", core="scores", lse=0, logits=10, outputs="kept", bucket_elements=5e8, reduce_bytes=2
)
# torchtitan: FSDP2 of fp32 shards; selective keeps every second product's output (q, v, w1, w2) and attention's output, nothing else.
# Logits: what log-softmax gave, its gradient and its input's, each 4 in fp32; the logits themselves are gone by then.
TORCHTITAN = Stack(
    "torchtitan",
    gated=4,
    activation_of=2,
    selective=(("norm_outputs", 0.0), ("attention", 0.9), ("network", 0.5), ("activation", 0.0)),
    logits=12,
)
FSDP = Stack("fsdp", gated=4, activation_of=2, logits=12)
# DeepSpeed's defaults: stage 3 keeps up to 1e9 parameters whole, buckets are of 5e8 elements.
DEEPSPEED = Stack(
    "deepspeed", gated=4, activation_of=2, core="scores", logits=12, gathers="elements", gathered=1e9, bucket_elements=5e8, reduce_bytes=2
)
# DeepSeek-V3's own (arXiv 2412.19437, sections 3.2.3 and 3.3.3): norms, up-projections and SwiGLU's output are made again, and what
# products read is kept in 8 bits. Of attention are left its output, the latents before their norms and the log-sum-exp, in 16 bits:
# 18,752 of 86,336 elements a token with its sizes. Of experts a row and what gate and up gave, (D + 2 F) / 2 (D + 3 F); of dense networks
# the latter.
DEEPSEEK = replace(
    MEGATRON,
    name="deepseek",
    masks="dropout",
    selective=(("norm_outputs", 0.0), ("attention", 0.217), ("experts", 0.423), ("network", 0.5), ("activation", 0.0)),
)
NANOTRON = Stack("nanotron", gated=4, activation_of=2, logits=12)
