"""Coefficients of activation memory for a training software: a Plan says how ranks train, a Stack which tensors the software keeps.

Bytes for each token in a layer of width D, w = heads * channels, k = kv_heads * channels, F hidden units; c: bytes of an element:

    norm_inputs     2 norm D + 2 statistics      inputs of the two norms; RMSNorm keeps `rms` D more if its steps are separate kernels
    norm_outputs    2 c D                        inputs of the products after the norms
    attention       c (2 w + 2 k) + lse heads    q, k, v, attention's output and the log-sum-exp; keys `repeated` for all heads: k = w
                    over_ranks c w more          its output in another order of dims, if sequences are cut
    core            (2 c + 1) heads L            with `scores`: softmax of all pairs, dropout's mask and output; `fused` keeps none
                    c heads L                    Colossal-AI's ring: softmax of all pairs, in any software
    with T5's bias  attention and core (12 + c) w + 4 heads L if `biased` is `scores`, otherwise attention as above and c heads L^2 a
                    micro-batch; and 9 L^2 a micro-batch
    network         c (n - a) F                  n (`plain` or `gated`): number of tensors of the hidden size
    activation      c a F                        a (`activation_of`): number of these that the activation gives
    masks           2 D                          dropout after attention and network; `always`: even if dropout is 0
    cross           cross-attention: a norm, its output, q and attention's output for each token, k and v for each of the encoder's
                    tokens, a mask; with `scores` also the scores of all pairs
    experts         c (rows D + n F) + maps      for each of a token's choices, and 8 bytes a token and expert for the router

`selective`: fraction of each part that selective recompute keeps; parts that are not named are kept. Sources: Korthikanti et al. (arXiv
2205.05198), section 4, for Megatron-LM; this project's own coefficients are checked against autograd
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
    """Coefficients of one training software. The first fields are explained at the top of this file.

    mask: an element of a mask takes a byte, or as much as an element of the tensor.
    logits: bytes for each logit at the peak of the loss. logits_kept: those of them that are kept until the backward pass. logits_shared:
    additional bytes if ranks of tp share the vocabulary.
    gathers: sharded parameters that are whole at the same time: a number of `layers` or `elements`, which is `gathered`; or as the engine
    says for each of the step's `moments` (temporary.py).
    reads_again: with `sliced` activations, products gather their input again in the backward pass instead of keeping it.
    outputs: a stage's outputs are freed or kept after they are sent.
    casts: weights wider than the compute dtype are cast, and the cast is kept.
    bucket_elements, bucket_bytes: size of a bucket of gradients, and bytes of its elements.
    reduce_bytes: bytes of an element of an unsharded gradient.
    gradients: between steps, kept in the software's own buffers, or freed (unless an engine's buckets keep them).
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


# This project: norms and losses in fp32, each product of a network is kept; experts' kernels recompute the activation. If tp ranks share
# the vocabulary, logits_shared adds the log-sum-exp's gradient in three steps, the target's separate gradient, and the logits themselves.
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
# On a CPU, torch computes RMSNorm in several steps and also keeps x / rms(x) in fp32. Its fused attention has no gradient for a bias.
OURS_ON_CPU = replace(OURS, name="moe on a cpu", rms=4, biased="scores")
