"""A T5 and a Switch that transformers made and saved become runs with the same logits, and are written back bitwise.

Only these tests detect exchanged encoder and decoder layers, another choice of layers with experts, and a capacity that grows with length.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moe.convert.huggingface.convert import from_run, to_run
from moe.convert.huggingface.encoder_decoder import NO_MORE
from moe.nn.context import Context
from moe.train.use import opened
from parallel.errors import BadInput

transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

SIZES = {"d_model": 24, "d_kv": 5, "d_ff": 20, "num_heads": 3, "vocab_size": 290, "dropout_rate": 0.0, "decoder_start_token_id": 0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("T5", {"num_layers": 2}),
    "t5_v1.1": ("T5", {"num_layers": 1, "num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}),
    "switch": (
        "SwitchTransformers",
        {"num_layers": 4, "num_decoder_layers": 2, "num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "num_experts": 3}
        | {"expert_capacity": 6, "router_jitter_noise": 0.0},
    ),
}


def made(folder: Path, name: str) -> Any:
    family, values = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **values)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + float("layer_norm" in key))
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_theirs_and_there_and_back_is_exact(name: str, tmp_path: Path) -> None:
    theirs = made(tmp_path / "theirs", name)
    to_run(tmp_path / "theirs", tmp_path / "run", overrides={})
    ours = opened.open(tmp_path / "run").model
    generator = torch.Generator().manual_seed(5)
    read, written = (torch.randint(1, 290, (2, length), generator=generator) for length in (31, 9))
    with torch.no_grad():
        want = theirs(input_ids=read, decoder_input_ids=written).logits
        tokens = torch.cat([read, written], dim=1)
        found = ours(tokens, Context.of(tokens, source=31))
    torch.testing.assert_close(found.logits_BLV, want, rtol=0, atol=3e-6 * want.abs().max().item())
    if name == "switch":
        assert [layer.layer for layer in found.layers] == [1, 3, 5] and sum(int(layer.dropped) for layer in found.layers) > 0
        assert ours.router_spec.eval_capacity_factor == NO_MORE and ours.router_spec.min_capacity == 6
    from_run(tmp_path / "run", tmp_path / "back")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    assert before.keys() == after.keys() and all(before[key].equal(after[key]) for key in before)


@pytest.mark.parametrize("name", MODELS)
def test_a_config_that_is_made_says_the_same_model(name: str, tmp_path: Path) -> None:
    made(tmp_path / "theirs", name)
    to_run(tmp_path / "theirs", tmp_path / "run", overrides={})
    kept = tmp_path / "run" / "huggingface" / "config.json"
    kept.rename(tmp_path / "kept.json")
    from_run(tmp_path / "run", tmp_path / "back")
    old, new = (json.loads(path.read_text()) for path in (tmp_path / "kept.json", tmp_path / "back" / "config.json"))
    for key in ("d_model", "d_kv", "num_layers", "num_decoder_layers", "feed_forward_proj", "num_sparse_encoder_layers", "expert_capacity"):
        assert old.get(key) == new.get(key), key


def test_a_run_of_bytes_goes_there_and_back_with_its_sentinels(tmp_path: Path) -> None:
    """A run of bytes with two sentinels among 258 ids, written for transformers and read back, has the same sentinels and length; the
    written tokenizer.json spells the sentinels."""
    family, values = MODELS["switch"]
    config = getattr(transformers, f"{family}Config")(**SIZES | {"vocab_size": 258}, **values, n_positions=33)
    getattr(transformers, f"{family}ForConditionalGeneration")(config).save_pretrained(tmp_path / "theirs")
    to_run(tmp_path / "theirs", tmp_path / "run", overrides={})
    (tmp_path / "run/huggingface/config.json").unlink()
    assert len(from_run(tmp_path / "run", tmp_path / "back")) == 1
    library = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert library("a<extra_id_1>b<extra_id_0>")["input_ids"] == [97, 256, 98, 257, 0]
    assert not any("not used" in line for line in to_run(tmp_path / "back", tmp_path / "again", overrides={}))
    run = opened.open(tmp_path / "again")
    model, tokenizer = run.model, run.tokenizer
    assert (model.config.max_length, model.vocab_size, tokenizer.describe()["kind"]) == (33, 258, "bytes")


@pytest.mark.parametrize(("ids", "length", "used"), [(288, 33, True), (289, 33, False), (289, 8, True), (290, 8, False)])
def test_a_tokenizer_leaves_ids_for_the_sentinels_or_is_not_used(ids: int, length: int, used: bool, tmp_path: Path) -> None:
    """A tokenizer is used only if it leaves the last ids of 290 for the sentinels: two if the encoder reads 33 tokens, else one."""
    made(tmp_path / "theirs", "t5")
    library = Tokenizer(models.BPE({character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens(["</s>", *(f"<extra_id_{n}>" for n in range(ids - 257))])
    library.save(str(tmp_path / "theirs" / "tokenizer.json"))
    said = to_run(tmp_path / "theirs", tmp_path / "run", overrides={"model.max_length": str(length)})
    assert any("tokenizer.json is not used" in line for line in said) != used
    assert any("<extra_id_0> is 257 in the tokenizer and 289, the vocabulary's last id, in the run" in line for line in said) == used
    assert opened.open(tmp_path / "run").tokenizer.vocab_size == (ids if used else 256)


def test_what_nothing_computes_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "theirs", "t5")
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text())
    for key, value in (
        ("relative_attention_max_distance", 64),
        ("feed_forward_proj", "gated-silu"),
        ("decoder_start_token_id", 2),
        ("partial_rotary_factor", 0.5),
    ):
        path.write_text(json.dumps(config | {key: value}))
        with pytest.raises(BadInput, match=f"config.json: {key}: got {value}"):
            to_run(tmp_path / "theirs", tmp_path / "run", overrides={})
