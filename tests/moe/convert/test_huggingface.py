"""A model that transformers made and saved becomes a run with the same logits, trains on two ranks as on one, and is written back bitwise.

Only these tests detect exchanged gate and up projections, a tensor that both directions transpose wrongly, and another rotary base.
"""

from __future__ import annotations

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe.cli.main import main
from moe.convert.huggingface import convert, tensors
from moe.convert.huggingface.config import config_of, recipe_values
from moe.convert.huggingface.convert import from_run, to_run
from moe.data import load as load_tokenizer
from moe.data.tokenizer import Bytes, Given, Ids, check_separator
from moe.recipe.load import build_run, load
from moe.train.use import opened
from parallel.errors import BadInput
from parallel.store.stored import Reader
from tests.support import trained

transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 290, "max_position_embeddings": 48, "bos_token_id": None, "eos_token_id": 7, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24, "rope_theta": 1e5}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "rms_norm_eps": 1e-5, "attention_bias": True},
    "Mistral": {"head_dim": 10, "sliding_window": 16, "max_position_embeddings": 20}
    | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 1e4}},
    "Qwen3": {"head_dim": 10, "tie_word_embeddings": True, "rope_parameters": YARN},
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Qwen3Moe": EXPERTS
    | {"use_sliding_window": True, "sliding_window": 9}
    | {"moe_intermediate_size": 16, "mlp_only_layers": [0], "head_dim": 10, "norm_topk_prob": True},
    "Qwen2": {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    "Qwen2Moe": EXPERTS
    | {"use_sliding_window": True, "sliding_window": 20}
    | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2},
    "Olmoe": EXPERTS | {"clip_qkv": 0.4} | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}
FAMILIES["DeepseekV3"] = {
    "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "routed_scaling_factor": 1.7, "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2},
}  # fmt: skip
FAMILIES["DeepseekV2"] = FAMILIES["DeepseekV3"] | {"topk_method": "group_limited_greedy", "q_lora_rank": None}
FAMILIES["Glm4Moe"] = {
    "head_dim": 12, "attention_bias": True, "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 4,
    "topk_group": 2, "n_shared_experts": 2, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "routed_scaling_factor": 1.3,
    "rope_parameters": YARN | {"partial_rotary_factor": 1 / 3},
}  # fmt: skip
FAMILIES["GptOss"] = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 10, "sliding_window": 9, "swiglu_limit": 0.9, "intermediate_size": 20,
    "rope_parameters": YARN | {"truncate": False},
}  # fmt: skip
FAMILIES["GraniteMoe"] = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "attention_bias": True, "embedding_multiplier": 1.7, "residual_multiplier": 0.6,
    "attention_multiplier": 0.3, "logits_scaling": 2.2,
}  # fmt: skip
TOKENS = torch.randint(290, (2, 31), generator=torch.Generator().manual_seed(5))


def made(folder: Path, family: str, *, dtype: torch.dtype = torch.float32, **saving: Any) -> Any:
    """Return a transformers model with random weights, also in norms, and save it in the folder."""
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family]))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(1 + 0.3 * noise if name.endswith("norm.weight") else 0.2 * noise)
    model.to(dtype).save_pretrained(folder, **saving)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        out = model(TOKENS)
    return (out.logits_BLV if hasattr(out, "logits_BLV") else out.logits).float()


def files(folder: Path) -> dict[str, Tensor]:
    return {key: value for path in folder.glob("*.safetensors") for key, value in load_file(path).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_transformers_and_the_way_back_is_exact(family: str, tmp_path: Path) -> None:
    theirs = made(tmp_path / "a", family)
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    got, want = logits(opened.open(tmp_path / "run").model), logits(theirs)
    assert float((got - want).abs().max() / want.abs().max()) < 3e-6
    from_run(tmp_path / "run", tmp_path / "b")
    before, after = files(tmp_path / "a"), files(tmp_path / "b")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "b/config.json").read_text()) == json.loads((tmp_path / "a/config.json").read_text())


def test_files_are_those_of_safetensors_with_one_tensor_in_memory(tmp_path: Path) -> None:
    """Files of several dtypes are save_file's byte for byte, and a tensor is freed before the next is read."""
    dtypes, draws = (torch.bfloat16, torch.float32, torch.float16, torch.float64), torch.Generator().manual_seed(2)
    shapes: list[tuple[int, ...]] = [(3, 5), (7,), (), (2, 3, 4), (0, 2), (1, 1)]
    held = {f"é{n % 3}.{'b' * n}": torch.randn(shape, generator=draws).to(dtypes[n % 4]) for n, shape in enumerate(shapes)}
    alive: list[weakref.ref[Tensor]] = []

    def read(key: str) -> Tensor:
        assert all(ref() is None for ref in alive)
        alive.append(weakref.ref(found := held[key].clone()))
        return found

    (tmp_path / "a").mkdir()
    tensors.write(tmp_path / "a", {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in held.items()}, read)
    save_file(held, tmp_path / "b", metadata={"format": "pt"})
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b").read_bytes() and len(alive) == len(held)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2", "Qwen2Moe", "Qwen3Moe", "Olmoe"])
def test_a_run_without_its_config_is_written_as_its_family(family: str, tmp_path: Path) -> None:
    made(tmp_path / "a", family)
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    (tmp_path / "run/huggingface/config.json").unlink()
    from_run(tmp_path / "run", tmp_path / "b")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()
    assert type(again).__name__ == f"{family}ForCausalLM"
    assert torch.equal(logits(again), logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a").eval()))


def test_files_may_be_many_and_experts_stacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 model in many files without an index, and one with stacked experts, give the same run, which is written back as many files."""
    theirs = made(tmp_path / "a", "Qwen3Moe", dtype=torch.bfloat16, max_shard_size="20KB")
    assert len(list((tmp_path / "a").glob("*.safetensors"))) > 2
    (tmp_path / "a/model.safetensors.index.json").unlink()
    made(tmp_path / "stacked", "Qwen3Moe", dtype=torch.bfloat16)
    save_file({key: value.contiguous() for key, value in theirs.state_dict().items()}, tmp_path / "stacked/model.safetensors")
    assert "model.layers.1.mlp.experts.gate_up_proj" in files(tmp_path / "stacked")
    monkeypatch.setattr(tensors, "FILE_BYTES", 20_000)
    for source in ("a", "stacked"):
        to_run(tmp_path / source, tmp_path / f"{source}.run", overrides={})
        from_run(tmp_path / f"{source}.run", tmp_path / f"{source}.back")
        assert len(list((tmp_path / f"{source}.back").glob("*.safetensors"))) > 2
        before, after = files(tmp_path / "a"), files(tmp_path / f"{source}.back")
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a.back")
    assert again.dtype == torch.bfloat16 and all(torch.equal(p, q) for p, q in zip(again.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize("stacked", ["layers.1.", "gate_up_proj", "down_proj"])
def test_experts_may_be_stacked_in_some_layers_or_matrices_alone(stacked: str, tmp_path: Path) -> None:
    """Files in which only the experts of one layer, or only one matrix of all experts, are stacked are read; they are written unstacked."""
    held, apart = made(tmp_path / "a", "Mixtral").state_dict(), files(tmp_path / "a")
    stacks = {key: value.contiguous() for key, value in held.items() if ".mlp.experts." in key and stacked in key}
    assert len(stacks) == 2

    def stack_of(key: str) -> str:
        layer, _, rest = key.partition(".block_sparse_moe.experts.")
        return f"{layer}.mlp.experts.{'down_proj' if '.w2.' in rest else 'gate_up_proj'}"

    save_file({key: value for key, value in apart.items() if stack_of(key) not in stacks} | stacks, tmp_path / "a/model.safetensors")
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    from_run(tmp_path / "run", tmp_path / "b")
    after = files(tmp_path / "b")
    assert after.keys() == apart.keys() and all(torch.equal(after[key], apart[key]) for key in apart)


def tokenizer(folder: Path) -> Any:
    """Return a byte-level BPE tokenizer with 290 ids, and save it in the folder. The tests end texts with id 7."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Tokenizer(models.BPE())
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [f"<|{i}|>" for i in range(8)]
    trainer = trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, special_tokens=special, show_progress=False)
    library.train_from_iterator([trained.words(400, seed=1)], trainer)
    library.save(str(folder / "tokenizer.json"))
    return library


def test_a_prompt_begins_as_its_tokenizer_begins_texts_and_no_text_is_cut_or_filled(tmp_path: Path) -> None:
    from tokenizers import processors

    library = tokenizer(tmp_path)
    texts = ["abc deaf abc", "deaf", ""]
    plain = [library.encode(text).ids for text in texts]
    library.post_processor = processors.TemplateProcessing(single="<|1|> $A <|7|>", special_tokens=[("<|1|>", 1), ("<|7|>", 7)])
    library.enable_truncation(2)
    library.enable_padding()
    mine = Given(json.loads(library.to_str()), 7)
    assert [ids.tolist() for ids in mine.encode_pieces(texts)] == plain and len(plain[0]) > 2
    assert [mine.beginning(text) for text in texts] == [[1, *ids] for ids in plain]
    assert mine.beginning("<|1|>deaf") == [1, *plain[1]]
    library.post_processor = processors.TemplateProcessing(single="$A <|7|>", special_tokens=[("<|7|>", 7)])
    ended = Given(json.loads(library.to_str()), 7)
    assert [ended.beginning(text) for text in texts] == [plain[0], plain[1], [7]]


@pytest.mark.parametrize("separator", [None, 6])
def test_documents_are_told_apart_by_the_tokenizers_own_id(separator: int | None, tmp_path: Path) -> None:
    ours = Given(json.loads(tokenizer(tmp_path).to_str()), 7)
    with pytest.raises(BadInput, match=r"document_separator: got .*, needed 7, .* set it to 7"):
        check_separator(ours, separator)
    check_separator(ours, 7)
    check_separator(Ids(290), separator)
    assert ours.bytes_per_id[7] == 1 and ours.token_bytes[7] == b"<|7|>"  # a separator counts as one byte in bits per byte


def test_a_converted_run_generates_evaluates_and_trains(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder converted by `moe convert` works with `moe generate` and `moe eval`; a training step from its weights on ep 2 equals a step
    of one process; the trained run is written back with its tokenizer."""
    made(tmp_path / "a", "Mixtral")
    library, run_dir = tokenizer(tmp_path / "a"), tmp_path / "run"
    assert main(["convert", f"hf:{tmp_path / 'a'}", str(run_dir), "--model.max_length", "16", "--data.path", str(home / "text.txt")]) == 0
    assert "not used" not in capsys.readouterr().out
    mine = load_tokenizer(Reader(run_dir / "checkpoints/step-0").state["tokenizer"])
    text = "abc deaf héé 雪\n"
    assert mine.encode(text).tolist() == library.encode(text).ids and mine.decode(mine.encode(text)) == text and mine.separator == 7
    assert main(["generate", str(run_dir), "--prompt", "abc", "--tokens", "4"]) == 0
    assert main(["eval", str(run_dir), "--sequences", "4"]) == 0
    step = {"train.steps": "1", "train.global_batch": "4", "train.eval_sequences": "4", "train.sample_tokens": "0", "train.report": "false",
            "train.measure_speed": "false", "optimizer.warmup_steps": "0"}  # fmt: skip
    run = load(str(run_dir / "recipe.yaml"), step)[0]
    two = trained.train(run, tmp_path / "two", ranks=2, init_from=run_dir)[0]
    one = trained.train(run, tmp_path / "one", init_from=run_dir)[0]
    again = trained.train(run, run_dir)[0]  # in the converted run itself, whose checkpoint has no moments
    assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5) and again["validation_loss"] == one["validation_loss"]
    from_run(tmp_path / "one", tmp_path / "b")
    fast = transformers.AutoTokenizer.from_pretrained(tmp_path / "b")
    assert fast(text)["input_ids"] == library.encode(text).ids and fast.eos_token_id == 7
    assert not all(torch.equal(x, y) for x, y in zip(files(tmp_path / "a").values(), files(tmp_path / "b").values(), strict=True))


def test_plain_bytes_are_a_tokenizer_of_transformers(tmp_path: Path) -> None:
    """A model trained on plain bytes is exported with a tokenizer.json of bytes. If the model came with another tokenizer, a line says why
    there is none."""
    made(tmp_path / "a", "Mixtral")
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    assert from_run(tmp_path / "run", tmp_path / "none")[1:] == ["no tokenizer.json: this run reads plain bytes"]
    (tmp_path / "run/huggingface/config.json").unlink()
    assert len(from_run(tmp_path / "run", tmp_path / "b")) == 1
    library, text = transformers.AutoTokenizer.from_pretrained(tmp_path / "b"), "abc  de'f\théé 雪\r\n\u0100"
    assert library(text)["input_ids"] == Bytes().encode(text).tolist() and library.decode(library(text)["input_ids"]) == text
    assert library.eos_token_id == 0 and Given(Bytes.for_others(), 0).encode(text).tolist() == Bytes().encode(text).tolist()


def changed(folder: Path, **config: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_what_is_not_covered_or_broken_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    made(tmp_path / "a", "Mistral")
    whole, config = load_file(tmp_path / "a/model.safetensors"), (tmp_path / "a/config.json").read_text()
    up, gain = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    cases: list[tuple[dict[str, Any], dict[str, Tensor | None], str]] = [
        ({"model_type": "gemma3"}, {}, r"config.json: model_type: got gemma3 \(MistralForCausalLM\), needed one of llama, mistral"),
        (
            {"model_type": "qwen3_next", "linear_conv_kernel_dim": 4},
            {},
            "got qwen3_next .*which has layers of linear attention or Mamba, needed softmax attention in each layer: one of llama, .*"
            "fix: take a model of these families, such as Qwen3-30B-A3B$",
        ),
        ({"attention_bias": True}, {}, "config.json: attention_bias: got True, needed a config without this key, which is not supported"),
        ({"hidden_act": "gelu"}, {}, "config.json: hidden_act: got gelu, needed silu"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "config.json: layer_types: got .*needed full_attention for all"),
        ({"logit_softcap": 30.0}, {}, "config.json: logit_softcap: got 30.0, needed a config without this key, which is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            {},
            "config.json: rope_type: got longrope, needed default, .* dynamic",
        ),
        ({"num_hidden_layers": 3}, {}, "no tensor for layers.2.attention_norm.weight, needed model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, {}, "tensor model.layers.1.input_layernorm.weight and 8 more: got a tensor that nothing reads"),
        ({"intermediate_size": 41}, {}, r"tensor model.layers.0.mlp.gate_proj.weight: got shape \[40, 24\], needed \[41, 24\]"),
        ({}, {up: None}, f"needed {up}"),
        ({}, {gain: torch.full((24,), torch.nan)}, f"tensor {gain}: got values that are not finite"),
        ({}, {gain: torch.ones(24, dtype=torch.int64)}, f"tensor {gain}: got values of int64"),
        ({"tie_word_embeddings": True}, {}, "tensor lm_head.weight: got another matrix"),
    ]
    for values, other, said in cases:
        (tmp_path / "a/config.json").write_text(config)
        changed(tmp_path / "a", **values)
        save_file({key: value for key, value in (whole | other).items() if value is not None}, tmp_path / "a/model.safetensors")
        with pytest.raises(BadInput, match=said):
            to_run(tmp_path / "a", tmp_path / "run", overrides={})
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a"], said
    with pytest.raises(BadInput, match="--model.num_heads: got a key that config.json decides"):
        to_run(tmp_path / "a", tmp_path / "run", overrides={"model.num_heads": "2"})


def test_a_run_that_no_family_can_describe_is_refused_with_a_key(home: Path, tmp_path: Path) -> None:
    trained.train(trained.recipe(home, train={"steps": 1}), tmp_path / "run")
    said = "FROM_RUN: got model.ffn gelu, needed model.ffn swiglu, .*families: llama, mistral, qwen3"  # the nearest family has swiglu only
    with pytest.raises(BadInput, match=said):
        from_run(tmp_path / "run", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def config(family: str, **values: Any) -> dict[str, Any]:
    """Return the config.json of a small model of this family, with these values."""
    found: dict[str, Any] = json.loads(getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family])).to_json_string())
    return found | values


def test_broken_values_of_a_config_are_one_line() -> None:
    scaled = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 24}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("Llama", {"rope_parameters": {"rope_type": "linear"}}, "config.json: got KeyError: 'factor'"),
        ("Llama", {"rope_parameters": None, "rope_scaling": "yarn"}, "config.json: got ValueError"),
        ("Llama", {"max_position_embeddings": None}, "config.json: got TypeError"),
        ("Llama", {"rope_parameters": scaled | {"factor": None}}, "config.json: got TypeError"),
        ("Llama", {"model_type": ["llama"]}, "config.json: got TypeError"),
        ("Llama", {"use_sliding_window": True}, "config.json: use_sliding_window: got True, needed false"),
        (
            "Qwen3",
            {"layer_types": ["chunked_attention"] * 2},
            "config.json: layer_types: got .*, needed sliding_attention or full_attention",
        ),
        ("Qwen3", {"layer_types": ["sliding_attention", "full_attention"]}, "config.json: sliding_window: got None, needed a number"),
        ("Qwen3Moe", {"norm_topk_prob": None}, "config.json: norm_topk_prob: got None, needed true or false"),
        ("Qwen3Moe", {"num_experts": [4, 6]}, r"config.json: num_experts: got \[4, 6\], needed one value"),
        ("Llama", {"rope_parameters": scaled | {"attention_factor": 1.0}}, "attention_factor: got 1.0, needed null, or 1.069315,"),
        ("Llama", {"rope_parameters": scaled | {"mscale": 1.0, "mscale_all_dim": 1.0}}, "rope_parameters.mscale: got 1.0"),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("Llama", {"partial_rotary_factor": 0.5}, "config.json: partial_rotary_factor: got 0.5, needed null or 1.0"),
        (
            "DeepseekV2",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type: got dynamic, needed default, linear, llama3",
        ),
        (
            "DeepseekV2",
            {"topk_group": None},
            "config.json: topk_group: got nothing, needed how many of the 4 groups a token may use",
        ),
    ]
    for family, values, said in cases:
        with pytest.raises(BadInput, match=said):
            recipe_values(config(family, **values))
    for family, top in (("DeepseekV3", 4), ("Glm4Moe", 1)):  # transformers' defaults of topk_group
        without = {key: value for key, value in config(family).items() if key != "topk_group"}
        assert recipe_values(without)["router"]["top_groups"] == top == getattr(transformers, f"{family}Config")().topk_group
    harmless = {"attention_factor": 0.1 * math.log(2) + 1, "mscale": 0, "partial_rotary_factor": 1.0, "truncate": True, "finetuned": True}
    plain = recipe_values(config("Llama", rope_parameters=scaled))
    assert recipe_values(config("Llama", rope_parameters=scaled | harmless)) == plain


def test_ntk_scaling_is_written_as_a_larger_base_of_the_rotary_channels() -> None:
    rope = {"scaling": "ntk", "factor": 3.0, "fraction": 0.5}
    model = {"d_model": 24, "num_heads": 3, "head_size": 12, "moe_layers": [1], "num_layers": 2, "positions": "rotary", "rope": rope}
    run = build_run({"model": model | {"norm": "rmsnorm", "ffn": "swiglu"}, "router": {"preset": "deepseek_v3"}})
    given = config_of(run, "glm4_moe")
    assert given["rope_theta"] == given["rope_parameters"]["rope_theta"] == pytest.approx(1e4 * 3 ** (6 / 4))
    assert given["rope_parameters"]["rope_type"] == "default" and "rope_scaling" not in given


def test_a_config_without_a_base_has_its_familys(tmp_path: Path) -> None:
    for family in FAMILIES:
        given = config(family)
        del given["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(given))
        base = transformers.AutoConfig.from_pretrained(tmp_path).rope_parameters["rope_theta"]
        assert recipe_values(given)["model"]["rope"]["base"] == base, family


def test_the_sliding_window_survives_longer_sequences_and_a_changed_config(tmp_path: Path) -> None:
    """The window of 16 is read although max_length is 40, and is written although the kept config.json was changed to 17. A config.json
    without sliding_window has the family's window."""
    made(tmp_path / "a", "Mistral")
    to_run(tmp_path / "a", tmp_path / "run", overrides={"model.max_length": "40"})
    assert opened.open(tmp_path / "run").model.config.sliding_window == 16
    path = tmp_path / "run/huggingface/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sliding_window": 17}))
    from_run(tmp_path / "run", tmp_path / "b")
    written = json.loads((tmp_path / "b/config.json").read_text())
    assert written["model_type"] == "mistral" and written["sliding_window"] == 16
    given = json.loads((tmp_path / "a/config.json").read_text())
    del given["sliding_window"]
    assert recipe_values(given)["model"]["sliding_window"] == 4096


@pytest.mark.parametrize(
    ("family", "values", "layers"),
    [
        ("Mistral", {"sliding_window": 16}, [0, 1, 2]),
        ("Mistral", {"sliding_window": None}, []),
        ("Mixtral", {}, []),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, [1, 2]),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 28}, []),
        ("Qwen3", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 1}, []),
        ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2}, [0]),
        ("Qwen2Moe", {"use_sliding_window": True, "sliding_window": 16}, [0, 2]),
        ("Qwen3Moe", {"use_sliding_window": True, "sliding_window": 16, "mlp_only_layers": []}, [0, 1, 2]),
    ],
)
def test_windows_are_in_the_layers_that_transformers_gives_them(family: str, values: dict[str, Any], layers: list[int]) -> None:
    """Layers have the windows that transformers' own config gives them, from a config.json with or without layer_types; and a config.json
    written from the run gives the same."""
    sizes = SIZES | FAMILIES[family] | {"num_hidden_layers": 3, "sliding_window": None} | values
    theirs = getattr(transformers, f"{family}Config")(**sizes)
    if hasattr(theirs, "layer_types"):
        assert [layer for layer, kind in enumerate(theirs.layer_types) if kind == "sliding_attention"] == layers
    saved = json.loads(theirs.to_json_string())
    for given in (saved, {key: value for key, value in saved.items() if key != "layer_types"}):
        model = build_run(recipe_values(given)).model
        assert [layer for layer in range(3) if model.window_of(layer) == 16] == layers, given
        again = config_of(build_run(recipe_values(given)), given["model_type"])
        assert [build_run(recipe_values(again)).model.window_of(layer) for layer in range(3)] == [
            model.window_of(layer) for layer in range(3)
        ]
        read = transformers.AutoConfig.for_model(**again)
        assert getattr(read, "layer_types", None) == getattr(theirs, "layer_types", None)


def test_a_config_made_from_a_run_has_all_that_transformers_reads() -> None:
    """`config_of` writes the ids that begin and end texts, and every width. A value that the family cannot have gives an error that names
    its key."""
    for family in FAMILIES:
        written = config_of(build_run(recipe_values(given := config(family))), given["model_type"], ends=7)
        assert [written[f"{what}_token_id"] for what in ("bos", "eos", "pad")] == [None, 7, None], family
        transformers.AutoConfig.for_model(**written)
    values = recipe_values(config("Qwen2Moe"))
    values["experts"] |= {"d_ff": 12, "shared_d_ff": None, "shared": 2}
    run = build_run(values)
    assert config_of(run, "qwen2_moe")["shared_expert_intermediate_size"] == 24 and config_of(run, "qwen2_moe")["eos_token_id"] is None
    values["experts"] |= {"num_experts": [6]}
    assert config_of(build_run(values), "qwen2_moe")["num_experts"] == 6
    for section, key, value, said in (
        ("experts", "num_experts", [4, 6], "num_experts"),
        ("router", "gates", "after_drop", "norm_topk_prob"),
    ):
        values = recipe_values(config("Qwen3Moe", mlp_only_layers=[]))
        values[section] |= {key: value}
        with pytest.raises(BadInput, match=f"config.json: {said}: got"):
            recipe_values(config_of(build_run(values), "qwen3_moe"))


def test_files_that_are_not_the_models_are_left_alone(tmp_path: Path) -> None:
    """Ignored: a second copy with Mistral's names, files that the index does not name, and a user's folder named like a temporary one."""
    made(tmp_path / "a", "Mistral", max_shard_size="20KB")
    whole = tmp_path / "a"
    save_file({"layers.0.attention.wq.weight": torch.ones(3)}, whole / "consolidated.safetensors")
    save_file({"more": torch.ones(3)}, whole / "more.safetensors")
    (tmp_path / "run.partial").mkdir()
    (tmp_path / "run.partial/mine").touch()
    to_run(whole, tmp_path / "run", overrides={})
    assert (tmp_path / "run.partial/mine").exists()
    (whole / "more.safetensors").unlink()
    (whole / "model.safetensors.index.json").write_text("{")
    to_run(whole, tmp_path / "again", overrides={})
    shutil.copyfile(next(whole.glob("model-*")), whole / "model.safetensors")
    with pytest.raises(BadInput, match="needed each tensor once"):
        to_run(whole, tmp_path / "third", overrides={})


def test_a_run_on_ids_comes_without_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "a", "Mixtral")
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    shutil.rmtree(tmp_path / "run/huggingface")

    whole = convert.whole

    def of_ids(path: Path) -> Any:
        reader = whole(path)
        reader.state["tokenizer"] = Ids(290).describe()
        return reader

    monkeypatch.setattr(convert, "whole", of_ids)
    assert from_run(tmp_path / "run", tmp_path / "b")[1:] == ["no tokenizer.json: this run reads ids"]
    assert json.loads((tmp_path / "b/config.json").read_text())["eos_token_id"] is None
