"""Published routers by name, with their settings. docs/moe/routing.md explains them, and docs/inside/papers.md has their papers.

Source code of some: mesh_tensorflow/transformer/moe.py (switch_mtf), top2gating in deepspeed/moe/sharded_moe.py (deepspeed),
megatron/core/transformer/moe (megatron), transformers/models/gpt_oss (gpt_oss), transformers/models/llama4 (llama4).
"""

from __future__ import annotations

from moe.recipe.router_spec import RouterSpec

PRESETS: dict[str, RouterSpec] = {
    "switch": RouterSpec(num_choices=1, capacity_factor=1.25, min_capacity=4, balance_weight=0.01),
    "switch_mtf": RouterSpec(num_choices=1, jitter=0.01, capacity_factor=1.25, eval_capacity_factor=2.0, min_capacity=4,
                             capacity_counts="tokens", capacity_rounding="floor", balance_weight=0.01),
    "gshard": RouterSpec(num_choices=2, second="random", gates="before_drop", capacity_factor=1.25, min_capacity=4,
                         balance_weight=0.01, balance_counts="first"),
    "glam": RouterSpec(num_choices=2, gates="before_drop", capacity_factor=1.25, min_capacity=4, balance_weight=0.01,
                       balance_counts="first"),
    "mixtral": RouterSpec(num_choices=2, softmax_over="chosen", balance_weight=0.001, balance_scope="micro_batch"),
    "qwen2_moe": RouterSpec(num_choices=4, balance_weight=0.001, balance_scope="micro_batch"),
    "olmoe": RouterSpec(num_choices=8, balance_weight=0.01, balance_scope="micro_batch", z_weight=0.001),
    "qwen3_moe": RouterSpec(num_choices=8, gates="before_drop", balance_weight=0.001, balance_scope="global_batch"),
    "gpt_oss": RouterSpec(num_choices=4, logits="affine", softmax_over="chosen", balance_weight=0.001, balance_scope="micro_batch"),
    "deepseek_v2": RouterSpec(num_choices=6, select="group_limited", expert_groups=8, top_groups=3, group_score="best",
                              gate_scale=16.0, balance_weight=0.003),
    "deepseek_v3": RouterSpec(num_choices=8, score="sigmoid", select="group_limited", expert_groups=8, top_groups=4, bias_rate=0.001,
                              gates="before_drop", gate_scale=2.5, balance_weight=0.0001, balance_counts="unbiased"),
    "llama4": RouterSpec(num_choices=1, score="sigmoid", gate_on="input", balance_weight=0.001, balance_scope="micro_batch"),
    "nllb": RouterSpec(num_choices=2, gates="after_drop", group="rank", capacity_factor=1.0, balance_weight=0.01,
                       balance_counts="first", balance_scope="micro_batch"),
    "deepspeed": RouterSpec(num_choices=2, gates="after_drop", group="rank", capacity_factor=1.0, eval_capacity_factor=1.0,
                            min_capacity=4, balance_weight=0.01, balance_counts="first", balance_scope="micro_batch"),
    "megatron": RouterSpec(num_choices=2, softmax_over="chosen", group="rank", drop="lowest_gate", queue="tokens_first",
                           balance_weight=0.01, balance_scope="micro_batch"),
    "expert_choice": RouterSpec(num_choices=2, select="expert_choice", capacity_factor=1.0, eval_capacity_factor=1.0),
}  # fmt: skip
