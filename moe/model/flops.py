"""Parameters and floating-point operations of a model, from its recipe alone: total and active per token.

    forward per token = 2 * (active matrix parameters) + 4 * (mean attended length) * heads * channels * layers
    training          = 3 * forward                                                    (backward is two products for one)

A causal token attends to (L + 1) / 2 positions on average. Capacity is not counted: a dropped choice would only lower it.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe import config
from moe.kernels.activation import GATED
from moe.model.attention import RelativeBias


@dataclass(frozen=True)
class Size:
    """`total` and `active` parameters; `forward` and `training` FLOPs per token."""

    total: int
    active: int
    forward: float
    training: float


def size(model: config.Model, experts: config.Experts, router: config.Router, *, vocab_size: int) -> Size:
    head = model.head_size or model.d_model // model.num_heads
    width, kv_heads = model.num_heads * head, model.num_kv_heads or model.num_heads
    attention = model.d_model * (2 * width + 2 * kv_heads * head)
    bias = RelativeBias.buckets * model.num_heads if model.positions == "t5" else 0
    dense_ffn = _ffn(model.d_model, model.d_ff, model.ffn)
    expert_ffn, expert_d_ff = experts.ffn or model.ffn, experts.d_ff or model.d_ff
    one_expert = _ffn(model.d_model, expert_d_ff, expert_ffn)
    with_experts = len(model.layers_with_experts())
    dense_layers = model.num_layers - with_experts
    num_experts = sum(experts.of_layer(nth) for nth in range(with_experts))  # of all layers
    beside = _ffn(model.d_model, (experts.shared_d_ff or expert_d_ff) * experts.shared, expert_ffn)
    beside += model.d_model if experts.shared_gate else 0
    beside += one_expert + 2 * model.d_model if experts.residual else 0
    router_size = model.d_model * num_experts * (2 if router.spec.noise == "noisy_top_k" else 1)  # of all layers
    table = vocab_size * model.d_model

    matrices = model.num_layers * attention + dense_layers * dense_ffn + with_experts * beside + router_size + table
    active = matrices + with_experts * router.spec.num_choices * one_expert
    rest = model.num_layers * (2 * model.d_model + bias) + model.d_model + (0 if model.tied_embeddings else table)
    attended = (model.max_length + 1) / 2
    forward = 2.0 * active + 4.0 * attended * width * model.num_layers
    return Size(matrices + num_experts * one_expert + rest, active + rest, forward, 3.0 * forward)


def _ffn(d_model: int, d_ff: int, ffn: str) -> int:
    return d_model * d_ff * (3 if ffn in GATED else 2)
