"""The published routers, each with all its settings; docs/moe/routing.md shows the table and the source of each number.

switch          top-1, gate as it is                                Switch (arXiv 2101.03961); capacity as DeepSpeed rounds it
switch_mtf      top-1, with the released code's numbers             Mesh TensorFlow, mesh_tensorflow/transformer/moe.py
gshard          top-2, the second at random                         GShard (arXiv 2006.16668, algorithm 1)
glam            top-2, both always                                  GLaM (arXiv 2112.06905)
mixtral         top-2 of 8, softmax over the chosen, dropless       Mixtral (arXiv 2401.04088)
qwen2_moe       top-4 as it is, with a gated shared expert          Qwen1.5-MoE, Qwen2 (arXiv 2407.10671)
olmoe           top-8 as it is, with the z loss                     OLMoE (arXiv 2409.02060)
qwen3_moe       top-8, renormalised, balanced over the batch        Qwen3 (arXiv 2505.09388)
gpt_oss         top-4, affine logits, softmax over the chosen       GPT-OSS (arXiv 2508.10925); transformers, models/gpt_oss
deepseek_v2     top-6, 3 of 8 expert groups by their best expert    DeepSeek-V2 (arXiv 2405.04434, section 2.2)
deepseek_v3     top-8 by sigmoid + bias, 4 of 8 expert groups       DeepSeek-V3 (arXiv 2412.19437)
llama4          top-1 by sigmoid, which scales the expert's input   transformers, models/llama4
nllb            top-2, gates renormalised after dropping            NLLB-MoE (arXiv 2207.04672, section 6.1); fairseq
deepspeed       top-2, gates renormalised after dropping            DeepSpeed, deepspeed/moe/sharded_moe.py: top2gating
megatron        top-2, softmax over the chosen, lowest dropped      Megatron-LM, megatron/core/transformer/moe
expert_choice   experts choose tokens                               Expert Choice (arXiv 2202.09368)
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
