"""`moe eval` has the loss that training recorded for the same sequences, and for another text the loss of a plain loop over its windows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe.data import open_data
from moe.data.tokenizer import Bytes
from moe.records.metrics import read_summary
from moe.train.use import evaluate, opened
from parallel.errors import BadInput
from tests.support import trained

LENGTH = trained.VALUES["model"]["max_length"]


@pytest.fixture(scope="module")
def out(home: Path) -> Path:
    run = trained.recipe(
        home, degrees={"ep": 2}, data={"tokenizer": "bpe", "vocab_size": 290}, router={"eval_capacity_factor": 0.75, "group": 2}
    )
    trained.train(run, home / "run", ranks=2)
    return home / "run"


def figures(out: Path, **options: Any) -> dict[str, Any]:
    file = out.parent / "eval.json"
    evaluate.main(str(out), json=str(file), **({"overrides": {}} | options))
    (row,) = json.loads(file.read_text())["rows"]
    return dict(row)


def test_the_loss_is_the_one_that_training_recorded(out: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    summary = read_summary(out)
    assert summary is not None
    row = figures(out, sequences=8)  # the recipe's train.eval_sequences
    assert row["loss"] == pytest.approx(summary["validation_loss"], rel=1e-6)
    assert row["bits_per_byte"] == pytest.approx(summary["bits_per_byte"], rel=1e-6)
    assert f"loss {row['loss']:.4f} nats a token" in capsys.readouterr().out
    assert figures(out, sequences=8, step=3)["loss"] != row["loss"]
    monkeypatch.setattr(evaluate, "TOKENS_AT_ONCE", 3 * (LENGTH + 1))  # room for 3 sequences, but they come in groups of 2
    assert figures(out, sequences=8)["loss"] == pytest.approx(row["loss"], rel=1e-6)


def test_another_text_is_read_whole(home: Path, out: Path) -> None:
    text = home / "other.txt"
    text.write_text("zebra quartz vortex jigsaw\n" * 150)
    row = figures(out, overrides={"data.path": str(text), "data.validation_share": "0.4"}, sequences=0)
    run = opened.open(out)
    model, tokenizer = run.model, run.tokenizer
    data = open_data(
        trained.recipe(home).data.model_copy(update={"path": str(text), "validation_share": 0.4}),
        max_length=LENGTH,
        vocab_size=290,
        seed=0,
        tokenizer=tokenizer.describe(),
        log=lambda _: None,
    )
    total, tokens, count = 0.0, 0, 0
    with torch.no_grad():
        for stream in (data.train.windows.tokens, data.validation.windows.tokens):
            starts = range(0, len(stream) - LENGTH, LENGTH)
            windows = torch.stack([torch.tensor(stream[start : start + LENGTH + 1].astype("int64")) for start in starts])
            logits = torch.cat(
                [model(pair[:, :-1]).logits_BLV for pair in windows.split(2)]
            )  # two sequences share an expert's capacity (router.group: 2)
            total += F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="sum").item()
            tokens, count = tokens + LENGTH * len(windows), count + len(windows)
    assert (row["sequences"], row["tokens"]) == (count, tokens)
    assert row["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert row["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-4)
    for layer in row["layers"]:
        assert layer["kept"] + layer["dropped"] == tokens and sum(layer["load"]) == pytest.approx(1)
        assert layer["dropped"] > 0
    assert figures(out, overrides={"data.path": str(text), "data.validation_share": "0.4"}, sequences=7)["sequences"] == 7


def test_other_sources_are_read_whole_in_the_place_of_the_runs_path(home: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, times in (("one", 40), ("two", 90)):
        (home / f"{name}.txt").write_text(f"{name} quartz vortex jigsaw\n" * times)
    sources = f"[{{path: {home / 'one.txt'}, weight: 3}}, {{path: {home / 'two.txt'}, weight: 1}}]"
    row = figures(out, overrides={"data.sources": sources}, sequences=0)
    alone = [figures(out, overrides={"data.path": str(home / f"{name}.txt")}, sequences=0) for name in ("one", "two")]
    assert row["tokens"] == sum(one["tokens"] for one in alone) and "all of" in (said := capsys.readouterr().out)
    for part, one, name in zip(row["sources"], alone, ("one", "two"), strict=True):  # each source has the loss and load of itself alone
        assert part["path"].endswith(f"{name}.txt") and f"{name}.txt: {part['sequences']} sequences   loss {part['loss']:.4f}" in said
        assert {key: part[key] for key in ("sequences", "tokens", "layers")} == {key: one[key] for key in ("sequences", "tokens", "layers")}
        assert (part["loss"], part["bits_per_byte"]) == pytest.approx((one["loss"], one["bits_per_byte"]))
    assert "sources" not in alone[0]
    assert figures(out, overrides={"data.sources": "[]"}, sequences=4)["sequences"] == 4
    assert "the validation part of" in capsys.readouterr().out
    with pytest.raises(BadInput, match="--data.path: got data.sources as well, needed one of the two"):
        figures(out, overrides={"data.sources": sources, "data.path": str(home / "one.txt")})


def test_the_standard_library_takes_the_place_of_the_runs_path(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(run: Any, data: Any, **_: Any) -> None:
        assert (data.source, data.path, data.sources) == ("python_stdlib", None, ())
        raise EOFError

    monkeypatch.setattr(evaluate, "read_data", read)
    with pytest.raises(EOFError):
        evaluate.main(str(out), overrides={"data.source": "python_stdlib"})


def test_chats_are_evaluated_by_their_predicted_tokens(home: Path, tmp_path: Path) -> None:
    """The validation part, or all chats of another file. With ids of two bytes, bits per byte are half of the bits a token."""
    for name, count in (("train", 20), ("other", 7)):
        rows = ({"prompt": "abc" * (n % 3), "completion": "defg"} for n in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = trained.recipe(home, data={"source": "chat", "path": str(tmp_path / "train.jsonl")}, train={"steps": 1})
    trained.train(run, tmp_path / "run")
    row = figures(tmp_path / "run")
    assert (row["sequences"], row["tokens"]) == (4, 4 * 5)
    assert figures(tmp_path / "run", overrides={"data.path": str(tmp_path / "other.jsonl")}, sequences=0)["tokens"] == 7 * 5
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bytes, "bytes_per_id", np.full(256, 2))
        assert figures(tmp_path / "run")["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) / 2, rel=1e-6)


def test_what_would_be_another_model_is_refused(out: Path) -> None:
    with pytest.raises(BadInput, match="--model.num_heads: got a key that moe eval does not take.*remove"):
        evaluate.main(str(out), overrides={"model.num_heads": "1"})
    for key, value in (("data.tokenizer", "bpe"), ("data.vocab_size", "300"), ("data.objective", "span_corruption")):
        with pytest.raises(BadInput, match=f"--{key}: got a key that moe eval does not take.*remove"):
            evaluate.main(str(out), overrides={key: value})
    with pytest.raises(BadInput, match="--step: got 5, needed one of 3, 6"):
        evaluate.main(str(out), overrides={}, step=5)
