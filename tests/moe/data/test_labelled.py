"""Samples that another program has tokenized (`data.source: chat`, rows of input_ids): every file format gives the same sequences, the loss
is torch's cross-entropy over the labels on every layout, and a wrong row is refused in one line."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from moe.checks.begins import check_data
from moe.checks.together import check_run
from moe.data import open_data
from moe.data.order import TrainSet
from moe.recipe.load import build_run, load
from moe.recipe.sections import Data, Run
from moe.recipe.shapes import PADDING
from moe.train.start.restore import choose, restore
from parallel.errors import BadInput
from tests.support import trained

VOCABULARY, LENGTH = 40, 12
Row = dict[str, Any]


def rows_of(count: int) -> list[Row]:
    """Rows of 4 to 13 ids: a prompt with labels -100, then an answer, of which one more label is -100. Every third row is padded at its
    end, as a collator pads."""
    draw, rows = random.Random(0), []
    for number in range(count):
        ids = [draw.randrange(VOCABULARY) for _ in range(draw.randint(4, LENGTH + 1 - 3 * (number % 3 == 0)))]
        prompt = draw.randint(1, len(ids) - 2)
        labels = [-100] * prompt + ids[prompt:-1] + ([-100] if number % 2 else ids[-1:])
        row: Row = {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}
        padding = {"input_ids": [0] * 3, "labels": [-100] * 3, "attention_mask": [0] * 3}
        rows.append({name: [*held, *padding[name]] for name, held in row.items()} if number % 3 == 0 else row)
    return rows


def written(path: Path, rows: list[Row]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix in (".parquet", ".arrow"):
        arrow = pytest.importorskip("pyarrow", reason="pip install moe-parallel[data]")
        table = arrow.Table.from_pylist(rows)
        if path.suffix == ".parquet":
            pytest.importorskip("pyarrow.parquet").write_table(table, path)
        else:
            with pytest.importorskip("pyarrow.ipc").new_file(str(path), table.schema) as file:
                file.write_table(table)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def section(path: Path, **changes: Any) -> Data:
    return build_run({"data": {"source": "chat", "path": str(path), "tokenizer": "ids", "vocab_size": VOCABULARY} | changes}).data


def opened(data: Data, folder: Path, *, said: list[str] | None = None, max_length: int = LENGTH) -> TrainSet:
    log = (lambda line: None) if said is None else said.append
    made = open_data(data, max_length=max_length, vocab_size=VOCABULARY, seed=0, cache=folder / "cache", log=log)
    assert isinstance(made.train, TrainSet)
    return made.train


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "rows.arrow"])
def test_a_file_of_ids_gives_its_rows_with_unpredicted_ids_marked(name: str, tmp_path: Path) -> None:
    rows = rows_of(20)
    train = opened(section(written(tmp_path / name, rows)), tmp_path)
    got = train.windows.read(np.arange(train.num_windows))
    assert len(got) == 19  # the last of 20 is held out
    for found, row in zip(got, rows, strict=False):
        count = sum(row["attention_mask"])
        want = [id if label == id else -101 - id for id, label in zip(row["input_ids"][:count], row["labels"], strict=False)]
        assert found.tolist() == want + [PADDING] * (LENGTH + 1 - count)


def test_rows_without_labels_predict_every_id_and_long_rows_are_cut(tmp_path: Path) -> None:
    said: list[str] = []
    rows = [{"input_ids": [*range(20)]}, {"input_ids": [5, 6], "labels": [-100, -100]}, {"input_ids": [7]}, {"input_ids": [8, 9]}]
    train = opened(section(written(tmp_path / "rows.jsonl", rows)), tmp_path, said=said)
    assert train.windows.read(np.array([0])).tolist() == [[*range(LENGTH + 1)]] and train.num_windows == 1
    assert any("2 chats, 15 tokens, 15 of them predicted, 1 chat cut to model.max_length, 2 chats left out" in line for line in said)


def test_a_command_line_takes_rows_of_ids_and_refuses_a_key_of_text(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", rows_of(4))
    words = {"data.source": "chat", "data.tokenizer": "ids", "data.vocab_size": "40", "data.validation_share": "0.3"}
    for place in (path, tmp_path):
        run = load("switch_tiny", words | {"data.path": str(place)})[0].resolve(1)
        check_run(run, 1)
        assert run.vocab_size == VOCABULARY and opened(run.data, tmp_path).num_windows == 3
    with pytest.raises(BadInput, match="data.text_key: got messages, but the data are token ids"):
        load("switch_tiny", words | {"data.path": str(path), "data.text_key": "messages"})


def recipe(home: Path, path: Path, **sections: dict[str, Any]) -> Run:
    data = {"source": "chat", "path": str(path), "tokenizer": "ids", "vocab_size": VOCABULARY, "validation_share": 0.01}
    router = {"capacity_factor": None, "min_capacity": 0, "jitter": 0.0}
    train = {"steps": 1, "global_batch": 24, "save_every": 1, "eval_sequences": 4}
    return trained.recipe(home, **{"data": data, "router": router, "train": train, "optimizer": {"lr": 1e-30}} | sections)


TWO: dict[str, Any] = {"degrees": {"ep": 2}, "pipeline": {"microbatches": 3}}


@pytest.mark.parametrize(("ranks", "packing", "sections"), [(1, False, {}), (2, False, TWO), (1, True, {})], ids=["one", "two", "packed"])
def test_the_loss_is_the_mean_over_the_labels_of_the_global_batch(
    ranks: int, packing: bool, sections: dict[str, Any], home: Path, tmp_path: Path
) -> None:
    """The twin is torch: logits at i against label i + 1, -100 ignored, summed over the sequences one by one. A batch has all sequences."""
    rows = rows_of(25)
    run = recipe(home, written(tmp_path / "rows.jsonl", rows), **sections)
    if packing:
        values = run.data.model_copy(update={"packing": True})
        count = opened(values, tmp_path).num_windows
        run = run.model_copy(update={"data": values, "train": run.train.model_copy(update={"global_batch": count})})
    (summary, *_) = trained.train(run, tmp_path / "run", ranks=ranks)
    assert isinstance(summary, dict), summary
    model, total, predicted = restore(choose(tmp_path / "run")), 0.0, 0
    with torch.no_grad():
        for row in rows[:24]:
            count = sum(row["attention_mask"])
            ids, labels = (torch.tensor(row[name][:count]) for name in ("input_ids", "labels"))
            logits = model(ids[None, :-1]).logits_BLV[0].double()
            total += float(F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
            predicted += int((labels[1:] != -100).sum())
    assert trained.lines(tmp_path / "run")[0]["loss"] == pytest.approx(total / predicted, rel=1e-5)


WRONG: dict[str, tuple[Row, str]] = {
    "lengths": ({"input_ids": [1, 2, 3], "labels": [1, 2]}, r"labels: got 2 numbers, needed 3, one for each id"),
    "id too large": ({"input_ids": [1, VOCABULARY]}, rf"got the id {VOCABULARY}, needed ids from 0 to {VOCABULARY - 1}; fix: .*vocab_size"),
    "id below 0": ({"input_ids": [1, -3]}, r"got the id -3, needed ids from 0"),
    "shifted": ({"input_ids": [1, 2, 3], "labels": [2, 3, -100]}, r"got 2 at index 0, where input_ids has 1.*do not shift labels"),
    "another column": ({"input_ids": [1, 2], "loss_mask": [0, 1]}, r"got a row with loss_mask, needed only the columns input_ids"),
    "fractions": ({"input_ids": [1.5, 2]}, r"needed whole numbers in one dimension"),
    "null inside": ({"input_ids": [1, None]}, r"needed whole numbers in one dimension"),
    "text": ({"prompt": "a", "completion": "b"}, r"got an object with prompt, completion, needed input_ids, because data.tokenizer is ids"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_row_is_refused_in_one_line_also_before_a_model_is_converted(name: str, tmp_path: Path) -> None:
    row, words = WRONG[name]
    data = section(written(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}, row]))
    for refuse in (lambda: opened(data, tmp_path), lambda: check_data(data, None, vocab_size=VOCABULARY)):
        with pytest.raises(BadInput, match=rf"rows.jsonl, line 2.*{words}") as bad:
            refuse()
        assert "\n" not in str(bad.value)


def test_ids_of_a_model_with_a_tokenizer_of_text_stay_in_its_vocabulary(tmp_path: Path) -> None:
    """Rows of ids and chats may be mixed; the rows are read by the model's own vocabulary."""
    rows = [{"input_ids": [104, 105, 0], "labels": [-100, 105, 0]}, {"prompt": "h", "completion": "i"}, {"input_ids": [1, 2]}]
    made = {"max_length": LENGTH, "vocab_size": 300, "seed": 0, "cache": tmp_path / "cache", "log": lambda line: None}
    data = section(written(tmp_path / "rows.jsonl", rows), tokenizer="bytes", vocab_size=300)
    train = open_data(data, **made).train
    assert isinstance(train, TrainSet)
    first, second = train.windows.read(np.arange(2))
    assert first.tolist() == second.tolist()  # "hi" and the id that ends a text
    written(tmp_path / "rows.jsonl", [*rows, {"input_ids": [1, 256]}])
    with pytest.raises(
        BadInput, match="line 4: got the id 256, needed ids from 0 to 255; fix: tokenize the text with this model's tokenizer"
    ):
        open_data(data, **made)
