"""Every file that is skipped, or read as plain text although it is markup, is named with a reason; and so is the key of its texts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moe.data import Dataset, corpus, open_data
from moe.data.remarks import LISTING, list_in, remark_lines
from moe.recipe.load import load
from moe.recipe.sections import Data
from moe.train.loop import trainer
from parallel.errors import BadInput
from tests.support import trained

WORDS = "some words and more of them\n" * 9


def opened(tmp_path: Path, **values: Any) -> Dataset:
    data = Data.model_validate({"validation_share": 0.3} | values)
    return open_data(data, max_length=5, vocab_size=256, seed=0, cache=tmp_path / "cache", log=lambda _: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in ("a.txt", "b.md"):
        (folder / name).write_text(WORDS)
    return folder


def test_every_file_that_is_skipped_or_read_raw_is_named_with_its_reason(folder: Path, tmp_path: Path) -> None:
    """`remark_lines` has a line for each file that is skipped or read as markup, at the first start and later, alone and in a mixture of
    sources; and no line for plain text."""
    (folder / "old.txt").write_bytes("Gr\u00fc\u00dfe \u2013 na\u00efve words\r\n".encode("cp1252"))
    (folder / "wide.txt").write_text("words", encoding="utf-16")
    (folder / "broken.txt").write_bytes(b"\x81\x8d\xff" * 9)
    (folder / "small.png").write_bytes(b"\x89PNG\0\0")
    (folder / "nothing.txt").touch()
    (folder / "table.csv").write_text("id,body\n1,words\n" * 9)
    (folder / "page.html").write_text("<p>words</p>\n" * 9)
    (folder / "link").symlink_to(tmp_path)
    said = {
        "skipped link/: a link to a folder, which is not followed",
        "skipped nothing.txt: empty",
        "skipped broken.txt: not UTF-8",
        "skipped old.txt: not UTF-8, likely Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8 converts it)",
        "skipped wide.txt: not UTF-8, likely UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)",
        "skipped small.png: binary",
        "read page.html as plain text: its tags become text, too",
        "read table.csv as plain text: its separators become text, too; data.text_key may name a column that has the text",
    }
    wanted = {f"data: {line.replace(' ', f' {folder}/', 1)}" for line in said}
    for _ in range(2):
        assert set(remark_lines(opened(tmp_path, path=str(folder)).index)) == wanted
    assert set(remark_lines(opened(tmp_path, sources=[{"path": str(folder), "weight": 1}]).index)) == wanted
    alone = opened(tmp_path, path=str(folder / "table.csv"), source="text")
    assert remark_lines(alone.index) == [
        f"data: read {folder}/table.csv as plain text: its separators become text, too; data.text_key may name a column that has the text"
    ]
    assert remark_lines(opened(tmp_path, path=str(folder / "a.txt")).index) == [] == remark_lines(opened(tmp_path).index)


def test_links_to_nothing_and_pipes_are_named(folder: Path, tmp_path: Path) -> None:
    (folder / "gone.txt").symlink_to("nowhere.txt")
    (folder / "circle.txt").symlink_to("circle.txt")
    os.mkfifo(folder / "pipe.txt")
    assert remark_lines(opened(tmp_path, path=str(folder)).index) == [
        f"data: skipped {folder}/circle.txt: a link to a file that is not there",
        f"data: skipped {folder}/pipe.txt: not a regular file",
        f"data: skipped {folder}/gone.txt: a link to a file that is not there",
    ]


def test_a_run_says_ten_lines_at_most_and_lists_all_in_its_folder(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "mine").mkdir()
    (home / "mine/a.txt").write_text((home / "text.txt").read_text())
    for n in range(25):
        (home / f"mine/e{n:02}.txt").touch()
    (home / "mine/z.html").write_text("<p>words</p>\n")
    run = trained.recipe(home, data={"path": str(home / "mine")}, train={"steps": 1})
    trainer.train(run, out=tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("data: skipped", "data: read", "data: and"))]
    assert len(lines) == 10 and lines[-1] == f"data: and 17 more: {tmp_path / 'run' / LISTING} lists all"
    assert any("z.html as plain text" in line for line in lines), "one of each reason comes first"
    listed = (tmp_path / "run" / LISTING).read_text().splitlines()
    assert len(listed) == 26 and set(lines[:-1]) <= set(listed)
    list_in(tmp_path / "run", {})
    assert not (tmp_path / "run" / LISTING).exists()


def test_a_file_that_may_not_be_read_is_refused_only_if_it_is_named_or_alone(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(tmp_path, path=str(folder))
    (folder / "locked.txt").write_text(WORDS * 99)  # more bytes than the files that are read
    open_file = Path.open

    def locked(self: Path, *args: Any, **more: Any) -> Any:
        if self.name == "locked.txt":
            raise PermissionError(13, "Permission denied", str(self))
        return open_file(self, *args, **more)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "locked.txt")  # root may read every file
    monkeypatch.setattr(Path, "open", locked)
    for share in (0.3, 0.4):  # the first share finds its token files, the second builds new ones
        found = opened(tmp_path, path=str(folder), validation_share=share)
        assert remark_lines(found.index) == [f"data: skipped {folder}/locked.txt: this user may not read it"]
        assert share == 0.4 or found.key == before.key
    with pytest.raises(BadInput, match=r"locked\.txt: got Permission denied, needed a readable file"):
        opened(tmp_path, path=str(folder / "locked.txt"))
    for name in ("a.txt", "b.md"):
        (folder / name).unlink()
    with pytest.raises(BadInput, match=r"locked\.txt: got Permission denied, needed a readable file"):
        opened(tmp_path, path=str(folder))


def test_a_folder_that_may_not_be_read_is_left_out_and_said(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "below").mkdir()
    walk = os.walk

    def locked(root: Path, onerror: Any) -> Any:
        for here, folders, files in walk(root):
            if Path(here).name == "below":
                onerror(PermissionError(13, "Permission denied", here))
            else:
                yield here, folders, files

    monkeypatch.setattr(corpus.os, "walk", locked)
    assert remark_lines(opened(tmp_path, path=str(folder)).index) == [f"data: skipped {folder}/below/: this user may not read it"]


def test_each_source_of_a_mixture_has_a_text_key_of_its_own(tmp_path: Path) -> None:
    """Two JSONL files and a table with the same texts under three keys give the same tokens. Without a source's key, the error proposes
    it."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    (tmp_path / "a").mkdir()
    texts = [f"text number {n} of them" for n in range(40)]

    def lines(key: str) -> str:
        return "".join(json.dumps({key: text, "id": 1}) + "\n" for text in texts)

    for key in ("text", "body"):
        (tmp_path / f"a/{key}.jsonl").write_text(lines(key))
    (tmp_path / "content.parquet").write_bytes(b"")
    parquet.write_table(arrow.table({"content": texts}), str(tmp_path / "content.parquet"))
    plain = opened(tmp_path, path=str(tmp_path / "a/text.jsonl"))
    paths = {"text": "a/text.jsonl", "body": "a/body.jsonl", "content": "content.parquet"}
    sources = [{"path": str(tmp_path / path), "weight": 1, "text_key": key} for key, path in paths.items()]
    mixed = opened(tmp_path, sources=sources)
    parts = mixed.train.parts  # type: ignore[union-attr]
    assert all((part.windows.tokens == plain.train.windows.tokens).all() for part in parts)  # type: ignore[union-attr]
    del sources[0]["text_key"]
    assert opened(tmp_path, sources=sources).key == mixed.key, "without one it is data.text_key"
    del sources[1]["text_key"]
    with pytest.raises(BadInput, match=rf"fix: set text_key of {tmp_path}/a/body.jsonl in data.sources to body$"):
        opened(tmp_path, sources=sources)
    sources[1]["text_key"] = "body"
    del sources[2]["text_key"]
    with pytest.raises(
        BadInput, match=r"columns content, needed the column text; fix: set text_key of .*content.parquet in data.sources to "
    ):
        opened(tmp_path, sources=sources)
    advice = "fix: set data.text_key to body if all files have it, or name the files in data.sources, each with a text_key of its own"
    with pytest.raises(BadInput, match=advice):
        opened(tmp_path, path=str(tmp_path / "a"))
    with pytest.raises(BadInput, match="fix: set data.text_key to body$"):
        opened(tmp_path, path=str(tmp_path / "a/body.jsonl"))


def test_a_text_key_that_no_file_has_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 99)
    (tmp_path / "a.jsonl").write_text('{"body": "some words"}\n' * 99)
    for name, said in (
        ("a.txt", [f"data: data.text_key body is not read: {tmp_path / 'a.txt'} has no JSONL file and no table"]),
        ("a.jsonl", []),
    ):
        heard: list[str] = []
        data = Data(path=str(tmp_path / name), text_key="body")
        open_data(data, max_length=8, vocab_size=256, seed=0, cache=tmp_path / "cache", log=heard.append)
        assert [line for line in heard if "not read" in line] == said


def test_a_text_key_of_token_ids_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\0" * 99)
    source = {"path": str(tmp_path / "a.bin"), "weight": 1, "text_key": "body"}
    values = {"data.tokenizer": "ids", "data.vocab_size": "300", "data.sources": json.dumps([source])}
    with pytest.raises(
        BadInput, match=r"data\.sources\[0\]\.text_key: got body, but the data are token ids, needed text: otherwise this key has"
    ):
        load("switch_tiny", values)
