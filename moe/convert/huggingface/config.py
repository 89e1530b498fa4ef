"""Converts config.json to a recipe's values, and a run to a config.json, with the table of keys in families.py. Needs no torch.

recipe_values(config)          {"model": {...}, ...}; BadInput names the key that a recipe cannot express
config_of(run, kind, ends=)    a config.json for transformers; convert.py reads it back to check that it describes the same model

The table has keys with one counterpart each. Keys of these groups must be read together:

    use_sliding_window, sliding_window, layer_types        model.sliding_window, sliding_layers
    rope_parameters, or rope_theta and rope_scaling        model.rope
    decoder_sparse_step, mlp_only_layers                   model.moe_layers
    first_k_dense_replace                                  model.moe_layers                                DeepSeek, GLM
    topk_method, n_group, topk_group                       router.select, expert_groups, top_groups        DeepSeek, GLM

If mscale and mscale_all_dim of YaRN are not both set, transformers multiplies cos and sin by 0.1 ln(factor) + 1.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from moe.convert.huggingface import encoder_decoder
from moe.convert.huggingface.families import FAMILIES, HARMLESS, REQUIRED, Family, Key, Windows, kind_of
from moe.recipe.keys import flat
from moe.recipe.sections import Model, Rope, Run
from moe.recipe.shapes import NORM_EPS
from parallel.errors import BadInput, counted, some

LONGEST = 4096  # largest model.max_length that the conversion sets, because key-value caches have room for max_length tokens
_RIGHT_FILE = "take the config.json that belongs to the files"
# rope_type -> names in config.json of model.rope.low and model.rope.high
_LOWS = {"llama3": ("low_freq_factor", "high_freq_factor"), "yarn": ("beta_slow", "beta_fast")}
# keys that may remain in rope_parameters after `_rope` has read the others -> the values with which they have no effect
_SILENT = {"partial_rotary_factor": (1.0,), "mscale": (0,), "mscale_all_dim": (0,), "finetuned": (True, False)}
# model_type -> (first_k_dense_replace, n_group, topk_group) of a config without these keys
_LEADING: dict[str, tuple[int, int, int | None]] = {"deepseek_v2": (0, 1, None), "deepseek_v3": (3, 8, 4), "glm4_moe": (1, 1, 1)}


def family_of(config: dict[str, Any]) -> Family:
    """Return the family of the config's model_type. Raises BadInput for an unsupported one."""
    kind = kind_of(config)
    if kind not in FAMILIES:
        named = ", ".join(config.get("architectures") or ()) or "no architecture"
        got, needed, fix = f"{kind} ({named})", f"one of {some(FAMILIES, rest='docs/use/huggingface.md')}", "see: docs/use/huggingface.md"
        if _keeps_a_state(config):
            got, needed = f"{got}, which has layers of linear attention or Mamba", f"softmax attention in each layer: {needed}"
            fix = "take a model of these families, such as Qwen3-30B-A3B"
        raise BadInput("config.json: model_type", got=got, needed=needed, fix=fix)
    family = FAMILIES[kind]
    return encoder_decoder.for_layers(family, config) if family.halves else family


def _keeps_a_state(config: dict[str, Any]) -> bool:
    """Return whether the model has layers that read a recurrent state in place of the earlier tokens, such as Qwen3-Next's."""
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, dict)]
    names = [name for part in texts for name in part]
    kinds = [str(part.get("layer_types")) for part in texts]
    return any(map(re.compile("linear_attn_|linear_conv_|mamba_|ssm_").match, names)) or any("linear_attention" in kind for kind in kinds)


def recipe_values(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the recipe of the model that a config.json describes: section -> key -> value. Raises BadInput for unsupported values."""
    try:
        return _recipe_values(config)
    except BadInput:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        got = f"{type(error).__name__}: {error}"
        raise BadInput("config.json", got=got, needed="values of the form that transformers writes", fix=_RIGHT_FILE) from None


def _recipe_values(config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    family = family_of(config)
    for key, allowed in family.must.items():
        if config.get(key, allowed[-1]) not in allowed:
            _refuse(key, config[key], " or ".join("null" if one is None else str(one).lower() for one in dict.fromkeys(allowed)))
    values: dict[str, Any] = dict(family.always) | {key.ours: _given(key, config) for key in family.keys}
    known = {*HARMLESS, *family.must, *(name for key in family.keys for name in key.theirs)}
    known |= {"partial_rotary_factor"} if family.turning is not None else set()
    known |= {"head_dim", "num_key_value_heads"} if family.latent else set()  # transformers writes both, but does not use them
    for key, value in config.items():
        if key not in known and value not in (None, False, 0, [], {}, ""):
            fix = "take it out of config.json if it does not change what the model computes"
            raise BadInput(f"config.json: {key}", got=value, needed="a config without this key, which is not supported", fix=fix)
    if family.halves:
        return nested(values | encoder_decoder.recipe_values(family, config, values))
    values |= _windows(family, config)
    values |= {f"model.rope.{key}": value for key, value in _rope(config, family).items()}
    longer = values["model.rope.factor"] if values["model.rope.scaling"] == "dynamic" else 1
    values["model.max_length"] = min(int(values["model.max_length"] * longer), LONGEST)
    if family.leading:
        values |= _leading_and_groups(config)
    elif family.experts is not None:
        values |= _layers(config) if family.picks_layers else {"model.moe_every": 1}
    return nested(values)


def config_of(run: Run, model_type: str, *, ends: int | None = None) -> dict[str, Any]:
    """Return a config.json of the family `model_type` with the run's values; values that the family cannot have are left out. `ends`: id of
    the token that ends a text."""
    family, values = FAMILIES[model_type], flat(run) | {f"router.{key}": value for key, value in run.router}
    m = run.model
    if family.experts is not None and not any(key.ours == "experts.d_ff" for key in family.keys):
        values["model.d_ff"] = run.experts.d_ff or m.d_ff
    d_ff, counts = run.experts.d_ff or m.d_ff, sorted(set(run.experts.counts))
    kv_heads, head_size = m.num_kv_heads or m.num_heads, m.head_size or m.d_model // m.num_heads
    values |= {"experts.d_ff": d_ff, "experts.shared_d_ff": (run.experts.shared_d_ff or d_ff) * max(run.experts.shared, 1)}
    values |= {"experts.num_experts": counts[0] if len(counts) == 1 else counts, "model.vocab_size": run.vocab_size}
    values |= {"model.norm_eps": m.norm_eps or NORM_EPS[m.norm], "model.num_kv_heads": kv_heads}
    values |= {"model.head_size": head_size, "model.scales.attention": m.logit_scale}
    if m.latent.key_rank is not None:
        size = m.latent_sizes
        values |= {"model.latent.rotary_size": size.rotary, "model.latent.value_size": size.value}
    config: dict[str, Any] = {"architectures": [family.architecture], "model_type": model_type}
    for key in family.keys:
        back = {ours: theirs for theirs, ours in (key.values or {}).items()}
        config[key.theirs[0]] = back.get(values[key.ours], values[key.ours]) if back else values[key.ours]
    if family.halves:
        return config | encoder_decoder.config_of(family, run) | {"eos_token_id": ends}
    turning = m.rope.turning(head_size) if m.latent.key_rank is None else m.latent_sizes.rotary
    config = {"attention_bias": False} | config | {"hidden_act": "silu", "rope_parameters": _rope_parameters(m.rope, turning)}
    if m.rope.scaling == "dynamic":  # for this kind, transformers reads the trained length from max_position_embeddings
        config["max_position_embeddings"] = m.rope.length
    if family.turning is not None:
        config["rope_parameters"]["partial_rotary_factor"] = m.rope.fraction
    # null, because for a missing key transformers would use the family's default id
    config |= {"bos_token_id": None, "eos_token_id": ends, "pad_token_id": None}
    config |= _windows_of(family, m)
    parameters = config["rope_parameters"]
    config |= {"rope_theta": parameters["rope_theta"]} | ({"rope_scaling": parameters} if parameters["rope_type"] != "default" else {})
    if family.leading:
        sparse, method = m.layers_with_experts(), "group_limited_greedy" if run.router.select == "group_limited" else "greedy"
        config |= {"first_k_dense_replace": sparse[0] if sparse else m.num_layers, "num_key_value_heads": kv_heads}
        config |= {"n_group": run.router.expert_groups, "topk_group": run.router.top_groups}
        config |= {"topk_method": method} if model_type == "deepseek_v2" else {}
    if family.picks_layers:
        sparse = m.layers_with_experts()
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": [i for i in range(m.num_layers) if i not in sparse]}
    return config


def nested(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Convert dotted keys to nested ones: {"model.rope.base": 1e4} to {"model": {"rope": {"base": 1e4}}}."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        into = found
        for part in path:
            into = into.setdefault(part, {})
        into[last] = value
    return found


def _given(key: Key, config: dict[str, Any]) -> Any:
    """Return the recipe's value for a key of the table. Raises BadInput if config.json lacks it or has an unsupported value."""
    name = next((name for name in key.theirs if name in config), None)
    value = key.absent if name is None else config[name]
    if value is REQUIRED:
        raise BadInput(f"config.json: {key.theirs[0]}", got="nothing", needed="a value", fix=_RIGHT_FILE)
    if isinstance(value, list | dict) or (key.values is not None and value not in key.values):
        one_of = " or ".join(json.dumps(each) for each in key.values or ())
        _refuse(key.theirs[0] if name is None else name, value, one_of or "one value for all layers")
    return key.values[value] if key.values else value


_SLIDES = {True: "sliding_attention", False: "full_attention"}


def _windows(family: Family, config: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's values for sliding windows: the window, and the layers that have it. layer_types gives the layers; without it,
    the family's rule does."""
    rule, kinds = family.windows, config.get("layer_types") or []
    count = int(config["num_hidden_layers"])
    if (rule is None or rule.layers == "every") and set(kinds) - {_SLIDES[False]}:
        _refuse("layer_types", sorted(set(kinds)), "full_attention for all layers, or no such key: in this family, layers cannot differ")
    if set(kinds) - set(_SLIDES.values()) or len(kinds) not in (0, count):
        _refuse("layer_types", kinds, f"{' or '.join(_SLIDES.values())} for each of {counted(count, 'layer')}")
    asked = bool(config.get("use_sliding_window"))
    if rule is None and asked:
        _refuse("use_sliding_window", asked, "false: this family has no windows")
    window = None if rule is None or (rule.asked and not asked) else config.get("sliding_window", rule.absent)
    if kinds and rule is not None and rule.layers != "every":
        layers = [layer for layer, kind in enumerate(kinds) if kind == _SLIDES[True]]
    else:
        layers = [layer for layer in range(count) if rule is not None and _slides(rule, layer, config.get("max_window_layers", 28))]
    if window is None and _SLIDES[True] in kinds:
        _refuse("sliding_window", window, "a number of tokens, because layer_types has sliding layers")
    window = window if layers else None
    return {"model.sliding_window": window, "model.sliding_layers": layers if window is not None and len(layers) < count else None}


def _slides(rule: Windows, layer: int, border: int) -> bool:
    """Return whether a layer has a window by the family's rule. border: max_window_layers of config.json."""
    return {"every": True, "from": layer >= border, "other": layer % 2 == 0 and (layer < border or not rule.asked)}[rule.layers]


def _windows_of(family: Family, model: Model) -> dict[str, Any]:
    """Return the keys of config.json for a model's sliding windows."""
    if family.windows is None:
        return {}
    slides = [model.window_of(layer) is not None for layer in range(model.num_layers)]
    found: dict[str, Any] = {"sliding_window": model.sliding_window}
    found |= {"use_sliding_window": any(slides)} if family.windows.asked else {}
    return found | ({} if family.windows.layers == "every" else {"layer_types": [_SLIDES[each] for each in slides]})


def _rope(config: dict[str, Any], family: Family) -> dict[str, Any]:
    """Return key -> value of the section model.rope, from rope_parameters (transformers 5) or rope_theta and rope_scaling (earlier)."""
    given = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    found: dict[str, Any] = {"base": float(given.pop("rope_theta", None) or config.get("rope_theta") or family.base)}
    if family.turning is not None:
        given_first = given.pop("partial_rotary_factor", None), config.get("partial_rotary_factor")
        found["fraction"] = next((float(share) for share in given_first if share is not None), family.turning)
    kind = "none" if kind == "default" else kind
    if kind not in ("none", "linear", *_LOWS) and (kind != "dynamic" or family.latent):
        _refuse("rope_type", kind, f"default, linear, {'' if family.latent else 'dynamic, '}llama3 or yarn")
    found["scaling"] = kind
    if kind != "none":
        found["factor"] = float(given.pop("factor"))
    if kind == "dynamic":  # this kind has no original_max_position_embeddings in rope_parameters
        found["trained_length"] = int(config["max_position_embeddings"])
    if kind in _LOWS:
        found["trained_length"] = given.pop("original_max_position_embeddings", None) or config["max_position_embeddings"]
        for ours, theirs in zip(("low", "high"), _LOWS[kind], strict=True):
            value = given.pop(theirs, None)
            found |= {} if value is None else {ours: float(value)}
    if kind == "yarn" and not given.pop("truncate", True):
        found["whole_pairs"] = False
    if kind == "yarn" and family.latent:
        found |= _mscales(given)
    if kind == "yarn" and "mscale_all" not in found:  # moe/nn/rotary.py then multiplies cos and sin by `size`
        size, given_size = 0.1 * math.log(found["factor"]) + 1, given.pop("attention_factor", None)
        if given_size is not None and not math.isclose(given_size, size, rel_tol=1e-5):
            _refuse("rope_parameters.attention_factor", given_size, f"null, or {size:.7g}, which is 0.1 ln(factor) + 1")
    for key, value in given.items():
        if value is not None and value not in _SILENT.get(key, ()):
            _refuse(f"rope_parameters.{key}", value, "null: recipes have no such key")
    return found


def _rope_parameters(rope: Rope, channels: int) -> dict[str, Any]:
    """Return rope_parameters of config.json for heads with `channels` rotary channels. NTK scaling is written as a larger base."""
    kind = {"none": "default", "ntk": "default"}.get(rope.scaling, rope.scaling)
    found: dict[str, Any] = {"rope_theta": rope.base_of(channels), "rope_type": kind}
    if kind != "default":
        found["factor"] = rope.factor
    if rope.scaling in _LOWS:
        found["original_max_position_embeddings"] = rope.trained_length
        found |= dict(zip(_LOWS[rope.scaling], (rope.low, rope.most_turns), strict=True))
    found |= {"truncate": False} if not rope.whole_pairs else {}
    return found | ({"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all} if rope.mscale_all else {})


def _mscales(given: dict[str, Any]) -> dict[str, float]:
    """Remove mscale and mscale_all_dim from `given`, YaRN's parameters, and return the recipe's values for them. Raises BadInput for
    mscale_all_dim without mscale."""
    mscale, every = float(given.pop("mscale", None) or 0), float(given.pop("mscale_all_dim", None) or 0)
    if every and not mscale:
        _refuse("rope_parameters.mscale", "null", "mscale together with mscale_all_dim")
    return {"mscale": mscale, "mscale_all": every} if mscale and every else {}


def _leading_and_groups(config: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's values for DeepSeek's dense first layers and groups of experts. Raises BadInput for groups without topk_group."""
    kind, first = kind_of(config), config.get("first_k_dense_replace")
    dense, groups, top = _LEADING[kind]
    dense, groups, top = dense if first is None else int(first), config.get("n_group") or groups, config.get("topk_group") or top
    values: dict[str, Any] = {"model.moe_layers": list(range(dense, config["num_hidden_layers"]))} if dense else {"model.moe_every": 1}
    if groups == 1 or config.get("topk_method", "greedy" if kind == "deepseek_v2" else "noaux_tc") == "greedy":
        return values | {"router.select": "top_k", "router.expert_groups": 1, "router.top_groups": 1}
    if top is None:
        needed = f"how many of the {groups} groups a token may use"
        raise BadInput("config.json: topk_group", got="nothing", needed=needed, fix=_RIGHT_FILE)
    return values | {"router.select": "group_limited", "router.expert_groups": groups, "router.top_groups": top}


def _layers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the recipe's value for the layers that have experts, from decoder_sparse_step and mlp_only_layers."""
    every, dense, count = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or [], config["num_hidden_layers"]
    sparse = [layer for layer in range(count) if layer not in dense and (layer + 1) % every == 0]
    return {"model.moe_every": 1} if len(sparse) == count else {"model.moe_layers": sparse}


def _refuse(key: str, got: object, needed: str) -> None:
    raise BadInput(f"config.json: {key}", got=got, needed=needed, fix="no other value is supported: see docs/use/huggingface.md")
