"""config.json of published models, by itself: the makers' numbers of parameters, and hf:DIR as a recipe of `moe plan`, `show`, `train`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from moe.cli.main import main
from moe.convert.huggingface.config import recipe_values
from moe.convert.huggingface.convert import biases_of, shapes_of
from moe.recipe.changes import function_changes
from moe.recipe.load import build_run, load

_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": _FP8, "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002,
    "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096,
    "initializer_range": 0.02, "intermediate_size": 2880, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
    "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
    "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-5,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
                     "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], float]] = {  # config.json, and the parameters that the makers state, as precisely as they do
    "DeepSeek-V3": (_DEEPSEEK_V3, 671_026_419_200),
    "Kimi-K2": (
        _DEEPSEEK_V3
        | {"model_type": "kimi_k2", "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_routed_experts": 384}
        | {"vocab_size": 163840}
        | {"num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.827},
        1e12,
    ),
    "Moonlight-16B-A3B": (
        {key: value for key, value in _DEEPSEEK_V3.items() if key not in ("quantization_config", "rope_scaling")}
        | {"hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_group": 1, "topk_group": 1}
        | {"n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_key_value_heads": 16, "num_hidden_layers": 27}
        | {"num_experts_per_tok": 6, "first_k_dense_replace": 1, "q_lora_rank": None, "vocab_size": 163840, "rope_theta": 50000.0}
        | {"max_position_embeddings": 8192, "routed_scaling_factor": 2.446, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5},
        16e9,
    ),
    "DeepSeek-V2-Lite": (
        {"attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 10944, "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2",
         "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
         "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
         "num_key_value_heads": 16, "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
         "rms_norm_eps": 1e-6, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
         "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                          "original_max_position_embeddings": 4096, "type": "yarn"},
         "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400},
        15.7e9,
    ),
    "Qwen3-30B-A3B": (
        {"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
         "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
         "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
         "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None,
         "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None, "tie_word_embeddings": False,
         "use_sliding_window": False, "vocab_size": 151936},
        30.5e9,
    ),
    "OLMoE-1B-7B": (
        {"attention_bias": False, "clip_qkv": None, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
         "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 64,
         "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-5, "rope_scaling": None,
         "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False, "vocab_size": 50304},
        6.92e9,
    ),
    "gpt-oss-20b": (_GPT_OSS, 20_914_757_184),
    "gpt-oss-120b": (
        _GPT_OSS
        | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18},
        116_829_156_672,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_describes_the_published_number_of_parameters(name: str) -> None:
    config, published = CONFIGS[name]
    run = build_run(recipe_values(config))
    number = sum(math.prod(shape) for shape in (shapes_of(run) | biases_of(run)).values())
    digits = len(f"{published:.0f}".rstrip("0"))
    assert float(f"{number:.{digits - 1}e}") == published


RECIPES = {  # recipe in recipes/published/ -> its model in CONFIGS
    "deepseek_v3": "DeepSeek-V3", "qwen3_30b_a3b": "Qwen3-30B-A3B", "gpt_oss_20b": "gpt-oss-20b", "olmoe_1b_7b": "OLMoE-1B-7B",
    "deepseek_v2_lite": "DeepSeek-V2-Lite", "moonlight_16b": "Moonlight-16B-A3B",
}  # fmt: skip
LATER = {f"model.rope.{key}" for key in ("scaling", "factor", "mscale", "mscale_all", "trained_length")}


@pytest.mark.parametrize("name", RECIPES)
def test_a_published_recipe_is_the_model_of_its_config(name: str) -> None:
    """Both have the same parameters and the same function. Only DeepSeek's yarn, which came after pretraining, is not in the recipes."""
    mine, theirs = load(f"published/{name}")[0], build_run(recipe_values(CONFIGS[RECIPES[name]][0]))
    assert shapes_of(mine) == shapes_of(theirs) and biases_of(mine) == biases_of(theirs)
    changed = {change.key for change in function_changes(mine, theirs)} - {"data.tokenizer"}
    assert changed <= (LATER if name.startswith("deepseek") else set())


PLAN = "plan hf:gpt-oss-20b --cluster h100-8 --as_is --sharding.kind fsdp --train.global_batch 8 --recompute.kind full"
MORE = "--nproc 1 --data.path texts --train.report false --precision.compute fp32 --train.steps"
TRAIN = ["train", "hf:gpt-oss-20b", "--nproc", "1"]


@pytest.fixture
def gpt_oss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder `gpt-oss-20b` with the published config.json alone, in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-oss-20b").mkdir()
    (tmp_path / "gpt-oss-20b/config.json").write_text(json.dumps(_GPT_OSS))
    return tmp_path


def test_config_json_alone_is_a_recipe_for_plan_show_and_a_dry_run(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "hf:gpt-oss-20b"]) == 0
    assert "# 20.9 G parameters" in capsys.readouterr().out
    assert main([*TRAIN, "--dry-run", "--lora.rank", "4", "--force"]) == 0
    assert main(PLAN.split()) == 0
    assert "fsdp" in capsys.readouterr().out
    assert [path.name for path in gpt_oss.iterdir()] == ["gpt-oss-20b"]


def test_train_needs_the_tensors_and_says_so_in_one_line(gpt_oss: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(TRAIN) == 2
    assert "needed *.safetensors" in capsys.readouterr().err and [path.name for path in gpt_oss.iterdir()] == ["gpt-oss-20b"]
    assert main([*TRAIN, "--init_from", "runs/x"]) == 2
    assert "--init_from: got runs/x with hf:gpt-oss-20b" in capsys.readouterr().err
    assert main([*TRAIN, "--modell.x", "1"]) == 2
    assert "modell.x" in capsys.readouterr().err


def test_a_model_is_trained_by_its_folder_and_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """moe train hf:DIR is moe convert hf:DIR, then moe train with --init_from: equal losses; the same command continues it, and no
    other model does."""
    pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")
    from tests.moe.convert.test_huggingface import made

    monkeypatch.chdir(tmp_path)
    made(tmp_path / "model", "Qwen3Moe")
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/a.txt").write_text("one two three four. " * 400)
    more = MORE.split()
    assert main(["train", "hf:model", "--out", "one", *more, "2"]) == 0
    assert main(["convert", "hf:model", "base"]) == 0
    assert main(["train", "base/recipe.yaml", "--init_from", "base", "--out", "two", *more, "2"]) == 0
    assert losses(tmp_path / "one") == losses(tmp_path / "two") and len(losses(tmp_path / "one")) == 2
    assert main(["train", "hf:model", "--out", "one", *more, "3"]) == 0
    assert losses(tmp_path / "one")[:2] == losses(tmp_path / "two") and len(losses(tmp_path / "one")) == 3
    made(tmp_path / "other", "Llama")
    for folder in ("other", "missing"):
        capsys.readouterr()
        assert main(["train", f"hf:./{folder}", "--out", "one", *more, "4"]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: recipe: got hf:{folder}, needed the config.json of one/base") and said.count("\n") == 1
    fix = said.split("fix: moe ")[1].split(" continues")[0]
    assert main([*fix.split(), "--train.steps", "4"]) == 0 and len(losses(tmp_path / "one")) == 4


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]
