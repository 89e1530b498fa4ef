"""A run starts from a folder that transformers saved, with all weights or with LoRA adapters; a folder of another model is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from moe.cli.main import main
from moe.records.metrics import read_summary
from parallel.store.stored import Reader
from tests.moe.convert.test_huggingface import made

pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")


WRONG: list[tuple[str, str, dict[str, object], str]] = [  # name of a file, data.source, its second line, words of the error
    ("a.jsonl", "chat", {"question": "a"}, "a.jsonl, line 2: got an object with question, needed messages, or prompt and completion"),
    ("b.jsonl", "chat", {"messages": [{"role": "assistant", "content": "b"}]}, "data.chat_template: got null, needed a template"),
    ("c.jsonl", "chat", {"input_ids": [1, 2], "labels": [1]}, "c.jsonl, line 2, labels: got 1 number, needed 2"),
    ("d.jsonl", "jsonl", {"body": "a"}, "d.jsonl, line 2: got an object with body, needed the key text"),
]


def test_a_run_begins_with_a_folder_of_transformers(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "run"
    made(theirs, "Mixtral")
    assert main(["convert", f"hf:{theirs}", str(tmp_path / "base")]) == 0
    recipe = yaml.safe_load((tmp_path / "base/recipe.yaml").read_text())
    recipe["data"]["path"] = str(home / "text.txt")
    recipe["train"] |= {"steps": 2, "global_batch": 4, "eval_sequences": 4, "sample_tokens": 0, "measure_speed": False, "report": False}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
    words = ["train", str(tmp_path / "mine.yaml"), "--out", str(out), "--init_from", f"hf:{theirs}"]
    assert main([*words, "--model.d_model", "32"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"error: --init_from hf:{theirs}: got ") and "fix: moe convert hf:" in said and not (out / "base").exists()
    for begins in (words, ["train", f"hf:{theirs}", "--out", str(out)]):  # refused before tensors are converted
        assert main([*begins, "--data.path", str(home / "other.txt")]) == 2
        assert capsys.readouterr().err.startswith("error: data.path: got ") and not (out / "base").exists()
        for name, source, second, why in WRONG:
            first = {"prompt": "a", "completion": "b", "text": "c"}
            (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in (first, second)))
            given = ["--data.source", source, "--data.path", str(tmp_path / name)]
            for more in ([], ["--dry-run"]):
                assert main([*begins, *given, *more]) == 2
                said = capsys.readouterr().err
                assert why in said and said.count("\n") == 1 and not (out / "base").exists()
    assert main([*words, "--optimizer.lr", "1e-30"]) == 0
    first, saved = Reader(tmp_path / "base/checkpoints/step-0"), Reader(out / "checkpoints/step-2")
    for name, shape in first.names().items():
        box = tuple(slice(0, n) for n in shape)
        torch.testing.assert_close(saved.region(name, "weight", box), first.region(name, "weight", box), rtol=0, atol=1e-7)
    assert main([*words, "--train.steps", "3"]) == 0  # resumes, and no longer needs the folder
    adapters = ["--out", str(tmp_path / "lora"), "--lora.rank", "2", "--lora.targets", "[attention, experts]"]
    assert main(["train", str(tmp_path / "mine.yaml"), *adapters, "--init_from", f"hf:{theirs}"]) == 0
    assert Reader(tmp_path / "lora/checkpoints/step-2").state["base"]["path"] == str((tmp_path / "lora/base/checkpoints/step-0").resolve())
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "lora"), f"hf:{tmp_path / 'merged'}"]) == 0
    assert (tmp_path / "merged/model.safetensors").is_file()
    assert json.loads((tmp_path / "merged/config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    assert main(["convert", str(tmp_path / "lora"), f"hf:{tmp_path / 'peft'}", "--adapters"]) == 0
    check_adapters(tmp_path / "peft", theirs, tmp_path / "merged")
    capsys.readouterr()
    assert main(["convert", str(out), f"hf:{tmp_path / 'none'}", "--adapters"]) == 2
    assert "with all weights, needed a run with lora.rank; fix: leave out --adapters" in capsys.readouterr().err


def check_adapters(folder: Path, base: Path, merged: Path) -> None:
    """Check that PEFT's formula on the base's tensors, W + lora_alpha / r B A, gives the merged ones: each module that the configuration
    names has a pair, and no other tensor differs."""
    about = json.loads((folder / "adapter_config.json").read_text())
    assert (about["peft_type"], about["task_type"], about["r"], about["lora_alpha"]) == ("LORA", "CAUSAL_LM", 2, 16.0)
    pairs, whole, want = (load_file(next(place.glob("*.safetensors"))) for place in (folder, base, merged))
    for key, weight in whole.items():
        module, changed = key.removesuffix(".weight"), weight.float()
        left, right = (pairs.pop(f"base_model.model.{module}.lora_{one}.weight", None) for one in "BA")
        assert (left is not None) == (right is not None) == bool(re.fullmatch(about["target_modules"], module)), key
        if left is not None and right is not None:
            # the name by which PEFT finds the joined experts of transformers 5
            joined = re.sub(r"experts\.\d+", "experts", module).replace("block_sparse_moe", "mlp")
            assert re.fullmatch(about["target_modules"], joined), key
            assert left.dtype == torch.float32 and left.abs().max() > 0
            changed = changed + about["lora_alpha"] / about["r"] * left @ right
        torch.testing.assert_close(changed, want[key].float(), msg=key)
    assert not pairs


def test_a_selection_bias_is_taken_from_the_files_and_never_added(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for family in ("DeepseekV3", "Mixtral"):
        theirs, base, out = (tmp_path / f"{family}-{name}" for name in ("theirs", "base", "run"))
        made(theirs, family)
        assert main(["convert", f"hf:{theirs}", str(base)]) == 0
        recipe = yaml.safe_load((base / "recipe.yaml").read_text())
        recipe["data"]["path"] = str(home / "text.txt")
        recipe["train"] |= {"steps": 1, "global_batch": 2, "eval_sequences": 2, "sample_tokens": 0, "measure_speed": False, "report": False}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(recipe))
        for number, begins in enumerate(([str(tmp_path / "mine.yaml"), "--init_from", f"hf:{theirs}"], [f"hf:{theirs}"])):
            words = ["train", *begins, "--out", f"{out}{number}", "--data.path", str(home / "text.txt"), "--router.bias_rate", "0"]
            words += ["--train.steps", "1", "--train.global_batch", "2", "--train.eval_sequences", "2", "--train.report", "false"]
            assert main([*words, "--train.measure_speed", "false", "--train.sample_tokens", "0"]) == (0 if family == "DeepseekV3" else 2)
            assert (family == "Mixtral") == ("router.bias_rate: got 0.0, needed null" in capsys.readouterr().err)
            assert family == "Mixtral" or main(["convert", f"{out}{number}", f"hf:{out}{number}-back"]) == 0


def test_adapters_name_the_base_that_they_were_trained_on(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A base that was trained further has another name, and selection biases that moved would be lost."""
    theirs = tmp_path / "theirs"
    made(theirs, "DeepseekV3")
    config = json.loads((theirs / "config.json").read_text()) | {"_name_or_path": "them/model"}
    (theirs / "config.json").write_text(json.dumps(config))
    fixed = {"train.steps": 1, "train.global_batch": 2, "train.eval_sequences": 2, "train.sample_tokens": 0, "train.measure_speed": "false"}
    fixed |= {"train.report": "false", "lora.rank": 2, "data.path": home / "text.txt"}
    words = [word for key, value in fixed.items() for word in (f"--{key}", str(value))]
    for out, source, rate in (("first", f"hf:{theirs}", "0"), ("second", str(tmp_path / "first"), "0"), ("moved", f"hf:{theirs}", "0.01")):
        recipe = f"hf:{theirs}" if source.startswith("hf:") else f"{source}/recipe.yaml"
        init = ["--init_from", source] if not source.startswith("hf:") else []
        assert main(["train", recipe, "--out", str(tmp_path / out), *init, *words, "--router.bias_rate", rate]) == 0
        assert main(["convert", str(tmp_path / out), f"hf:{tmp_path / out}-peft", "--adapters"]) == (2 if out == "moved" else 0)
    assert "router.bias, which training has changed, needed an unchanged bias: PEFT's files cannot store it" in capsys.readouterr().err
    assert not (tmp_path / "moved-peft").exists()
    about = [json.loads((tmp_path / f"{out}-peft/adapter_config.json").read_text()) for out in ("first", "second")]
    assert [one["base_model_name_or_path"] for one in about] == ["them/model", None]


def test_adapters_that_peft_takes_for_those_of_experts_are_refused(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """PEFT 0.21 knows joined experts by the last word of a module's name, which dense and shared networks have too."""
    made(tmp_path / "theirs", "DeepseekV3")
    fixed = {"train.steps": 1, "train.global_batch": 2, "train.eval_sequences": 2, "train.sample_tokens": 0, "train.measure_speed": "false"}
    fixed |= {"train.report": "false", "lora.rank": 2, "lora.targets": "[attention, dense]", "data.path": home / "text.txt"}
    words = [word for key, value in fixed.items() for word in (f"--{key}", str(value))]
    assert main(["train", f"hf:{tmp_path / 'theirs'}", "--out", str(tmp_path / "run"), *words, "--router.bias_rate", "0"]) == 0
    assert main(["convert", str(tmp_path / "run"), f"hf:{tmp_path / 'peft'}", "--adapters"]) == 2
    assert "got adapters of dense networks" in capsys.readouterr().err and not (tmp_path / "peft").exists()


def test_an_earlier_base_is_lost_only_if_nothing_needs_it(tmp_path: Path, home: Path) -> None:
    """--fresh with a folder that cannot be converted keeps the base; with another model, the base of adapters that are set aside stays."""
    model, other, out = tmp_path / "model", tmp_path / "other", tmp_path / "run"
    made(model, "Llama")
    made(other, "Llama", dtype=torch.bfloat16)
    words = ["--out", str(out), "--data.path", str(home / "text.txt"), "--precision.compute", "fp32", "--train.steps", "1"]
    words += ["--train.report", "false", "--lora.rank", "2"]
    assert main(["train", f"hf:{model}", *words]) == 0
    assert read_summary(out)["recipe"] == "run"  # type: ignore[index]
    base = out / "base/checkpoints/step-0/manifest.json"
    weights, manifest = model / "model.safetensors", base.read_bytes()
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    assert main(["train", f"hf:{model}", *words, "--fresh"]) == 2
    weights.write_bytes(content[:-8] + b"\xff" * 8)  # NaN, found only when it is read
    assert main(["train", f"hf:{model}", *words, "--fresh"]) == 2
    assert base.read_bytes() == manifest and sorted(path.name for path in out.glob("*base*")) == ["base"]
    weights.write_bytes(content)
    assert main(["train", f"hf:{model}", *words, "--fresh"]) == 0  # the same weights
    assert base.read_bytes() == manifest and not (out / "base.before-1").exists()
    assert main(["train", f"hf:{other}", *words, "--fresh"]) == 0
    assert base.read_bytes() != manifest and (out / "base.before-1/checkpoints/step-0/manifest.json").read_bytes() == manifest
    assert len(list(out.glob("checkpoints.before-*/step-1"))) == 2
