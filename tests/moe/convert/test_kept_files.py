"""A model of transformers that was trained here is written back with all files that it came with, after any number of runs in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from moe.cli.main import main
from moe.convert.huggingface.convert import from_run, to_run
from moe.recipe.load import load
from moe.train.use import opened
from parallel.errors import BadInput
from tests.moe.convert.test_huggingface import files, logits, made, tokenizer
from tests.support import trained

transformers = pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")

QUICK: dict[str, str] = {
    "train.steps": "1", "train.global_batch": "4", "train.eval_sequences": "4", "train.sample_tokens": "0", "train.report": "false",
    "train.measure_speed": "false", "optimizer.warmup_steps": "0",
}  # fmt: skip
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"


@pytest.fixture
def came(tmp_path: Path, home: Path) -> Path:
    """Return a folder with a bf16 model and all files that transformers writes. The run `base` next to the folder was converted from it."""
    made(tmp_path / "a", "Qwen3", dtype=torch.bfloat16)
    about = json.loads((tmp_path / "a/config.json").read_text())
    (tmp_path / "a/config.json").write_text(json.dumps(about | {"pad_token_id": 3, "bos_token_id": 1}))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(tmp_path), eos_token="<|7|>", pad_token="<|3|>", bos_token="<|1|>"
    )
    fast.chat_template = {"default": CHAT, "tools": CHAT + "!"}
    fast.save_pretrained(tmp_path / "a")
    transformers.GenerationConfig(do_sample=True, temperature=0.7, eos_token_id=[7, 5], pad_token_id=3).save_pretrained(tmp_path / "a")
    (tmp_path / "a/LICENSE.txt").write_text("theirs")
    (tmp_path / "a/README.md").write_text("scores 90")
    to_run(tmp_path / "a", tmp_path / "base", overrides={"model.max_length": "16", "data.path": str(home / "text.txt")})
    return tmp_path


def begun(folder: Path, name: str, source: str, **changed: str) -> None:
    run = load(str(folder / "base/recipe.yaml"), QUICK | {key.replace("__", "."): value for key, value in changed.items()})[0]
    (summary,) = trained.train(run, folder / name, init_from=folder / source)
    assert isinstance(summary, dict), summary


def others(folder: Path) -> dict[str, Any]:
    """Return relative path -> content of every file in the folder that holds no tensors."""
    found = {
        str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file() and path.suffix != ".safetensors"
    }
    return {name: json.loads(text) if name.endswith(".json") else text for name, text in found.items()}


def test_what_came_goes_back_after_several_generations(came: Path) -> None:
    """After two runs with all weights and one with adapters, at rates too small to change bf16, the written folder equals the original
    bitwise."""
    for name, source, rank in (("one", "base", "0"), ("two", "one", "0"), ("lora", "two", "2")):
        begun(came, name, source, optimizer__lr="1e-30", lora__rank=rank, lora__targets="[attention]")
    said = from_run(came / "lora", came / "b")
    was, now = others(came / "a"), others(came / "b")
    assert now.pop("README.base.md") == was.pop("README.md") == "scores 90" and now == was
    assert any("README.base.md is the card of the model before this training" in line for line in said)
    from_run(came / "base", came / "untrained")
    assert others(came / "untrained")["README.md"] == "scores 90"
    assert {"chat_template.jinja", "additional_chat_templates/tools.jinja", "generation_config.json", "LICENSE.txt"} <= others(
        came / "b"
    ).keys()
    before, after = files(came / "a"), files(came / "b")
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert any("rounded to bfloat16, the model's original dtype: --dtype fp32" in line for line in said)
    theirs, again = (transformers.AutoModelForCausalLM.from_pretrained(came / name).eval() for name in "ab")
    assert again.dtype == torch.bfloat16 and torch.equal(logits(again), logits(theirs))
    assert again.generation_config.temperature == 0.7 and again.config.max_position_embeddings == 48 and again.config.pad_token_id == 3
    chat = transformers.AutoTokenizer.from_pretrained(came / "b").apply_chat_template([{"role": "user", "content": "deaf"}], tokenize=False)
    assert chat == "user: deaf"


def test_another_dtype_is_written_where_it_is_asked_for(came: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun(came, "run", "base", optimizer__lr="0.01")
    for dtype, name in (("fp32", "float32"), ("fp16", "float16")):
        assert main(["convert", str(came / "run"), f"hf:{came / name}", "--dtype", dtype]) == 0
        assert {str(tensor.dtype) for tensor in files(came / name).values()} == {f"torch.{name}"}
    assert "rounded" not in capsys.readouterr().out
    want, got = logits(opened.open(came / "run").model), logits(transformers.AutoModelForCausalLM.from_pretrained(came / "float32").eval())
    assert float((got - want).abs().max() / want.abs().max()) < 3e-6
    from_run(came / "run", came / "b")
    exact, rounded = files(came / "float32"), files(came / "b")
    assert all(torch.equal(exact[key].bfloat16(), rounded[key]) for key in exact) and rounded.keys() == exact.keys()
    assert main(["convert", f"hf:{came / 'a'}", str(came / "new"), "--dtype", "fp32"]) == 2
    assert "--dtype: got --dtype with hf:PATH RUN" in capsys.readouterr().err


def test_numbers_that_a_dtype_cannot_hold_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    made(tmp_path / "a", "Llama")
    held = load_file(tmp_path / "a/model.safetensors")
    held["model.norm.weight"][0] = 1e5
    save_file(held, tmp_path / "a/model.safetensors")
    to_run(tmp_path / "a", tmp_path / "run", overrides={})
    with pytest.raises(BadInput, match="--dtype: got norm.weight, with numbers that float16 cannot represent, .* --dtype bf16"):
        from_run(tmp_path / "run", tmp_path / "b", dtype="fp16")
    assert not (tmp_path / "b").exists()


def test_a_model_with_experts_made_of_one_that_came_keeps_its_ids_length_and_template(came: Path) -> None:
    recipe = yaml.safe_load((came / "base/recipe.yaml").read_text())
    recipe["model"] |= {"moe_every": 1}
    recipe |= {"experts": {"num_experts": 4}, "router": {"preset": "qwen3_moe", "num_choices": 2, "gates": "before_drop"}}
    (came / "up.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["convert", str(came / "base"), str(came / "up"), "--to", str(came / "up.yaml")]) == 0
    from_run(came / "up", came / "b")
    before, after = others(came / "a"), others(came / "b")
    assert before.pop("config.json")["model_type"] == "qwen3" and after.pop("config.json")["model_type"] == "qwen3_moe"
    assert before == after
    again = transformers.AutoModelForCausalLM.from_pretrained(came / "b").eval()
    assert type(again).__name__ == "Qwen3MoeForCausalLM" and again.dtype == torch.bfloat16
    assert (again.config.max_position_embeddings, again.config.pad_token_id, again.config.bos_token_id) == (48, 3, 1)
    theirs = logits(transformers.AutoModelForCausalLM.from_pretrained(came / "a").eval())
    assert (
        float((logits(again) - theirs).abs().max() / theirs.abs().max()) < 0.02
    )  # equal up to bf16, because every expert is a copy of the dense network


def test_a_run_that_starts_over_without_that_model_does_not_export_its_files(came: Path) -> None:
    begun(came, "run", "base")
    run = load(str(came / "base/recipe.yaml"), QUICK)[0]
    trained.train(run, came / "run", fresh=True)
    assert not (came / "run/huggingface").exists() and (came / "run/huggingface.before-1/config.json").is_file()
