"""Coefficients of activation memory: the tensors that a training program keeps from the forward to the backward pass.

Bytes per token of a layer of width D. w = heads * channels, k = kv_heads * channels, F hidden units, L tokens, c bytes per element.
The fields norm, rms, statistics, lse and maps are numbers of bytes too:

    norm_inputs     2 norm D + 4 statistics      for each of two norms: its input and two statistics (mean, 1 / deviation); an RMSNorm keeps
                                                 `rms` D more if its steps are separate kernels
    norm_outputs    2 c D                        inputs of the products after the norms
    attention       c (2 w + 2 k) + lse heads    q, k, v, attention's output and log-sum-exp; k = w with `repeated` keys
                    + over_ranks c w             with sequence parallelism, a transposed copy of attention's output
    core            (2 c + 1) heads L            if `core` is `scores`: softmax of all (query, key) pairs, dropout's mask and output
                    c heads L                    with Colossal-AI's ring attention, whatever `core` is: softmax of all pairs
    with T5's bias  if `core` is `scores`: attention and core as above. Else, if `biased` is `scores`: (12 + c) w + 4 heads L for both
                    together; if `fused`: attention as above, and the bias, c heads L^2 per micro-batch. If attention is causal or
                    documents are packed, also a mask, L^2 per micro-batch. With documents, bias and mask are per sequence
    with a mask     if keys are `repeated`: c L^2 per micro-batch for windows above half of the length, c L^2 per sequence for documents
    network         c (n - a) F                  n (`plain` or `gated`): number of kept tensors of the hidden size
    activation      c a F                        a (`activation_of`): number of these that are outputs of the activation
    masks           2 D or 2 c D                 dropout after attention and network (see `mask`); `always`: even if dropout is 0
    cross           cross-attention: norm, its output, q, attention's output and a mask per token; k and v per token of the encoder; with
                    `scores` also the scores of all pairs
    experts         c (r D + n F) + maps         for each choice of a token: r = expert_rows, n = `expert_plain` or `expert_gated`; and for
                                                 the router, 8 bytes per token and expert

Sources: Korthikanti et al. (arXiv 2205.05198), section 4, for Megatron-LM; for this project, the tensors that autograd saves
(tests/moe/plan/job/test_activations.py).
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
    """Coefficients of activation memory for one training framework. The top of this file explains the fields that have no comment."""

    name: str
    norm: int = 2
    rms: int = 0
    statistics: int = 0
    lse: int = 4
    # repeated: key-value heads are copied for each query head if flash attention does not run (fp32, T5's bias, a mask, chunked windows)
    keys: Literal["grouped", "repeated"] = "grouped"
    padded: bool = False  # latent attention pads values and output to the size of keys
    core: Literal["fused", "scores"] = "fused"
    biased: Literal["fused", "scores"] = "fused"
    plain: int = 2
    gated: int = 3
    activation_of: int = 1
    masks: Literal["always", "dropout"] = "dropout"
    mask: Literal["byte", "element"] = "byte"  # an element of a dropout mask has one byte, or the bytes of the tensor's element
    expert_rows: int = 1
    expert_plain: int = 2
    expert_gated: int = 3
    expert_multiple: int = 1  # in 16 bits with LoRA, the rows of each expert are padded to a multiple of this number
    maps: int = 8
    selective: tuple[tuple[Part, float], ...] = (("core", 0.0),)  # part -> fraction that selective recompute keeps; others: 1
    logits: float = 10  # bytes per logit at the memory peak of the loss
    logits_kept: float = 4  # bytes per logit that are kept until the backward pass
    logits_shared: float = 0  # additional bytes per logit at the peak if tp ranks share the vocabulary
    # unit of the field `gathered`. moments: `gathered` is not used, because moments.py computes gathered weights at each point of a step
    gathers: Literal["layers", "elements", "moments"] = "layers"
    gathered: float = 2  # number of layers, or of parameters, that ZeRO-3 holds unsharded at a time
    reads_again: bool = True  # with tensor.sequence_parallel, the backward pass gathers products' inputs again instead of keeping them
    outputs: Literal["freed", "kept"] = "freed"  # whether a stage keeps its outputs after it sends them
    casts: bool = False  # weights of a wider dtype are cast to the compute dtype, and the copies are kept for the backward pass
    bucket_elements: float = 0  # number of elements of a gradient bucket
    bucket_bytes: int = 2  # bytes of an element of a gradient bucket
    reduce_bytes: int = 4  # bytes of an element of a gradient before it is reduced and sharded
    gradients: Literal["kept", "freed"] = "kept"  # whether gradient buffers stay allocated between steps
    over_ranks: int = 0
    # for a product's input and output gradient that are kept for a deferred weight gradient: bytes / bytes in the compute dtype
    pending: float = 1.0


# This project computes losses in fp32 and keeps the output of each product; experts' kernels recompute the activation.
# logits_shared: the gradients of the log-sum-exp and of the target's logit are separate tensors if tp ranks share the vocabulary.
OURS = Stack(
    "moe",
    statistics=4,
    keys="repeated",
    padded=True,
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
# On a CPU, key-value heads are not copied, and norms keep an fp32 copy of their input. torch computes RMSNorm in several kernels and also
# keeps x / rms(x). Attention with a bias writes its scores to memory.
OURS_ON_CPU = replace(OURS, name="moe on a cpu", keys="grouped", norm=4, rms=4, biased="scores", expert_multiple=32)
