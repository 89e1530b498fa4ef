"""Tables of separated values, and text in other encodings, give the same documents as JSONL in UTF-8; what cannot be read is refused."""

from __future__ import annotations

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from moe.checks.together import check_together
from moe.data import formats, open_data
from moe.data.formats import TextKey
from moe.recipe.load import load
from moe.recipe.sections import Data
from parallel.errors import BadInput
from parallel.store.files import named_encoding
from tests.moe.data.test_formats import LINES, TEXTS, read, tokens

HARD = [*TEXTS, 'quotes "here", and, commas', "two\nlines; a\ttab", " spaces "]


def write(path: Path, texts: list[str], *, separator: str, encoding: str = "utf-8") -> Path:
    with path.open("w", encoding=encoding, newline="") as file:
        rows = csv.writer(file, delimiter=separator)
        rows.writerow(["id", "body", "note"])
        rows.writerows([[number, text, "-"] for number, text in enumerate(texts)])
    return path


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ","), ("a.CSV", ";"), ("b.csv", "\t"), ("a.tsv", "\t")])
def test_rows_are_the_documents_that_json_lines_are(name: str, separator: str, tmp_path: Path) -> None:
    lines = "".join(json.dumps({"body": text}) + "\n" for text in HARD)
    (tmp_path / "a.jsonl").write_text(lines)
    path = write(tmp_path / name, HARD, separator=separator)
    found = read(path)
    assert tokens(found) == tokens(read(tmp_path / "a.jsonl"))
    packed = tmp_path / f"{name}.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert tokens(read(packed)) == tokens(found)
    assert list(formats.texts(path, TextKey("note"), "utf-8")) == ["-"] * len(HARD)


@pytest.mark.parametrize("encoding", ["windows-1252", "utf-16", "UTF8"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.txt"])
def test_an_encoding_gives_the_text_in_utf_8(name: str, encoding: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    paths = (tmp_path / name, tmp_path / "a" / name)
    for path, written in zip(paths, ("utf-8", encoding), strict=True):
        if name == "a.csv":
            write(path, TEXTS, separator=",", encoding=written)
        else:
            path.write_text(LINES if name == "a.jsonl" else "".join(TEXTS), encoding=written)
    more = {} if name != "a.txt" else {"text_key": "text"}
    assert tokens(read(paths[1], encoding=encoding, **more)) == tokens(read(paths[0], **more))


def test_each_source_has_its_own_encoding(tmp_path: Path) -> None:
    texts = ["wörter " * 40, "Größe " * 40]
    (tmp_path / "a.txt").write_text(texts[0])
    (tmp_path / "b.txt").write_text(texts[1], encoding="cp1252")
    sources = [{"path": str(tmp_path / "a.txt"), "weight": 1}, {"path": str(tmp_path / "b.txt"), "weight": 1, "encoding": "cp1252"}]
    data = Data.model_validate({"sources": sources, "validation_share": 0.3})
    found = open_data(data, max_length=5, vocab_size=256, seed=0, cache=tmp_path / "cache", log=lambda _: None)
    for part, text in zip(found.train.parts, texts, strict=True):
        assert bytes(part.windows.tokens[1:].tolist()).rstrip(b"\0").decode() in text


def test_in_a_folder_a_table_without_the_column_is_plain_text(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    write(folder / "a.csv", TEXTS, separator=",")
    (folder / "prices.csv").write_text("item,price\npear,1\n" * 20)
    data = read(folder)
    assert [remark[0] for remark in data.index["remarks"]] == ["prices.csv"] and data.index["corpus"]["source"] == "mixed"
    assert read(folder, text_key="other").index["corpus"]["source"] == "text"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b"id,text\n1,words\n",
            "columns id, text, needed the column body; fix: set data.text_key to the name of the one that holds the text",
        ),
        (
            b"id,body\n1,words,more\n",
            r"a.csv, line 2: got a row of 3 fields, needed 2 fields, as in the first line; fix: correct this row, or put",
        ),
        (
            b'id,body\n1,"words\n',
            r"a.csv, line 2: got no table \(unexpected end of data\), needed rows of separated values; fix: correct this row",
        ),
        ("id,body\n1,wörter\n".encode("cp1252"), "got a text that is not utf-8 .*fix: set data.encoding to the encoding in which"),
    ],
)
def test_what_is_no_table_is_one_line(content: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read(tmp_path / "a.csv")


def test_a_line_above_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "LONGEST_BYTES", 1000)
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"id,body\n1," + b"a" * 2000))
    with pytest.raises(BadInput, match="a line of more than 0 MiB"):
        read(path)


def check(**values: Any) -> None:
    check_together(load("switch_tiny", {f"data.{key}": value for key, value in values.items()})[0].resolve(1))


@pytest.mark.parametrize(("name", "fix"), [("utf-61", "did you mean utf-16"), ("hex", "one of utf-8"), ("klingon", "one of utf-8")])
def test_an_encoding_that_is_none_is_refused(name: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(BadInput, match=f"^data.encoding: got {name}, needed a text encoding that Python knows; fix: {fix}"):
        check(path=str(tmp_path / "a.txt"), encoding=name)
    assert named_encoding("UTF8") == named_encoding("utf-8-sig") == "utf-8"


def test_a_data_set_of_the_hub_is_named_with_the_command_that_fetches_it() -> None:
    with pytest.raises(BadInput, match="hf download HuggingFaceH4/ultrachat_200k --repo-type dataset --local-dir ultrachat_200k"):
        check(path="HuggingFaceH4/ultrachat_200k", source="chat")
