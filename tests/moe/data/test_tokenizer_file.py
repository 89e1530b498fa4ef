"""A model is trained from the beginning with a user's tokenizer.json; a file that cannot be used is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe.checks.together import check_together
from moe.cli.main import main
from moe.data import open_data
from moe.data.tokenizer_file import ids_of, read_file
from moe.recipe.load import load
from moe.recipe.sections import Data
from moe.train.use import opened
from parallel.errors import BadInput
from parallel.store.stored import Reader
from tests.moe.convert.test_huggingface import tokenizer

TEXT = "one two three four five six seven " * 60
SMALL = (
    "--model.num_layers 1 --model.d_model 16 --model.num_heads 2 --model.d_ff 16 --model.max_length 8 --train.global_batch 2 "
    "--train.eval_sequences 2 --train.sample_tokens 0 --train.report false --train.measure_speed false --train.steps"
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a tokenizer.json with 290 ids, of which <|7|> ends a text."""
    tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|7|>"}}))
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path / "tokenizer.json"


def test_ids_are_those_of_the_library(file: Path) -> None:
    from tokenizers import Tokenizer

    library, own = Tokenizer.from_file(str(file)), read_file(str(file))
    assert own.encode(TEXT).tolist() == library.encode(TEXT).ids and own.separator == library.token_to_id("<|7|>")
    assert ids_of(str(file)) == own.vocab_size == library.get_vocab_size() == 290
    data = Data.model_validate({"path": str(file.with_name("a.txt")), "tokenizer": str(file), "vocab_size": 290, "validation_share": 0.3})
    found = open_data(data, max_length=8, vocab_size=290, seed=0, cache=file.parent / "cache", log=lambda _: None)
    ids = found.train.windows.tokens.tolist()
    assert ids[0] == ids[-1] == 7 and own.decode(ids[1:-1]) in TEXT and found.tokenizer.describe() == own.describe()


def test_a_run_keeps_the_file_and_goes_on_without_it(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer is in the checkpoint: the run is used, and resumed, after the file is gone. A new run is refused."""
    monkeypatch.chdir(file.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.parent / "cache"))
    named = "--data.tokenizer tokenizer.json --data.vocab_size 290 --data.path a.txt"
    assert main(["train", "dense_tiny", "--out", "run", *named.split(), *SMALL.split(), "2"]) == 0
    assert "(tokenizer.json), once" in capsys.readouterr().out
    before = json.loads(file.read_text())
    file.unlink()
    run = opened.open(file.parent / "run")
    assert run.tokenizer.describe()["model"] == before and run.recipe.vocab_size == 290
    assert main(["generate", "run", "--prompt", "one two", "--tokens", "2"]) == 0
    assert main(["eval", "run"]) == 0
    assert main(["train", "dense_tiny", "--out", "run", *named.split(), *SMALL.split(), "3"]) == 0
    assert main(["train", "run/recipe.yaml", "--out", "run", "--train.steps", "4"]) == 0
    assert Reader(file.parent / "run/checkpoints/step-4").state["tokenizer"]["model"] == before
    capsys.readouterr()
    for words in (["--fresh", "--out", "run"], ["--out", "other"], ["--out", "other", "--dry-run"]):
        assert main(["train", "run/recipe.yaml", *words]) == 2
        assert capsys.readouterr().err.startswith("error: data.tokenizer: got tokenizer.json, needed a tokenizer.json that exists; fix: ")
    assert not (file.parent / "other").exists()


@pytest.mark.parametrize(
    ("content", "config", "said"),
    [
        (None, {}, "got FILE, needed a tokenizer.json that exists"),
        ("{", {}, "got FILE: no tokenizer of byte pairs, needed the tokenizer.json of a byte-level BPE"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, {}, "got FILE: no tokenizer of byte pairs"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0, "</s>": 1}, "unk_token": "a"}}, {}, "spell neither bytes nor SentencePiece"),
        ("same", {}, 'FILE without eos_token, needed a token that ends a text: .*fix: write {"eos_token": "..."} into'),
        ("same", {"eos_token": "<|99|>"}, "FILE without <|99|>"),
    ],
)
def test_what_cannot_be_used_is_one_line(content: Any, config: dict[str, str], said: str, file: Path) -> None:
    if content is None:
        file.unlink()
    elif content != "same":
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    file.with_name("tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(BadInput, match=f"^data.tokenizer: .*{said.replace('FILE', str(file)).replace('|', '.')}"):
        check(str(file), vocab_size=2 if isinstance(content, dict) else 290)
        read_file(str(file))


def check(named: str, vocab_size: int) -> None:
    values = {"data.tokenizer": named, "data.vocab_size": str(vocab_size)}
    check_together(load("switch_tiny", values)[0].resolve(1))


def test_another_size_of_the_vocabulary_is_refused_with_the_right_one(file: Path) -> None:
    with pytest.raises(BadInput, match=f"^data.vocab_size: got 4096, needed 290, the ids of {file}; fix: set it to 290"):
        check(str(file), 4096)
    check(str(file), 290)
    with pytest.raises(BadInput, match="needed bytes, bpe, ids or FILE.json, a tokenizer.json; fix: "):
        load("switch_tiny", {"data.tokenizer": "tokenizer"})
