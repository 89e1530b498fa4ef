"""A run starts from a folder that transformers saved, with all weights or with LoRA adapters; a folder of another model is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from moe.cli.main import main
from parallel.store.stored import Reader
from tests.moe.convert.test_huggingface import made

pytest.importorskip("transformers", reason="pip install moe-parallel[hf]")


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
