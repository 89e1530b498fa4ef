"""Compressed files, tables and token ids of other programs give the same documents as plain text; damaged ones are refused. Only these
tests detect a compressed file that is read up to where it was cut off, Megatron's index applied to other ids, and lost rows of a table."""

from __future__ import annotations

import gzip
import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moe.checks.together import check_together
from moe.data import Dataset, formats, open_data
from moe.data.formats import opened
from moe.data.ids import check_ids
from moe.data.tokenizer import Ids
from moe.recipe.load import load
from moe.recipe.sections import Data
from parallel.errors import BadInput

TEXTS = [f"document {n}: " + "wörter " * (n % 5 + 1) for n in range(40)]
LINES = "".join(json.dumps({"body": text}, ensure_ascii=False) + "\n" for text in TEXTS)


def data_of(path: Path, **more: object) -> Data:
    return Data.model_validate({"path": str(path), "validation_share": 0.3, "text_key": "body", **more})


def read(path: Path, **more: object) -> Dataset:
    data = data_of(path, **more)
    size = int(str(more.get("vocab_size", 256)))
    return open_data(data, max_length=5, vocab_size=size, seed=0, cache=path.parent / "cache", log=lambda _: None)


def tokens(data: Dataset) -> list[list[int]]:
    return [data.train.windows.tokens.tolist(), data.validation.windows.tokens.tolist()]


def packed(kind: str, content: bytes) -> bytes:
    if kind == "gz":
        return gzip.compress(content[:99]) + gzip.compress(content[99:])  # two members in one file, as `cat a.gz b.gz` makes
    library = pytest.importorskip("zstandard", reason="zstandard is not installed")
    return library.ZstdCompressor().compress(content[:99]) + library.ZstdCompressor().compress(content[99:])


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_a_compressed_file_gives_what_its_content_gives(kind: str, name: str, tmp_path: Path) -> None:
    plain, small = tmp_path / name, tmp_path / f"{name}.{kind}"
    plain.write_text(LINES)
    small.write_bytes(packed(kind, plain.read_bytes()))
    assert tokens(read(small)) == tokens(read(plain))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_compressed_file_that_is_damaged_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.jsonl.{kind}"
    content = packed(kind, LINES.encode())
    broken = bytes(byte ^ (at % 7 == 3) * 255 for at, byte in enumerate(content))
    for wrong in (content[:-9], content[: len(content) // 2], b"no such format", content + b"more", broken):
        path.write_bytes(wrong)
        with pytest.raises(BadInput, match="needed the file as it was written; fix: copy or download it again") as refused:
            read(path)
        assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_memory_does_not_grow_with_what_a_compressed_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compressed file of 16 MB of lines is read with less than 1 MB of memory. A compressed line or text above the limit is refused."""
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"body": "word"}\n' * 1_000_000))
    tracemalloc.start()
    assert sum(1 for _ in formats.lines(path)) == 1_000_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    monkeypatch.setattr(formats, "LONGEST_BYTES", 1 << 20)
    path.write_bytes(gzip.compress(b"0" * (16 << 20)))
    for name in ("bomb.jsonl.gz", "bomb.txt.gz"):
        with pytest.raises(BadInput, match="of more than 1 MiB"):
            read(path.rename(path.with_name(name)) and path.with_name(name))
        path = path.with_name(name)
    path.with_name("wide.jsonl.gz").write_bytes(gzip.compress(("0" * (2 << 20)).encode("utf-16")))
    with pytest.raises(BadInput, match="a line of more than 1 MiB"):
        next(formats.lines(path.with_name("wide.jsonl.gz"), "utf-16"))


@pytest.mark.parametrize(("name", "package"), [("a.txt.zst", "zstandard"), ("a.parquet", "pyarrow"), ("a.arrow", "pyarrow")])
def test_a_format_whose_package_is_missing_names_the_command(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"anything")
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(BadInput, match=f"no package {package}.*fix: pip install {package}$"):
        read(tmp_path / name)


@pytest.mark.parametrize("window_log", [28, 31])
def test_a_long_window_of_zstandard_is_read(window_log: int, tmp_path: Path) -> None:
    """The file is one frame written by hand: a header with the window size (RFC 8878, 3.1.1.1.2), and a raw block with the text."""
    pytest.importorskip("zstandard", reason="zstandard is not installed")
    text = b"words " * 20
    header = b"\x28\xb5\x2f\xfd\0" + bytes([(window_log - 10) << 3])
    (tmp_path / "a.txt.zst").write_bytes(header + (1 | len(text) << 3).to_bytes(3, "little") + text)
    assert formats.whole(tmp_path / "a.txt.zst") == text


def write_table(path: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import ipc, parquet

    table = arrow.table({"id": list(range(42)), "body": [*TEXTS[:9], None, "", *TEXTS[9:]]})
    if kind == "parquet":
        parquet.write_table(table, str(path), row_group_size=11)
        return
    with (ipc.new_file if kind == "file" else ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=13)


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_a_tables_rows_are_the_documents_that_lines_are(kind: str, tmp_path: Path) -> None:
    path, plain = tmp_path / ("a.parquet" if kind == "parquet" else "a.arrow"), tmp_path / "a.jsonl"
    write_table(path, kind)
    plain.write_text(LINES)
    found = read(path)
    assert tokens(found) == tokens(read(plain)) and found.index["skipped"] == 2
    with pytest.raises(BadInput, match="columns id, body, needed the column text"):
        read(path, text_key="text")
    with pytest.raises(BadInput, match="needed strings"):
        read(path, text_key="id")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(BadInput, match="no whole table"):
        read(path)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_cell_that_is_no_text_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell that is not UTF-8, and a cell above the limit of a document, are refused with the names of file and column."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import ipc, parquet

    def write(cells: list[bytes]) -> Path:
        offsets = np.cumsum([0, *map(len, cells)], dtype=np.int32)
        buffers = [None, arrow.py_buffer(offsets.tobytes()), arrow.py_buffer(b"".join(cells))]
        table = arrow.table({"body": arrow.Array.from_buffers(arrow.string(), len(cells), buffers)})
        if name == "a.parquet":
            parquet.write_table(table, str(tmp_path / name))
        else:
            with ipc.new_file(str(tmp_path / name), table.schema) as writer:
                writer.write_table(table)
        return tmp_path / name

    with pytest.raises(BadInput, match=f"{name}, column body: got a cell that is no UTF-8 .*fix: "):
        read(write([b"words", b"na\xefve"]))
    monkeypatch.setattr(formats, "LONGEST_BYTES", 1 << 20)
    assert len(list(formats.texts(write([b"a" * (1 << 20), b"b"]), formats.TextKey("body")))) == 2
    with pytest.raises(BadInput, match=f"{name}: got a cell of more than 1 MiB, .*fix: "):
        read(write([b"words", b"a" * ((1 << 20) + 1)]))


def test_memory_does_not_grow_with_the_rows_of_a_table(tmp_path: Path) -> None:
    """64 MB of texts in one row group of a Parquet file are read with less than 20 MB of memory."""
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    from pyarrow import parquet

    table = arrow.table({"body": [f"{n} " * 80_000 for n in range(100, 300)]})
    parquet.write_table(table, str(tmp_path / "a.parquet"), use_dictionary=False, write_batch_size=4)
    del table
    before, peak = arrow.total_allocated_bytes(), 0
    for text in formats.texts(tmp_path / "a.parquet", formats.TextKey("body")):
        assert text and len(text) == 320_000
        peak = max(peak, arrow.total_allocated_bytes() - before)
    assert peak < 20_000_000


def test_a_saved_dataset_is_read_by_the_files_that_its_state_names(tmp_path: Path) -> None:
    """Of a folder saved by `datasets`, only the files that state.json lists are read. A folder of several such folders is refused."""
    saved = tmp_path / "saved" / "train"
    saved.mkdir(parents=True)
    (saved / "dataset_info.json").write_text("{}")
    (saved / "cache-1.arrow").write_bytes(b"of an earlier step")
    with pytest.raises(BadInput, match="which holds saved datasets, needed the folder of one dataset; fix: add --data.path .*train"):
        (saved / "state.json").write_text("{}")
        read(tmp_path / "saved")
    with pytest.raises(BadInput, match="without a list of files in it"):
        read(saved)
    (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    with pytest.raises(BadInput, match="without data-00000-of-00001.arrow"):
        read(saved)
    write_table(saved / "data-00000-of-00001.arrow", "stream")
    (tmp_path / "a.jsonl").write_text(LINES)
    assert tokens(read(saved)) == tokens(read(tmp_path / "a.jsonl"))


DOCUMENTS = [[300 + n, 7, *range(n % 4 + 1)] for n in range(30)]
FLAT = [i for document in DOCUMENTS for i in document]


def megatron(folder: Path, dtype: str = "<u2", code: int = 8) -> Path:
    """Write DOCUMENTS as a dataset in Megatron-LM's format, field by field, and return its .bin file."""
    width = np.dtype(dtype).itemsize
    (folder / "a.bin").write_bytes(np.array(FLAT, dtype=dtype).tobytes())
    lengths = [len(d) for d in DOCUMENTS]
    places = [sum(lengths[:n]) * width for n in range(len(lengths))]
    header = b"MMIDIDX\0\0" + struct.pack("<Q", 1) + struct.pack("<B", code) + struct.pack("<QQ", len(lengths), len(lengths) + 1)
    index = header + struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    (folder / "a.idx").write_bytes(index + struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))
    return folder / "a.bin"


def ids(path: Path, **more: object) -> Dataset:
    """The opened files, which `check_ids` must have accepted, or refused with the same words."""
    values = {"tokenizer": "ids", "vocab_size": 400, **more}
    refused = ""
    try:
        check_ids(data_of(path, **values))
    except BadInput as bad:
        refused = str(bad)
    try:
        made = read(path, **values)
    except BadInput as bad:
        assert str(bad) == refused
        raise
    assert not refused
    return made


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4)])
def test_megatrons_ids_are_read_where_they_lie_and_cut_between_documents(dtype: str, code: int, tmp_path: Path) -> None:
    data = ids(megatron(tmp_path, dtype, code))
    train, validation = tokens(data)
    assert train + validation == FLAT and data.index["dtype"] == dtype
    assert train == FLAT[: len(train)] and validation[0] >= 300, "validation begins with a document"
    assert abs(len(validation) - 0.3 * len(FLAT)) <= max(map(len, DOCUMENTS))
    assert data.validation.bytes_per_id[data.validation.windows.tokens].sum() == len(validation)
    assert ids(tmp_path / "a.idx").key == data.key != ids(tmp_path / "a.bin", vocab_size=500).key


def test_nanogpts_ids_are_a_file_or_both_sides(tmp_path: Path) -> None:
    whole = np.array(FLAT, dtype="<u2")
    whole.tofile(tmp_path / "one.bin")
    train, validation = tokens(ids(tmp_path / "one.bin"))
    assert train + validation == FLAT and len(validation) == len(FLAT) - round(0.7 * len(FLAT))
    (tmp_path / "both").mkdir()
    whole[:77].tofile(tmp_path / "both" / "train.bin")
    whole[60:].tofile(tmp_path / "both" / "val.bin")
    assert tokens(ids(tmp_path / "both")) == [FLAT[:77], FLAT[60:]]
    for name in ("one.bin", "both"):
        with pytest.raises(BadInput, match="token ids, as .* shows, needed text, .*; fix: add --data.tokenizer ids"):
            read(tmp_path / name)


def test_a_document_that_is_too_long_is_cut_at_the_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If one document has nine tenths of all ids, no document ends near the split at 0.3, so the document is cut."""
    documents = [[5] * 90, [6] * 10]
    monkeypatch.setitem(globals(), "DOCUMENTS", documents)
    monkeypatch.setitem(globals(), "FLAT", sum(documents, []))
    for share, held in ((0.3, 30), (0.1, 10), (0.12, 10), (0.25, 25), (0.07, 10)):
        assert len(tokens(ids(megatron(tmp_path), validation_share=share))[1]) == held


def test_ids_that_are_missing_or_unreadable_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = megatron(tmp_path)
    for wrong in ("no.bin", "no.idx", "none"):
        with pytest.raises(BadInput, match=f"data.path: got .*{wrong}, needed a file or folder that exists; fix: check the spelling"):
            ids(tmp_path / wrong)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(BadInput, match="a.bin: got Permission denied, needed a readable file"):
        ids(path)


def test_keys_that_ids_do_not_read_are_refused_where_they_are_said(tmp_path: Path) -> None:
    path, both = megatron(tmp_path), tmp_path / "both"
    both.mkdir()
    for name in ("train.bin", "val.bin"):
        np.array(FLAT, dtype="<u2").tofile(both / name)
    said = {"data.tokenizer": "ids", "data.vocab_size": "400", "data.path": str(path)}
    assert load("switch_tiny", said | {"data.validation_share": "0.2"})[0].data.validation_share == 0.2
    for more in ({"data.source": "text"}, {"data.text_key": "body"}, {"data.path": str(both), "data.validation_share": "0.2"}):
        with pytest.raises(
            BadInput, match=r"^data\.(source|text_key|validation_share): got .*, but the data are token ids, needed .*; fix: remove data"
        ):
            load("switch_tiny", said | more)
    (tmp_path / "mine.yaml").write_text("extends: switch_tiny\ndata: {text_key: body}\n")
    assert load(tmp_path / "mine.yaml", said)[0].data.tokenizer == "ids", "turned off by what is nearer"
    assert ids(both).key == ids(both, validation_share=0.2).key and ids(path).key != ids(path, validation_share=0.2).key


def test_a_vocabulary_below_256_is_allowed_only_for_token_ids(tmp_path: Path) -> None:
    (np.arange(200) % 65).astype("<u2").tofile(tmp_path / "a.bin")
    assert ids(tmp_path / "a.bin", vocab_size=65).tokenizer.vocab_size == 65
    said = {"data.vocab_size": "65", "data.path": str(tmp_path / "a.bin")}
    check_together(load("switch_tiny", said | {"data.tokenizer": "ids"})[0].resolve(1))
    with pytest.raises(BadInput, match="data.vocab_size: got 65, needed greater than 256"):
        check_together(load("switch_tiny", said | {"data.tokenizer": "bpe"})[0].resolve(1))


def _cut_index(path: Path) -> str:
    path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:-8])
    return "bytes for 30 sequences and 31 document ends, which take"


def _other_magic(path: Path) -> str:
    path.with_suffix(".idx").write_bytes(b"X" + path.with_suffix(".idx").read_bytes()[1:])
    return "no index of Megatron's"


def _longer_ids(path: Path) -> str:
    path.write_bytes(path.read_bytes() + b"\0\0")
    return rf"{2 * len(FLAT) + 2:,} bytes where a.idx says {len(FLAT):,} ids of 2 bytes"


def _float_ids(path: Path) -> str:
    megatron(path.parent, "<f4", 7)
    return "version 1 and dtype 7"


def _other_place(path: Path) -> str:
    content = bytearray(path.with_suffix(".idx").read_bytes())
    content[34 + 4 * 30 + 8] ^= 2  # the byte position of the second sequence
    path.with_suffix(".idx").write_bytes(content)
    return "sequences that do not follow one another"


def _no_ids(path: Path) -> str:
    path.unlink()
    return "no a.bin next to it"


def _odd(path: Path) -> str:
    path.with_suffix(".idx").unlink()
    path.write_bytes(path.read_bytes()[:-1])
    return "no whole number of uint16"


@pytest.mark.parametrize("harm", [_cut_index, _other_magic, _longer_ids, _float_ids, _other_place, _no_ids, _odd])
def test_ids_that_are_damaged_are_refused(harm: Callable[[Path], str], tmp_path: Path) -> None:
    said = harm(path := megatron(tmp_path))
    with pytest.raises(BadInput, match=said) as refused:
        ids(path if path.exists() else path.with_suffix(".idx"))
    assert "fix: " in str(refused.value) and "\n" not in str(refused.value)


def test_ids_need_their_vocabulary_and_are_no_text(tmp_path: Path) -> None:
    path = megatron(tmp_path)
    with pytest.raises(BadInput, match="data.vocab_size: got 329, needed above 329, the largest id"):
        ids(path, vocab_size=329)
    assert ids(path, vocab_size=330).tokenizer.vocab_size == 330
    with pytest.raises(BadInput, match="data.path: got .*a.bin, token ids.*fix: add --data.tokenizer ids --data.vocab_size N"):
        read(path)
    (tmp_path / "a.txt").write_text("words")
    with pytest.raises(BadInput, match="needed a file of token ids"):
        ids(tmp_path / "a.txt")


def test_ids_are_shown_and_given_as_numbers() -> None:
    tokenizer = Ids(400)
    assert tokenizer.beginning("17 0  399") == [17, 0, 399] and tokenizer.decode([17, 0, 399]) == "17 0 399 "
    for wrong in ("def f():", "400", "-1", ""):
        with pytest.raises(BadInput, match='needed ids from 0 to 399, .*fix: --prompt "17 92 3"'):
            tokenizer.beginning(wrong)


def test_plain_files_are_opened_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"words")
    with opened(tmp_path / "a.txt") as file:
        assert file.read() == b"words"
