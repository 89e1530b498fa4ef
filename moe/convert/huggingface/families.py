"""The supported families of models, as tables that are used for both directions of the conversion. Needs no torch.

    ROWS      a tensor of transformers                                a parameter of a run, by its name in checkpoints
              model.layers.{l}.self_attn.o_proj.weight                layers.{l}.attention.out.weight
              model.layers.{l}.mlp.experts.{e}.gate_proj.weight       layers.{l}.experts.{e}.w1             turned: [out, in] in the file
              model.layers.{l}.mlp.experts.gate_up_proj               layers.{l}.experts.{e}.w1             half 0 of a stack [E, 2 F, D]
    FAMILIES  a key of config.json                                    a key of a recipe

`theirs` is a name of transformers, `ours` a name of this project. In gated networks w1 is the gate projection, w3 the up projection and w2
the down projection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """The two names of a tensor, with `{l}` for a layer and `{e}` for an expert. `turned`: the tensor is transposed in the file. `half`: 0
    for the gate projection, 1 for the up projection, if one tensor in the file has both; else None. The two projections are concatenated
    along an expert's first dim, or, with `mixed`, interleaved in the last dim."""

    theirs: str
    ours: str
    turned: bool = False
    half: int | None = None
    mixed: bool = False

    @property
    def stacked(self) -> bool:
        """Return whether one tensor of the file holds all experts."""
        return "{e}" in self.ours and "{e}" not in self.theirs


_LAYER, _OURS = "model.layers.{l}.", "layers.{l}."
_ATTENTION = (
    ("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out"), ("q_a_proj", "q_down"), ("q_a_layernorm", "q_down_norm"),
    ("q_b_proj", "q_up"), ("kv_a_proj_with_mqa", "kv_down"), ("kv_a_layernorm", "kv_down_norm"), ("kv_b_proj", "kv_up"),
)  # fmt: skip
_NETWORK = (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
ROWS = (
    Row("model.embed_tokens.weight", "embedding"),
    Row("lm_head.weight", "head.weight"),
    Row("model.norm.weight", "norm.weight"),
    Row(f"{_LAYER}input_layernorm.weight", f"{_OURS}attention_norm.weight"),
    Row(f"{_LAYER}post_attention_layernorm.weight", f"{_OURS}ffn_norm.weight"),
    *(Row(f"{_LAYER}self_attn.{a}.weight", f"{_OURS}attention.{b}.weight") for a, b in _ATTENTION),
    *(Row(f"{_LAYER}self_attn.{a}_proj.bias", f"{_OURS}attention.{a}_bias.weight") for a in "qkv"),
    Row(f"{_LAYER}self_attn.sinks", f"{_OURS}attention.sinks.weight"),
    Row(f"{_LAYER}self_attn.o_proj.bias", f"{_OURS}attention.out_bias.weight"),
    *(Row(f"{_LAYER}self_attn.{a}_norm.weight", f"{_OURS}attention.{a}_norm.weight") for a in "qk"),
    *(Row(f"{_LAYER}mlp.{a}.weight", f"{_OURS}ffn.{b}.weight") for a, b in _NETWORK),
)
_GRANITE = (("input_linear.weight", "experts.gate_up_proj"), ("output_linear.weight", "experts.down_proj"))
# scheme of tensor names -> a Row for each tensor of routers and experts. `stacked`: the scheme of transformers' modules and of some files,
# in which one tensor holds all experts
EXPERTS: dict[str, tuple[Row, ...]] = {
    "block_sparse_moe": (
        Row(f"{_LAYER}block_sparse_moe.gate.weight", f"{_OURS}router.weight"),
        *(Row(f"{_LAYER}block_sparse_moe.experts.{{e}}.{w}.weight", f"{_OURS}experts.{{e}}.{w}", turned=True) for w in ("w1", "w2", "w3")),
    ),
    "mlp": (
        Row(f"{_LAYER}mlp.gate.weight", f"{_OURS}router.weight"),
        *(Row(f"{_LAYER}mlp.experts.{{e}}.{a}.weight", f"{_OURS}experts.{{e}}.{b}", turned=True) for a, b in _NETWORK),
    ),
    "deepseek": (
        Row(f"{_LAYER}mlp.gate.weight", f"{_OURS}router.weight"),
        Row(f"{_LAYER}mlp.gate.e_score_correction_bias", f"{_OURS}router.bias"),
        *(Row(f"{_LAYER}mlp.experts.{{e}}.{a}.weight", f"{_OURS}experts.{{e}}.{b}", turned=True) for a, b in _NETWORK),
        *(Row(f"{_LAYER}mlp.shared_experts.{a}.weight", f"{_OURS}shared.{b}.weight") for a, b in _NETWORK),
    ),
    "gpt_oss": (
        Row(f"{_LAYER}mlp.router.weight", f"{_OURS}router.weight"),
        Row(f"{_LAYER}mlp.router.bias", f"{_OURS}router.logit_bias"),
        *(Row(f"{_LAYER}mlp.experts.gate_up_proj", f"{_OURS}experts.{{e}}.{w}", half=i, mixed=True) for i, w in enumerate(("w1", "w3"))),
        *(
            Row(f"{_LAYER}mlp.experts.gate_up_proj_bias", f"{_OURS}experts.{{e}}.{w}", half=i, mixed=True)
            for i, w in enumerate(("b1", "b3"))
        ),
        Row(f"{_LAYER}mlp.experts.down_proj", f"{_OURS}experts.{{e}}.w2"),
        Row(f"{_LAYER}mlp.experts.down_proj_bias", f"{_OURS}output_bias"),
    ),
    "granite": (
        *(Row(f"{_LAYER}block_sparse_moe.router.{a}weight", f"{_OURS}router.weight") for a in ("layer.", "")),
        *(Row(f"{_LAYER}block_sparse_moe.{a}", f"{_OURS}experts.{{e}}.w1", turned=True, half=0) for a in _GRANITE[0]),
        *(Row(f"{_LAYER}block_sparse_moe.{a}", f"{_OURS}experts.{{e}}.w3", turned=True, half=1) for a in _GRANITE[0]),
        *(Row(f"{_LAYER}block_sparse_moe.{a}", f"{_OURS}experts.{{e}}.w2", turned=True) for a in _GRANITE[1]),
    ),
    "shared": (
        *(Row(f"{_LAYER}mlp.shared_expert.{a}.weight", f"{_OURS}shared.{b}.weight") for a, b in _NETWORK),
        Row(f"{_LAYER}mlp.shared_expert_gate.weight", f"{_OURS}shared_gate.weight"),
    ),
    "switch": (),  # encoder_decoder.py has the rows of Switch Transformers' routers and experts
    "stacked": (
        Row(f"{_LAYER}mlp.gate.weight", f"{_OURS}router.weight"),
        Row(f"{_LAYER}mlp.experts.gate_up_proj", f"{_OURS}experts.{{e}}.w1", turned=True, half=0),
        Row(f"{_LAYER}mlp.experts.gate_up_proj", f"{_OURS}experts.{{e}}.w3", turned=True, half=1),
        Row(f"{_LAYER}mlp.experts.down_proj", f"{_OURS}experts.{{e}}.w2", turned=True),
    ),
}
# tensors of older files with such an ending are skipped: the recipe implies them, another tensor is equal, or no layer uses them
NOT_READ = ("rotary_emb.inv_freq", "coder.embed_tokens.weight", "EncDecAttention.relative_attention_bias.weight")


@dataclass(frozen=True)
class Key:
    """A key of config.json and the recipe's key with the same meaning. `theirs`: names in config.json; all are read, the first is written.
    `ours`: name in a recipe. `absent`: value that config.json means if the key is missing; REQUIRED: the key must be there. `values`: value
    in config.json -> value in the recipe; None: the values are equal."""

    theirs: tuple[str, ...]
    ours: str
    absent: Any = None
    values: Mapping[Any, Any] | None = None


REQUIRED = object()


def _key(theirs: str, ours: str, absent: Any = REQUIRED, values: Mapping[Any, Any] | None = None) -> Key:
    """Return a Key. `theirs`: its names in config.json, separated by "|"."""
    return Key(tuple(theirs.split("|")), ours, absent, values)


_SWITCH = {None: False, False: False, True: True}
_GATES = {True: "before_drop", False: "as_is"}
_DENSE = (
    _key("vocab_size", "model.vocab_size"), _key("num_hidden_layers", "model.num_layers"), _key("hidden_size", "model.d_model"),
    _key("num_attention_heads", "model.num_heads"), _key("num_key_value_heads", "model.num_kv_heads", None),
    _key("intermediate_size", "model.d_ff"), _key("max_position_embeddings", "model.max_length"),
    _key("rms_norm_eps", "model.norm_eps"), _key("tie_word_embeddings", "model.tied_embeddings", False),
)  # fmt: skip
_HEAD = _key("head_dim", "model.head_size", None)
_BIASES = tuple(_key("attention_bias", f"model.{ours}", False, _SWITCH) for ours in ("qkv_bias", "out_bias"))
_TOP_K, _D_FF = _key("num_experts_per_tok", "router.num_choices"), _key("moe_intermediate_size", "experts.d_ff")
_EXPERTS = _key("num_experts|num_local_experts", "experts.num_experts")
_CHOICES = (_TOP_K, _key("router_aux_loss_coef", "router.balance_weight", 0.001))
_RENORMALISED = _key("norm_topk_prob", "router.gates", False, _GATES)
_LATENT = (
    *(key for key in _DENSE if key.ours != "model.num_kv_heads"), _TOP_K, _D_FF,
    _key("qk_nope_head_dim", "model.head_size", 128), _key("kv_lora_rank", "model.latent.key_rank", 512),
    _key("q_lora_rank", "model.latent.query_rank", 1536), _key("qk_rope_head_dim", "model.latent.rotary_size", 64),
    _key("v_head_dim", "model.latent.value_size", 128),
)  # fmt: skip
_T5 = (
    _key("vocab_size", "model.vocab_size"), _key("d_model|hidden_size", "model.d_model"), _key("d_kv", "model.head_size"),
    _key("d_ff", "model.d_ff"), _key("num_heads|num_attention_heads", "model.num_heads"), _key("dropout_rate", "model.dropout", 0.1),
    _key("layer_norm_epsilon", "model.norm_eps", 1e-6), _key("tie_word_embeddings", "model.tied_embeddings", True),
)  # fmt: skip
_ALWAYS = {"model.ffn": "swiglu", "model.norm": "rmsnorm", "model.positions": "rotary"}
_ALWAYS_OF_T5 = {"model.kind": "encoder_decoder", "model.norm": "rmsnorm", "model.positions": "t5"}
_Must = Mapping[str, tuple[Any, ...]]
_MUST: _Must = {
    "hidden_act": ("silu",), "mlp_bias": (False, None), "clip_qkv": (None,), "partial_rotary_factor": (None, 1.0),
    "pretraining_tp": (1, None),
}  # fmt: skip
_MUST_OF_DEEPSEEK = {**_MUST, "attention_bias": (False, None), "moe_layer_freq": (1, None)}
_MUST_OF_T5: _Must = {
    "relative_attention_num_buckets": (32,), "relative_attention_max_distance": (128,), "decoder_start_token_id": (0, None),
    "is_encoder_decoder": (True,),
}  # fmt: skip


def _without(key: str) -> _Must:
    return {name: values for name, values in _MUST.items() if name != key}


@dataclass(frozen=True)
class Windows:
    """A family's rule for sliding windows. `layers` says which layers have a window: "every" layer; "from": layer max_window_layers and all
    later ones; "other": layers 0, 2, 4 and so on. layer_types in config.json replaces "from" and "other". `absent`: the window in tokens
    if config.json has no sliding_window. `asked`: windows apply only if config.json has use_sliding_window true; "other" then ends before
    layer max_window_layers."""

    layers: Literal["every", "from", "other"]
    absent: int | None = 4096
    asked: bool = True


@dataclass(frozen=True)
class Family:
    """One family of models. `architecture`: class in transformers. `keys`: keys of config.json with one counterpart in a recipe. `always`:
    recipe values that all models of the family have. `experts`: a key of EXPERTS; None: dense. `rows`: a Row for each other tensor.

    `must`: key of config.json -> its only supported values. `latent`: multi-head latent attention. `picks_layers`: decoder_sparse_step and
    mlp_only_layers choose the layers with experts. `leading`: the first layers are dense, and experts may be in groups. `halves`: the
    model has an encoder and a decoder. Without picks_layers, leading and halves, experts are in all layers. `base`, `turning`: defaults of
    rope_theta and partial_rotary_factor; `turning` None: all channels are rotated.
    """

    architecture: str
    keys: tuple[Key, ...]
    always: Mapping[str, Any]
    experts: str | None = None
    picks_layers: bool = False
    leading: bool = False
    latent: bool = False
    must: _Must = field(default_factory=lambda: _MUST)
    base: float = 10_000.0
    windows: Windows | None = None
    turning: float | None = None
    halves: bool = False
    rows: tuple[Row, ...] = ROWS

    @property
    def embedding(self) -> str:
        return "shared.weight" if self.halves else "model.embed_tokens.weight"


# model_type -> family; a run that fits several families is written as a model of the first
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", (*_DENSE, _HEAD, *_BIASES), _ALWAYS),
    "mistral": Family("MistralForCausalLM", (*_DENSE, _HEAD), _ALWAYS, windows=Windows("every", asked=False)),
    "qwen3": Family("Qwen3ForCausalLM", (*_DENSE, _HEAD, *_BIASES), _ALWAYS | {"model.qk_norm": "heads"}, windows=Windows("from")),
    "mixtral": Family(
        "MixtralForCausalLM",
        (*_DENSE, _HEAD, *_CHOICES, _key("num_local_experts|num_experts", "experts.num_experts"),
         _key("router_jitter_noise", "router.jitter", 0.0)),
        _ALWAYS | {"router.preset": "mixtral"},
        experts="block_sparse_moe", base=1e6, windows=Windows("every", absent=None, asked=False),
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        (*_DENSE, _HEAD, *_BIASES, *_CHOICES, _RENORMALISED, _EXPERTS, _D_FF),
        _ALWAYS | {"model.qk_norm": "heads", "router.preset": "qwen3_moe"},
        experts="mlp", picks_layers=True, windows=Windows("every"),
    ),
    "qwen2": Family("Qwen2ForCausalLM", (*_DENSE, _HEAD), _ALWAYS | {"model.qkv_bias": True}, windows=Windows("from")),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (*_DENSE, *_CHOICES, _RENORMALISED, _EXPERTS, _D_FF, _key("shared_expert_intermediate_size", "experts.shared_d_ff"),
         _key("qkv_bias", "model.qkv_bias", True)),
        _ALWAYS | {"experts.shared": 1, "experts.shared_gate": True, "router.preset": "qwen3_moe"},
        experts="mlp", picks_layers=True, windows=Windows("other"),
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        (*_DENSE, *_BIASES, *_CHOICES, _RENORMALISED, _EXPERTS, _key("clip_qkv", "model.clip_qkv", None)),
        _ALWAYS | {"model.qk_norm": "whole", "router.preset": "qwen3_moe"},
        experts="mlp", must=_without("clip_qkv"),
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (*_LATENT, _key("n_routed_experts|num_local_experts|num_experts", "experts.num_experts", 256),
         _key("n_shared_experts", "experts.shared", 1), _key("routed_scaling_factor", "router.gate_scale", 2.5),
         _key("norm_topk_prob", "router.gates", True, _GATES),
         _key("rope_interleave", "model.rope.pairs", True, {None: "halves", False: "halves", True: "neighbours"})),
        _ALWAYS | {"router.preset": "deepseek_v3"},
        experts="deepseek", leading=True, latent=True,
        must={**_MUST_OF_DEEPSEEK, "topk_method": ("noaux_tc", None), "scoring_func": ("sigmoid", None)},
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        (*_DENSE, _HEAD, _key("attention_bias", "model.qkv_bias", False, _SWITCH), _TOP_K, _D_FF,
         _key("use_qk_norm", "model.qk_norm", False, {False: "none", True: "heads"}),
         _key("n_routed_experts|num_local_experts|num_experts", "experts.num_experts", 128),
         _key("n_shared_experts", "experts.shared", 1), _key("routed_scaling_factor", "router.gate_scale", 1.0),
         _key("norm_topk_prob", "router.gates", True, _GATES)),
        _ALWAYS | {"router.preset": "deepseek_v3"},
        experts="deepseek", leading=True, must=_without("partial_rotary_factor"), turning=0.5,
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        (*_LATENT, _key("n_routed_experts|num_experts", "experts.num_experts", 64), _key("n_shared_experts", "experts.shared", 2),
         _key("routed_scaling_factor", "router.gate_scale", 1.0)),
        _ALWAYS | {"router.preset": "deepseek_v2", "model.rope.pairs": "neighbours"},
        experts="deepseek", leading=True, latent=True,
        must={**_MUST_OF_DEEPSEEK, "topk_method": ("group_limited_greedy", "greedy"), "scoring_func": ("softmax", None),
              "norm_topk_prob": (False, None)},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (*_DENSE, _key("head_dim", "model.head_size", 64), *_CHOICES, _key("num_local_experts|num_experts", "experts.num_experts"),
         *(_key("attention_bias", f"model.{ours}", True, {False: False, True: True}) for ours in ("qkv_bias", "out_bias")),
         _key("swiglu_alpha", "model.swiglu.alpha", 1.702), _key("swiglu_limit", "model.swiglu.limit", 7.0)),
        _ALWAYS | {"model.attention_sinks": True, "model.swiglu.offset": 1.0, "experts.biases": True, "router.preset": "gpt_oss"},
        experts="gpt_oss", base=150_000.0, windows=Windows("other", absent=128, asked=False),
    ),
    "granitemoe": Family(
        "GraniteMoeForCausalLM",
        (*_DENSE, *_BIASES, *_CHOICES, _key("num_local_experts|num_experts", "experts.num_experts", 8),
         _key("embedding_multiplier", "model.scales.embedding", 1.0), _key("residual_multiplier", "model.scales.residual", 1.0),
         _key("attention_multiplier", "model.scales.attention", 1.0), _key("logits_scaling", "model.scales.head", 1.0)),
        _ALWAYS | {"router.preset": "mixtral"},
        experts="granite",
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        (*_T5, _key("feed_forward_proj", "model.ffn", "relu", {"relu": "relu", "gated-gelu": "geglu"})),
        _ALWAYS_OF_T5,
        must=_MUST_OF_T5, halves=True,
    ),
    "switch_transformers": Family(
        "SwitchTransformersForConditionalGeneration",
        (*_T5, _key("num_experts", "experts.num_experts", 8), _key("router_jitter_noise", "router.jitter", 0.01),
         _key("router_aux_loss_coef", "router.balance_weight", 0.001), _key("router_z_loss_coef", "router.z_weight", 0.001)),
        _ALWAYS_OF_T5 | {"model.ffn": "relu", "router.preset": "switch"},
        experts="switch", must={**_MUST_OF_T5, "dense_act_fn": ("relu",), "router_bias": (False,), "router_dtype": ("float32",)},
        halves=True,
    ),
}  # fmt: skip
_SAME = {"kimi_k2": "deepseek_v3"}  # model_type whose published code is a copy of a family's code -> that family


def kind_of(config: Mapping[str, Any]) -> Any:
    """Return the config's model_type; if the model's code is a copy of a family's code (_SAME), that family's model_type."""
    kind = config.get("model_type")
    return _SAME.get(str(kind), kind)


# keys of config.json that do not change what the model computes, or that code outside of this file reads
_HARMLESS = """
    architectures model_type dtype torch_dtype transformers_version _name_or_path bos_token_id eos_token_id pad_token_id initializer_range
    quantization_config use_cache output_router_logits attention_dropout rope_parameters rope_theta rope_scaling
    max_window_layers layer_types sliding_window use_sliding_window
    initial_context_length experts_per_token
    qk_head_dim num_mtp_layers num_nextn_predict_layers aux_loss_alpha seq_aux ep_size first_k_dense_replace n_group topk_group
    num_layers num_decoder_layers num_sparse_encoder_layers num_sparse_decoder_layers encoder_sparse_step expert_capacity n_positions
    is_gated_act initializer_factor classifier_dropout task_specific_params add_router_probs dense_act_fn scale_decoder_outputs
    router_ignore_padding_tokens decoder_sparse_step mlp_only_layers tokenizer_class auto_map
    _attn_implementation_autoset unsloth_fixed unsloth_version
"""
HARMLESS = frozenset(_HARMLESS.split())
