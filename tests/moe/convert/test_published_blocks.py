"""Published files in MXFP4, in fp8 blocks, and with layers for multi-token prediction become runs with the makers' numbers, to the bit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe.cli.main import main
from moe.convert.huggingface.convert import from_run, to_run
from parallel.errors import BadInput
from tests.moe.convert.test_huggingface import FAMILIES, files, logits, made

transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

DRAWS = torch.Generator().manual_seed(11)
FP8_BLOCK = (16, 24)  # neither divides every matrix, nor do they equal each other


def fp4(bits: int) -> float:
    """E2M1 of the OCP specification: sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    size = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -size if sign else size


def e4m3(bits: int) -> float:
    """E4M3 of the OCP specification: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    sign, exponent, mantissa = bits >> 7, bits >> 3 & 15, bits & 7
    size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -size if sign else size


def plain_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decode [E, N, G, 16] and [E, N, G] element by element to [E, 32 G, N]."""
    experts, out, groups, _ = blocks.shape
    found = torch.empty(experts, groups * 32, out, dtype=torch.float64)
    for e in range(experts):
        for n in range(out):
            for g in range(groups):
                for at, byte in enumerate(blocks[e, n, g].tolist()):
                    for half, bits in enumerate((byte & 15, byte >> 4)):
                        found[e, g * 32 + at * 2 + half, n] = fp4(bits) * 2.0 ** (int(scales[e, n, g]) - 127)
    return found.to(torch.bfloat16)


def plain_fp8(values: Tensor, factors: Tensor) -> Tensor:
    """Decode [M, N] element by element, with fp32 products."""
    found = torch.empty(values.shape)
    for i, row in enumerate(values.view(torch.uint8).tolist()):
        for j, bits in enumerate(row):
            found[i, j] = torch.tensor(e4m3(bits)) * factors[i // FP8_BLOCK[0], j // FP8_BLOCK[1]]
    return found.to(torch.bfloat16)


def rewritten(folder: Path, change: Callable[[str, Tensor], dict[str, Tensor]], quantization: dict[str, Any]) -> dict[str, Tensor]:
    """Replace each tensor of the folder by `change(key, tensor)`, and name the format in config.json. Return the tensors before."""
    file, config = folder / "model.safetensors", folder / "config.json"
    before = load_file(file)
    save_file({key: value for name, tensor in before.items() for key, value in change(name, tensor).items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantization}))
    return before


def as_mxfp4(key: str, tensor: Tensor) -> dict[str, Tensor]:
    if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {key: tensor}
    experts, inputs, out = tensor.shape
    blocks = torch.randint(256, (experts, out, inputs // 32, 16), dtype=torch.uint8, generator=DRAWS)
    return {f"{key}_blocks": blocks, f"{key}_scales": torch.randint(118, 126, blocks.shape[:-1], dtype=torch.uint8, generator=DRAWS)}


def as_fp8(key: str, tensor: Tensor) -> dict[str, Tensor]:
    if tensor.ndim != 2 or "_proj" not in key:
        return {key: tensor}
    factors = torch.rand([-(-n // size) for n, size in zip(tensor.shape, FP8_BLOCK, strict=True)], generator=DRAWS) / 300
    bits = torch.randint(256, tensor.shape, dtype=torch.uint8, generator=DRAWS)
    bits[bits % 128 == 127] = 0  # NaN
    return {key: bits.view(torch.float8_e4m3fn), f"{key}_scale_inv": factors}


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(FP8_BLOCK)}


GPT_OSS = {"hidden_size": 64, "intermediate_size": 32}


def test_mxfp4_is_decoded_as_the_specification_and_transformers_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-OSS in the published form: experts are the plain decoder's and transformers' to the bit, and go back as bf16."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # takes a second, which other workers need not spend

    monkeypatch.setitem(FAMILIES, "GptOss", FAMILIES["GptOss"] | GPT_OSS)
    made(tmp_path / "a", "GptOss", dtype=torch.bfloat16)
    want = rewritten(tmp_path / "a", as_mxfp4, MXFP4)
    said = to_run(tmp_path / "a", tmp_path / "run", overrides={})
    assert "weights in mxfp4 were decoded to bf16" in said
    packed = load_file(tmp_path / "a/model.safetensors")
    for key in [key.removesuffix("_blocks") for key in packed if key.endswith("_blocks")]:
        blocks, scales = packed[f"{key}_blocks"], packed[f"{key}_scales"]
        want[key] = plain_mxfp4(blocks, scales)
        assert torch.equal(want[key], convert_moe_packed_tensors(blocks.clone(), scales.clone())), key
    from_run(tmp_path / "run", tmp_path / "b")
    assert "quantization_config" not in json.loads((tmp_path / "b/config.json").read_text())
    back = files(tmp_path / "b")
    assert back.keys() == want.keys() and all(torch.equal(back[key], want[key]) for key in back)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.bfloat16).state_dict()
    assert again.keys() == want.keys() and all(torch.equal(again[key], want[key]) for key in want)


@pytest.mark.parametrize("family", ["DeepseekV3", "Qwen3Moe", "Llama"])
def test_fp8_blocks_are_decoded_as_the_specification_says(family: str, tmp_path: Path) -> None:
    """Matrices in fp8 with a factor for each block, smaller at the edges, are the plain decoder's to the bit, and go back as bf16."""
    made(tmp_path / "a", family, dtype=torch.bfloat16)
    want = rewritten(tmp_path / "a", as_fp8, FP8)
    packed = load_file(tmp_path / "a/model.safetensors")
    keys = [key.removesuffix("_scale_inv") for key in packed if key.endswith("_scale_inv")]
    assert len(keys) > 10
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    from_run(tmp_path / "run", tmp_path / "b")
    want |= {key: plain_fp8(packed[key], packed[f"{key}_scale_inv"]) for key in keys}
    back = files(tmp_path / "b")
    assert back.keys() == want.keys() and all(torch.equal(back[key], want[key]) for key in back)


def without(name: str) -> Callable[[str, Tensor], dict[str, Tensor]]:
    return lambda key, tensor: {} if key.endswith(name) else {key: tensor}


def cut(name: str) -> Callable[[str, Tensor], dict[str, Tensor]]:
    return lambda key, tensor: {key: tensor[:-1].clone() if key.endswith(name) else tensor}


@pytest.mark.parametrize(
    ("family", "change", "then", "quantization", "said"),
    [
        (
            "Llama",
            as_fp8,
            without("q_proj.weight_scale_inv"),
            FP8,
            "q_proj.weight: got no model.layers.0.self_attn.q_proj.weight_scale_inv",
        ),
        ("Llama", as_fp8, cut("q_proj.weight_scale_inv"), FP8, "q_proj.weight_scale_inv: got float32 of shape"),
        ("Llama", as_fp8, without("nothing"), None, "got fp8, needed quantization_config"),
        ("Llama", as_fp8, without("nothing"), FP8 | {"weight_block_size": None}, "got fp8 with weight_block_size None"),
        ("Llama", as_fp8, without("nothing"), {"quant_method": "awq", "bits": 4}, "got awq, needed quant_method mxfp4, or fp8"),
        ("Llama", as_fp8, without("nothing"), ["fp8"], "got ['fp8']"),
        ("GptOss", as_mxfp4, without("nothing"), "mxfp4", "got 'mxfp4', needed quant_method mxfp4"),
        ("GptOss", as_mxfp4, without("down_proj_scales"), MXFP4, "down_proj_blocks: got no model.layers"),
        ("GptOss", as_mxfp4, cut("down_proj_scales"), MXFP4, "down_proj_scales: got uint8 of shape"),
    ],
)
def test_blocks_that_do_not_fit_are_one_line(
    family: str,
    change: Callable[[str, Tensor], dict[str, Tensor]],
    then: Callable[[str, Tensor], dict[str, Tensor]],
    quantization: Any,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "GptOss", FAMILIES["GptOss"] | GPT_OSS)
    made(tmp_path / "a", family)
    rewritten(tmp_path / "a", change, quantization)
    rewritten(tmp_path / "a", then, quantization)
    with pytest.raises(BadInput, match=re.escape(said)):
        to_run(tmp_path / "a", tmp_path / "run", overrides={})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_nan_in_fp8_is_refused(tmp_path: Path) -> None:
    made(tmp_path / "a", "Llama")
    rewritten(tmp_path / "a", as_fp8, FP8)
    nan = torch.full((24, 24), 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    rewritten(tmp_path / "a", lambda key, tensor: {key: nan.clone() if key.endswith("q_proj.weight") else tensor}, FP8)
    with pytest.raises(BadInput, match="not finite"):
        to_run(tmp_path / "a", tmp_path / "run", overrides={})


def test_layers_for_multi_token_prediction_are_left_out_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files with such layers are refused with the flag that leaves them out; then the main model is that of files without them."""
    made(tmp_path / "a", "DeepseekV3")
    config, weights = tmp_path / "a/config.json", tmp_path / "a/model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    convert = ["convert", f"hf:{tmp_path / 'a'}", str(tmp_path / "run")]
    assert main([*convert, "--without_mtp"]) == 2
    assert "without layers for multi-token prediction" in capsys.readouterr().err
    before = load_file(weights)
    save_file(before | {"model.layers.2.eh_proj.weight": torch.ones(24, 48), "model.layers.2.enorm.weight": torch.ones(24)}, weights)
    assert main(convert) == 2
    assert "2 tensors of layers for multi-token prediction" in (said := capsys.readouterr().err) and "--without_mtp" in said
    assert main([*convert, "--without_mtp"]) == 0
    assert "\n1 layer for multi-token prediction not converted" in capsys.readouterr().out
    from_run(tmp_path / "run", tmp_path / "b")
    after = files(tmp_path / "b")
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in after)


def test_a_model_of_remote_code_goes_back_as_the_family_that_it_copies(tmp_path: Path) -> None:
    """Kimi-K2: transformers loads what is written back without the code that published files name, with the same logits."""
    theirs = made(tmp_path / "a", "DeepseekV3")
    config = tmp_path / "a/config.json"
    auto_map = {"AutoConfig": "configuration_deepseek.DeepseekV3Config", "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"}
    config.write_text(json.dumps((before := json.loads(config.read_text())) | {"model_type": "kimi_k2", "auto_map": auto_map}))
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    from_run(tmp_path / "run", tmp_path / "b")
    assert json.loads((tmp_path / "b/config.json").read_text()) == before
    assert torch.equal(logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").eval()), logits(theirs))
