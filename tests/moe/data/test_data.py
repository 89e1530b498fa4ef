"""Laws of the data: no text is in train and validation, no token is lost, every window is read once an epoch on any number of ranks, and
token files are complete or absent."""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.data import Dataset, TrainSet, corpus, open_data, tokenizer, tokens
from moe.data.order import ValidationSet, Windows, permutation
from moe.data.token_shard import TokenShard
from moe.data.tokenizer import Bpe, Bytes, Tokenizer, load, train_bpe
from moe.recipe.sections import Data
from parallel.errors import BadInput
from parallel.mesh.mesh import Degrees, Mesh

ROOT = Path(__file__).resolve().parents[3]
UNICODE = "Žluťoučký kůň 🐎 naïve\n数据 und Übermut\n"
CRLF = "one\r\ntwo\r\n\r\nthree\r\n"


def user_data(folder: Path, cache: Path, log: Callable[[str], object] = lambda line: None, **settings: object) -> Dataset:
    length = int(str(settings.pop("max_length", 5)))
    data = Data.model_validate({"path": str(folder), "validation_share": 0.3, **settings})
    return open_data(data, max_length=length, vocab_size=4096, seed=3, cache=cache, log=log)


def stream(windows: Windows) -> list[int]:
    return [int(i) for i in windows.tokens]


def documents_of(data: Dataset) -> dict[str, list[str]]:
    """Return side (train, validation) -> its documents as texts."""
    sides = {"train": data.train.windows, "validation": data.validation.windows}
    return {side: data.tokenizer.decode(stream(windows)).strip("\0").split("\0") for side, windows in sides.items()}


def windows_of(num_tokens: int, max_length: int) -> Windows:
    return Windows(np.arange(num_tokens, dtype=np.uint32), max_length, "train")


def part(num_sequences: int, length: int, rank: int, ranks: int) -> TokenShard:
    """Return the shard of tokens that rank `rank` of `ranks` data-parallel ranks reads."""
    return TokenShard.of(Mesh.of(Degrees(dp=ranks), rank), num_sequences=num_sequences, length=length)


def write_folder(folder: Path, **files: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.txt").write_bytes(text.encode())
    return folder


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(permutation(np.arange(size), size=size, seed=seed, epoch=epoch)) == list(range(size))


def plain_permutation(place: int, size: int, seed: int, epoch: int) -> int:
    """Return `permutation` of one position, computed plainly with Python's unbounded integers."""
    digest = hashlib.sha512(f"order {seed} {epoch}".encode()).digest()
    keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(8)]
    rows = next(n for n in range(1, size + 1) if n * n >= size)
    columns = (size + rows - 1) // rows

    def mix(x: int) -> int:
        x %= 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    while True:
        row, column = divmod(place, columns)
        for n in range(0, 8, 2):
            row = (row + mix(column + keys[n])) % rows
            column = (column + mix(row + keys[n + 1])) % columns
        place = row * columns + column
        if place < size:
            return place


@given(size=st.integers(1, 500), seed=st.integers(0, 2**70), epoch=st.integers(0, 99), data=st.data())
@settings(max_examples=60, deadline=None)
def test_permutation_equals_its_plain_twin(size: int, seed: int, epoch: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20))
    found = permutation(places, size=size, seed=seed, epoch=epoch)
    assert found.tolist() == [plain_permutation(place, size, seed, epoch) for place in places]


@pytest.mark.parametrize("size", [7, 64, 1000])
def test_every_place_is_reached_about_equally_often(size: int) -> None:
    """Over many epochs, the positions of two windows and the distance between them are uniformly distributed: chi-squared is within 6
    standard deviations."""
    epochs = 40 * size if size < 1000 else 5 * size
    pairs = np.array([permutation([0, size // 2], size=size, seed=1, epoch=epoch) for epoch in range(epochs)])
    for seen, cells in ((pairs[:, 0], size), (pairs[:, 1], size), ((pairs[:, 1] - pairs[:, 0]) % size - 1, size - 1)):
        counts = np.bincount(seen, minlength=cells)
        chi_squared = float(((counts - epochs / cells) ** 2 / (epochs / cells)).sum())
        assert abs(chi_squared - (cells - 1)) < 6 * (2 * (cells - 1)) ** 0.5


def test_order_is_random_access_at_any_size() -> None:
    train = TrainSet(windows_of(11, 5), seed=0)
    assert 0 <= permutation([10**12 - 1], size=10**12, seed=5, epoch=3)[0] < 10**12
    assert train.batch(10**15, TokenShard.whole(4, 5)).shape == (4, 6)


@given(num_windows=st.integers(1, 40), each=st.integers(1, 6), step=st.integers(0, 50), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_batch_is_the_same_on_any_number_of_ranks(num_windows: int, each: int, step: int, seed: int) -> None:
    train = TrainSet(windows_of(num_windows * 3 + 1, 3), seed)
    whole = train.batch(step, TokenShard.whole(4 * each, 3))
    for ranks in (1, 2, 4):
        parts = [train.batch(step, part(4 * each, 3, rank, ranks)) for rank in range(ranks)]
        assert np.array_equal(np.concatenate(parts), whole)


@given(num_windows=st.integers(1, 40), batch=st.integers(1, 12), epochs=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_window_comes_once_an_epoch(num_windows: int, batch: int, epochs: int, seed: int) -> None:
    """The windows of consecutive batches form epochs with every window once, also if an epoch ends inside a batch."""
    train = TrainSet(windows_of(num_windows * 3 + 1, 3), seed)
    steps = -(-num_windows * epochs // batch)
    seen = np.concatenate([train.batch(step, TokenShard.whole(batch, 3)) for step in range(steps)])[:, 0] // 3
    for epoch in range(epochs):
        assert sorted(seen[epoch * num_windows : (epoch + 1) * num_windows]) == list(range(num_windows))


def test_every_token_but_the_last_few_is_predicted_once_an_epoch() -> None:
    train = TrainSet(windows_of(103, 5), seed=0)
    targets = train.sequences(range(train.num_windows))[:, 1:]
    assert sorted(targets.ravel()) == list(range(1, 101))


def test_resume_twice_equals_no_resume() -> None:
    """A run that stops at step 7, continues on 2 ranks, stops at step 12 and continues on 4 reads the sequences of an unbroken run."""
    unbroken = [TrainSet(windows_of(211, 5), seed=4).batch(step, TokenShard.whole(8, 5)) for step in range(20)]
    resumed = []
    for first, last, ranks in ((0, 7, 1), (7, 12, 2), (12, 20, 4)):
        train = TrainSet(windows_of(211, 5), seed=4)  # a new object: a resumed run knows only its step
        resumed += [np.concatenate([train.batch(s, part(8, 5, r, ranks)) for r in range(ranks)]) for s in range(first, last)]
    assert all(np.array_equal(a, b) for a, b in zip(unbroken, resumed, strict=True))


def test_seeds_and_epochs_have_orders_of_their_own() -> None:
    orders = [tuple(TrainSet(windows_of(501, 5), seed).order(np.arange(100) + 100 * epoch)) for seed in range(3) for epoch in range(3)]
    assert len(set(orders)) == 9 and tuple(range(100)) not in orders


def test_validation_is_the_same_on_any_number_of_ranks_and_spread_evenly() -> None:
    held_out = ValidationSet(Windows(np.arange(101, dtype=np.uint16), 5, "validation"), np.ones(256, np.int64))
    whole = held_out.held(TokenShard.whole(8, 5))
    assert (whole.sequences[:, 0] // 5).tolist() == [0, 2, 5, 7, 10, 12, 15, 17]
    for ranks in (2, 4):
        parts = [held_out.held(part(8, 5, rank, ranks)) for rank in range(ranks)]
        assert np.array_equal(np.concatenate([p.sequences for p in parts]), whole.sequences)
        assert {p.bytes_per_token for p in parts} == {whole.bytes_per_token}
    more_than_there_are = held_out.held(TokenShard.whole(60, 5)).sequences[:, 0] // 5
    assert np.bincount(more_than_there_are).tolist() == [3] * 20


TEXT = (Path(corpus.__file__).read_text() + UNICODE + CRLF) * 2
TOKENIZERS: dict[str, Tokenizer] = {"bytes": Bytes(), "bpe": train_bpe([TEXT], vocab_size=400)}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=st.text() | st.sampled_from([UNICODE, CRLF, "a\0b\0", "\ud800 half", "tab\t  \n\n\n x", "\ufeffbom", ""]))
@settings(max_examples=80, deadline=None)
def test_decode_undoes_encode(kind: str, text: str) -> None:
    """Decoding gives the encoded text, with U+FFFD in place of half surrogates and of NUL, which separates documents."""
    tok = TOKENIZERS[kind]
    ids = tok.encode(text)
    assert tok.decode(ids) == "".join("\ufffd" if c == "\0" or "\ud800" <= c <= "\udfff" else c for c in text)
    assert tok.separator not in ids and ids.dtype == np.int64
    assert (ids < tok.vocab_size).all()
    assert tok.bytes_per_id[ids].sum() == len(tok.decode(ids).encode())


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_long_texts_are_encoded_in_pieces_without_loss(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 37)
    for text in (TEXT[:2000], "x" * 100, UNICODE * 9):
        parts = list(tokenizer.pieces(text))
        assert "".join(parts) == text and max(map(len, parts)) <= 37
        assert TOKENIZERS[kind].decode(TOKENIZERS[kind].encode(text)) == text


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(ids=st.lists(st.integers(-3, 600), max_size=30))
@settings(max_examples=40, deadline=None)
def test_any_ids_decode(kind: str, ids: list[int]) -> None:
    """`decode` gives valid text for any ids that a model may sample: half a character, or an id past the vocabulary."""
    assert TOKENIZERS[kind].decode(ids).encode().decode() == TOKENIZERS[kind].decode(ids)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_tokenizer_comes_back_from_its_json(kind: str) -> None:
    tok = TOKENIZERS[kind]
    again = load(json.loads(json.dumps(tok.describe())))
    assert again.describe() == tok.describe() and again.token_bytes == tok.token_bytes
    assert np.array_equal(again.encode(TEXT), tok.encode(TEXT))


def test_bpe_token_bytes_are_those_of_its_library() -> None:
    tok = TOKENIZERS["bpe"]
    assert isinstance(tok, Bpe)
    assert len(tok.encode(TEXT)) < 0.6 * len(TEXT.encode())
    assert sorted(b for b in tok.token_bytes if len(b) == 1) == sorted([b"\0", *(bytes([i]) for i in range(256))])
    assert tok._library.decode(tok.encode(UNICODE).tolist()) == UNICODE


@pytest.mark.parametrize("description", [None, "bytes!", {}, {"kind": "wordpiece"}, {"kind": "bpe"}, {"kind": "bpe", "model": {}}])
def test_a_wrong_description_is_bad_input(description: object) -> None:
    with pytest.raises(BadInput):
        load(description)


def test_bpe_without_separator_is_bad_input() -> None:
    model = json.loads(json.dumps(TOKENIZERS["bpe"].describe()["model"]).replace('"\\u0000"', '"<s>"'))
    with pytest.raises(BadInput, match="separator"):
        load({"kind": "bpe", "model": model})


def test_a_given_description_that_cannot_be_used_is_bad_input() -> None:
    model = TOKENIZERS["bpe"].describe()["model"]
    assert load({"kind": "given", "model": model, "separator": 0}).vocab_size == 400
    for separator in (None, "7", 400):
        with pytest.raises(BadInput, match="separator"):
            load({"kind": "given", "model": model, "separator": separator})
    model = json.loads(json.dumps(model))
    model["model"]["vocab"]["\u96ea"] = 400
    with pytest.raises(BadInput, match="represents no byte"):
        load({"kind": "given", "model": model, "separator": 0})


def test_bpe_training_is_the_same_in_every_process() -> None:
    code = (
        "import hashlib, json; from moe.data import corpus; from moe.data.tokenizer import train_bpe;"
        "described = json.dumps(train_bpe([open(corpus.__file__).read()] * 3, vocab_size=700).describe());"
        "print(hashlib.sha256(described.encode()).hexdigest())"
    )
    processes = [python(code) for _ in range(3)]
    assert len({process.communicate(timeout=60)[0] for process in processes} - {""}) == 1


def test_two_text_files_keep_every_character(tmp_path: Path) -> None:
    """Training and validation texts together equal the files, with Unicode and CRLF, but without a byte order mark."""
    folder = write_folder(tmp_path / "text", a=UNICODE * 3, b="\ufeff" + CRLF * 5)
    data = user_data(folder, tmp_path / "cache")
    held = documents_of(data)
    if data.index["split"] == "position":
        assert [a + b for a, b in zip(held["train"], held["validation"], strict=True)] == [UNICODE * 3, CRLF * 5]
    else:
        assert sorted(held["train"] + held["validation"]) == sorted([UNICODE * 3, CRLF * 5])
    assert data.index["train"]["text_bytes"] + data.index["validation"]["text_bytes"] == len((UNICODE * 3 + CRLF * 5).encode())


def test_files_go_to_one_side_by_name_alone(tmp_path: Path) -> None:
    """A file is in train or in validation as a whole, and stays there if other files are added."""
    files = {f"f{n}": f"text number {n} " * 5 for n in range(30)}
    some = documents_of(user_data(write_folder(tmp_path / "text", **dict(list(files.items())[:20])), tmp_path / "cache"))
    every = documents_of(user_data(write_folder(tmp_path / "text", **files), tmp_path / "cache"))
    assert sorted(every["train"] + every["validation"]) == sorted(files.values())
    assert set(some["train"]) < set(every["train"]) and set(some["validation"]) <= set(every["validation"])
    assert 2 <= len(every["validation"]) <= 18


@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n")), min_size=1, max_size=30), share=st.floats(0.02, 0.98))
@settings(max_examples=80, deadline=None)
def test_cut_is_at_a_line_boundary_near_the_share(lines: list[str], share: float) -> None:
    text = "\n".join(lines)
    at = corpus.cut(text, share)
    exact = len(text) * (1 - share)
    reach = len(text) * min(share, 1 - share) / 2
    assert abs(at - exact) <= reach + 1
    near = [n for n in range(int(exact - reach) + 2, int(exact + reach) - 1) if 0 < n <= len(text) and text[n - 1] == "\n"]
    assert not near or text[at - 1] == "\n"


def test_a_single_file_is_split_at_a_line(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(f"line {n} é\n" for n in range(200)))
    data = user_data(tmp_path / "one.txt", tmp_path / "cache")
    held = documents_of(data)
    assert held["train"][0] + held["validation"][0] == (tmp_path / "one.txt").read_text()
    assert held["train"][0].endswith("\n") and data.index["split"] == "position"
    assert 0.25 < data.index["validation"]["text_bytes"] / (tmp_path / "one.txt").stat().st_size < 0.35


def test_jsonl_lines_are_documents_and_equal_lines_share_a_side(tmp_path: Path) -> None:
    texts = [UNICODE, CRLF, *(f"document {n % 20}" for n in range(60)), "nul \0 here", "line\u2028separator"]
    path = tmp_path / "some.jsonl"
    path.write_bytes(b"\r\n".join(json.dumps({"body": t, "n": n}).encode() for n, t in enumerate([*texts, ""])) + b"\n\n")
    data = user_data(path, tmp_path / "cache", text_key="body")
    held = documents_of(data)
    assert sorted(held["train"] + held["validation"]) == sorted(t.replace("\0", "\ufffd") for t in texts)
    assert not set(held["train"]) & set(held["validation"])
    assert data.index["split"] == "line" and data.index["skipped"] == 1 and data.index["corpus"]["source"] == "jsonl"


@pytest.mark.parametrize("name", ["some.JSONL", "some.ndjson", "some.jsonlines", "some.Jsonl.GZ"])
def test_every_name_of_json_lines_is_read_by_lines(name: str, tmp_path: Path) -> None:
    """Read as text, their syntax would be trained on without a remark."""
    content = b"".join(json.dumps({"text": f"document {n}"}).encode() + b"\n" for n in range(60))
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("GZ") else content)
    held = documents_of(user_data(tmp_path / name, tmp_path / "cache"))
    assert sorted(held["train"] + held["validation"]) == sorted(f"document {n}" for n in range(60))


def test_only_text_is_read_from_a_folder(tmp_path: Path) -> None:
    """Binary, Latin-1 and empty files are skipped and counted; hidden files and pipes are ignored."""
    folder = write_folder(tmp_path / "text", **{f"f{n}": f"text {n}\n" * 9 for n in range(9)})
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "empty.txt").touch()
    (folder / ".hidden").mkdir()
    (folder / ".hidden" / "x.txt").write_text("secret")
    os.mkfifo(folder / "pipe")
    (folder / "below").mkdir()
    (folder / "below" / "deep.md").write_text("deep\n" * 9)
    data = user_data(folder, tmp_path / "cache")
    held = documents_of(data)
    assert data.index["skipped"] == 3
    assert sorted(held["train"] + held["validation"]) == sorted(["deep\n" * 9, *(f"text {n}\n" * 9 for n in range(9))])


def test_source_is_inferred_from_a_path_and_an_explicit_one_wins(tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    lines = "".join(json.dumps({"text": f"words {n}"}) + "\n" for n in range(30))
    (folder / "a.jsonl").write_text(lines)
    assert corpus.find_corpus(Data(path=str(folder))).source == "jsonl"
    assert corpus.find_corpus(Data(path=str(folder / "a.jsonl"))).source == "jsonl"
    assert corpus.find_corpus(Data(path=str(folder / "a.jsonl"), source="text")).source == "text"
    (folder / "readme.md").write_text("words")
    assert corpus.find_corpus(Data(path=str(folder))).names == ("a.jsonl", "readme.md")
    assert corpus.find_corpus(Data(path=str(folder), source="jsonl")).names == ("a.jsonl",)


def test_default_corpus_is_the_standard_library_alone() -> None:
    found = corpus.find_corpus(Data())
    assert "dataclasses.py" in found.names and "json/decoder.py" in found.names and list(found.names) == sorted(found.names)
    assert not [n for n in found.names if {"site-packages", "test", "tests"} & set(n.split("/")) or n.startswith("_sysconfigdata")]
    sides = {name: corpus.side_of(name, 0.05) for name in found.names}
    assert 0.02 < list(sides.values()).count("validation") / len(sides) < 0.1


def test_jsonl_next_to_text_is_read_by_lines_and_a_folder_is_listed_by_kind_and_size(tmp_path: Path) -> None:
    """In a folder of text files, each line of a JSONL file is a document, unless data.source is text: then its JSON is read as text."""
    folder = write_folder(tmp_path / "text", **{f"f{n}": f"text {n}\n" * 9 for n in range(9)})
    lines = [f"line {n}" for n in range(30)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "small.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "elsewhere").mkdir()
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    told: list[str] = []
    held = documents_of(data := user_data(folder, tmp_path / "cache", told.append))
    assert sorted(held["train"] + held["validation"]) == sorted([*(f"text {n}\n" * 9 for n in range(9)), *lines])
    assert all((line in held[corpus.side_of(line, 0.3)]) for line in lines) and data.index["split"] == "document"
    jsonl = (folder / "a.jsonl").stat().st_size
    assert told[0] == (
        f"data: {folder}: read 1 .jsonl ({jsonl} B), 9 .txt (567 B); skipped 1 .png (6 B), 1 linked folder (0 B); "
        "*.jsonl line by line, key text"
    )
    raw = documents_of(user_data(folder, tmp_path / "cache", source="text"))
    assert any(text.startswith('{"text"') for text in raw["train"] + raw["validation"]), "with data.source text it is read as text"


def _archive(folder: Path) -> str:
    (folder / "README.md").write_text("# A dataset\n" * 9)
    (folder / "train.zip").write_bytes(b"PK\3\4\0" * 99)
    return "of which more is skipped than read (read 1 .md (108 B); skipped 1 .zip (495 B))"


def _pictures(folder: Path) -> str:
    (folder / "notes.txt").write_text("some words\n" * 30)
    (folder / "big.png").write_bytes(b"\x89PNG\0\0" * 99)
    fix = "name a file, or a folder with text alone, or set data.source to text"
    return f"skipped 1 .png (594 B)), needed UTF-8 text, *.jsonl or tables; fix: {fix}"


def _leftover(folder: Path) -> str:
    (folder / "a.jsonl").write_text('{"text": "some words and some more"}\n' * 9)
    (folder / "train.tar.xz").write_bytes(b"\xfd7zXZ\0" * 500)
    return "skipped 1 .xz (3.0 kB)), needed UTF-8 text, *.jsonl or tables; fix: unpack it first"


@pytest.mark.parametrize(("make", "source"), [(m, s) for m in (_archive, _pictures, _leftover) for s in (None, "text")])
def test_a_folder_whose_text_is_in_another_form_is_refused(make: Callable[[Path], str], source: str | None, tmp_path: Path) -> None:
    """A folder is refused if most of its bytes are in archives, pictures or a compressed tar. With data.source text, a folder with pictures
    is accepted."""
    folder = tmp_path / "text"
    folder.mkdir()
    said = make(folder)
    settings = {} if source is None else {"source": source}
    if make is _pictures and source:
        assert user_data(folder, tmp_path / "cache", **settings).index["skipped"] == 1
        return
    with pytest.raises(BadInput, match="^data.path: got ") as refused:
        user_data(folder, tmp_path / "cache", **settings)
    assert said in str(refused.value) or source, refused.value
    assert "fix: " in str(refused.value) and "\n" not in str(refused.value)
    assert not list((tmp_path / "cache").glob("*/index.json"))


BAD: dict[str, tuple[dict[str, object], str]] = {
    "missing path": ({"path": "nowhere"}, "data.path.*exists"),
    "source without path": ({"source": "text", "path": None}, "data.path.*null"),
    "empty folder": ({"path": "empty"}, "without text files"),
    "no jsonl in folder": ({"path": "binary", "source": "jsonl"}, r"without \*\.jsonl"),
    "binary only": ({"path": "binary"}, "1 file, none of them UTF-8 text: binary, needed"),
    "binary in another encoding": (
        {"path": "binary", "encoding": "cp1252"},
        "1 file, none of them CP1252 text: binary, needed text in CP1252, or",
    ),
    "empty file": ({"path": "empty.txt"}, "none of them UTF-8"),
    "blank jsonl": ({"path": "blank.jsonl"}, "0 lines"),
    "not json": ({"path": "notjson.jsonl"}, r"notjson\.jsonl, line 2.*Expecting value"),
    "not an object": ({"path": "list.jsonl"}, r"list\.jsonl, line 1.*JSON list"),
    "other key": ({"path": "key.jsonl"}, r"key\.jsonl, line 1.*set data.text_key to content"),
    "no string": ({"path": "number.jsonl"}, r"number\.jsonl, line 3, key text.*JSON int"),
    "not utf-8": ({"path": "latin.jsonl"}, r"latin\.jsonl, line 1: got not UTF-8, likely Windows-1252"),
    "deep": ({"path": "deep.jsonl"}, r"deep\.jsonl, line 1"),
    "short train text": ({"path": "short.txt"}, "train text: got .* tokens, needed at least one sequence"),
    "short validation text": ({"path": "long.txt", "validation_share": 0.001}, "validation text.*larger data.validation_share"),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad")
    for name in ("empty", "binary"):
        (folder / name).mkdir()
    (folder / "binary" / "a.bin").write_bytes(b"\0\1\2")
    contents = {
        "empty.txt": "",
        "blank.jsonl": "\n \n",
        "notjson.jsonl": '{"text": "a"}\nhello\n',
        "list.jsonl": '["a"]\n',
        "key.jsonl": '{"id": 1, "content": "words"}\n',
        "number.jsonl": '{"text": "a"}\n\n{"text": 3}\n',
        "deep.jsonl": "[" * 200_000,
        "short.txt": "ab\n",
        "long.txt": "words\n" * 200,
    }
    for name, content in contents.items():
        (folder / name).write_text(content)
    (folder / "latin.jsonl").write_bytes('{"text": "naïve"}\n'.encode("latin-1"))
    return folder


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_in_one_line(case: str, bad_files: Path, tmp_path: Path) -> None:
    values, pattern = BAD[case]
    values = {k: str(bad_files / str(v)) if k == "path" and v else v for k, v in values.items()}
    with pytest.raises(BadInput, match=pattern) as refused:
        open_data(Data.model_validate(values), max_length=16, vocab_size=256, seed=0, cache=tmp_path, log=lambda line: None)
    assert "\n" not in str(refused.value) and "fix:" in str(refused.value) and len(str(refused.value)) < 400
    assert not [p for p in tmp_path.iterdir() if p.name.endswith(".tmp")]


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text", a="words " * 99)
    with pytest.raises(BadInput, match="model.vocab_size: got 255, needed at least the tokenizer's 256"):
        open_data(Data(path=str(folder)), max_length=4, vocab_size=255, seed=0, cache=tmp_path, log=lambda line: None)


def test_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BadInput, match="sequences: got 6, needed a multiple of dp=4"):
        part(6, 5, 1, 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "text", **{f"f{n}": f"some words, file {n}\n{UNICODE}{CRLF}" * 4 for n in range(12)})


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_token_files_hold_the_encoded_documents(kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Token files hold each document's ids after a separator, and a separator at the end; counts are exact. Encoding many documents in one
    call, and a document in pieces, changes nothing."""
    monkeypatch.setattr(tokens, "ENCODE_TOGETHER_CHARACTERS", 300)
    monkeypatch.setattr(tokenizer, "PIECE_CHARACTERS", 50)
    data = user_data(folder, tmp_path / "cache", tokenizer=kind, vocab_size=300)
    expected: dict[str, list[int]] = {"train": [0], "validation": [0]}
    counts = dict.fromkeys(expected, 0)
    for path in sorted(folder.iterdir()):
        side = corpus.side_of(path.name, 0.3)
        expected[side] += [*data.tokenizer.encode(path.read_bytes().decode()).tolist(), 0]
        counts[side] += path.stat().st_size
    assert stream(data.train.windows) == expected["train"] and stream(data.validation.windows) == expected["validation"]
    assert {side: data.index[side]["text_bytes"] for side in counts} == counts
    assert data.index["train"]["tokens"] == len(expected["train"]) and data.index["dtype"] == "<u2"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_bytes_per_token_is_that_of_the_windows_used(kind: str, folder: Path, tmp_path: Path) -> None:
    data = user_data(folder, tmp_path / "cache", tokenizer=kind, vocab_size=300)
    held = data.validation.held(part(6, 5, 1, 2))
    targets = data.validation.held(TokenShard.whole(6, 5)).sequences[:, 1:].ravel()
    assert held.bytes_per_token == sum(len(data.tokenizer.token_bytes[i]) for i in targets) / targets.size
    assert held.bytes_per_token == 1.0 if kind == "bytes" else held.bytes_per_token > 1.0


def test_wide_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    wide = TOKENIZERS["bytes"]
    entries = tokens.write_tokens(tmp_path, iter([("train", "ab"), ("validation", "c")]), wide, dtype="<u4")
    assert (tmp_path / "train.bin").read_bytes() == np.array([0, 97, 98, 0], "<u4").tobytes() and entries["train"]["tokens"] == 4


def test_bpe_learns_from_training_documents_alone(folder: Path, tmp_path: Path) -> None:
    first = user_data(folder, tmp_path / "cache", tokenizer="bpe", vocab_size=300)
    held_out = next(path for path in sorted(folder.iterdir()) if corpus.side_of(path.name, 0.3) == "validation")
    held_out.write_text("quite other words " * 50)
    second = user_data(folder, tmp_path / "cache", tokenizer="bpe", vocab_size=300)
    assert first.index["key"] != second.index["key"] and first.tokenizer.describe() == second.tokenizer.describe()


def test_token_files_of_an_earlier_reader_are_built_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another FORMAT gives another key, because an earlier version may read another text from the same folder."""
    monkeypatch.setattr(tokens, "FORMAT", 1)
    before = user_data(folder, tmp_path / "cache").key
    monkeypatch.undo()
    assert user_data(folder, tmp_path / "cache").key != before


def test_files_are_built_once_and_again_when_anything_they_depend_on_changes(folder: Path, tmp_path: Path) -> None:
    def built(**settings: object) -> bool:
        lines: list[str] = []
        user_data(folder, tmp_path / "cache", lines.append, **settings)
        return bool(lines)

    assert built() and not built() and not built(max_length=4) and not built(vocab_size=999)
    assert built(validation_share=0.4) and built(tokenizer="bpe", vocab_size=300) and built(tokenizer="bpe", vocab_size=301)
    (folder / "f0.txt").write_text("changed " * 9)
    assert built() and not built()
    (folder / "f0.txt").rename(folder / "other.txt")
    assert built() and not built()


def test_token_files_are_readable_without_writing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Existing token files are opened without a lock and without a write, so a read-only cache works."""
    user_data(folder, tmp_path / "cache")
    monkeypatch.setattr(tokens, "locked_alone", None)
    before = sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "cache").rglob("*"))
    assert user_data(folder, tmp_path / "cache").train.windows.tokens.flags.writeable is False
    assert sorted((p, p.stat().st_mtime_ns) for p in (tmp_path / "cache").rglob("*")) == before


def damage_truncate(folder: Path) -> None:
    os.truncate(folder / "train.bin", 10)


def damage_extend(folder: Path) -> None:
    with (folder / "validation.bin").open("ab") as file:
        file.write(b"\0\0")


def damage_remove(folder: Path) -> None:
    (folder / "validation.bin").unlink()


def damage_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"format": 1')


def damage_foreign_index(folder: Path) -> None:
    (folder / "index.json").write_text("[]")


def damage_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"kind": "bpe"}')


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_extend, damage_remove, damage_index, damage_foreign_index, damage_tokenizer],
    ids=lambda d: d.__name__,
)
def test_damaged_files_are_built_again_with_one_line(damage: Callable[[Path], None], folder: Path, tmp_path: Path) -> None:
    first = user_data(folder, tmp_path / "cache")
    before, first_index = stream(first.train.windows), first.index
    damage(tmp_path / "cache" / first.index["key"])
    lines: list[str] = []
    again = user_data(folder, tmp_path / "cache", lines.append)
    assert stream(again.train.windows) == before and again.index == first_index
    assert len([line for line in lines if "are damaged (" in line]) == 1
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == sorted([again.index["key"], f"{again.index['key']}.lock"])


def test_verify_finds_one_flipped_bit(folder: Path, tmp_path: Path) -> None:
    built = tmp_path / "cache" / user_data(folder, tmp_path / "cache").index["key"]
    content = bytearray((built / "train.bin").read_bytes())
    content[100] ^= 1
    (built / "train.bin").write_bytes(content)
    with pytest.raises(tokens.Damaged, match=r"train\.bin has another SHA-256"):
        tokens.open_files(built, verify=True)
    data = Data(path=str(folder), validation_share=0.3)
    assert open_data(data, max_length=5, vocab_size=256, seed=0, cache=tmp_path / "cache", verify=True, log=lambda line: None)
    tokens.open_files(built, verify=True)


@pytest.mark.parametrize("always_bytes", [tokens.ALWAYS_READ_BYTES, 0], ids=["small", "large"])
def test_changed_ids_of_the_same_size_are_not_read(
    always_bytes: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token files with changed ids of the same size are built again, with one line. Small files are hashed at every start, large files if
    their times have changed."""
    monkeypatch.setattr(tokens, "ALWAYS_READ_BYTES", always_bytes)
    monkeypatch.setattr(tokens, "SETTLED_NS", -1)
    hashed: list[str] = []
    digest = hashlib.file_digest
    monkeypatch.setattr(tokens.hashlib, "file_digest", lambda file, name: (hashed.append(Path(file.name).name), digest(file, name))[1])
    before = stream(user_data(folder, tmp_path / "cache").train.windows)
    for name in ("train.bin", "validation.bin"):
        (built,) = (tmp_path / "cache").glob(f"*/{name}")
        user_data(folder, tmp_path / "cache")
        hashed.clear()
        user_data(folder, tmp_path / "cache")
        assert (name in hashed) == bool(always_bytes)
        content, times = np.fromfile(built, "<u2"), built.stat()
        content[::7] ^= 1
        content.tofile(built)
        os.utime(built, ns=(times.st_atime_ns, times.st_mtime_ns))
        lines: list[str] = []
        assert stream(user_data(folder, tmp_path / "cache", lines.append).train.windows) == before
        assert [line for line in lines if "are damaged" in line and f"{name} has another SHA-256" in line]


@pytest.mark.parametrize("name", ["index.json", "train.bin"])
def test_token_files_that_cannot_be_read_are_not_built_again(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    built = cache / user_data(folder, cache).index["key"]
    before = {path.name: path.read_bytes() for path in built.iterdir()}
    real = open

    def refused(path: object, *a: object, **k: object) -> object:
        if str(path) == str(built / name):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *a, **k)  # type: ignore[call-overload]

    for of in ("builtins.open", "io.open"):
        monkeypatch.setattr(of, refused)
    lines: list[str] = []
    with pytest.raises(BadInput, match=f"^token cache .*: got Permission denied, .*{name}, needed"):
        user_data(folder, cache, lines.append)
    monkeypatch.undo()
    assert not lines and before == {path.name: path.read_bytes() for path in built.iterdir()}


@pytest.mark.parametrize("mask", [0o022, 0o002])
def test_modes_of_token_files_follow_the_umask(mask: int, folder: Path, tmp_path: Path) -> None:
    usual = os.umask(mask)
    try:
        built = tmp_path / "cache" / user_data(folder, tmp_path / "cache").index["key"]
    finally:
        os.umask(usual)
    assert built.stat().st_mode & 0o777 == 0o777 & ~mask
    assert {path.stat().st_mode & 0o777 for path in built.iterdir()} == {0o666 & ~mask}


def test_an_id_beyond_the_vocabulary_and_a_file_that_was_cut_are_one_line(folder: Path, tmp_path: Path) -> None:
    """`Windows.read` raises BadInput for a token file that is changed or truncated while it is mapped. Without its checks the model would
    have an index error, or the process would die by SIGBUS."""
    data = user_data(folder, tmp_path / "cache")
    path = tmp_path / "cache" / data.index["key"] / "train.bin"
    ids = np.memmap(path, dtype="<u2", mode="r+")
    data.train.windows.read(np.arange(data.train.num_windows))
    kept, ids[8] = ids[8], 256 + 40
    where = re.escape(str(path))
    with pytest.raises(BadInput, match=f"^token 8 in {where}: got the id 296, needed ids from 0 to 255"):
        data.train.windows.read(np.arange(3))
    ids[8] = kept
    data.train.windows.read(np.arange(3))
    os.truncate(path, 20)
    with pytest.raises(BadInput, match=f"^data file {where}: got 20 bytes: it was cut while it was read, needed "):
        data.train.batch(0, TokenShard.whole(2, 5))


@pytest.mark.parametrize("start", ("first", "later"))
def test_work_that_failed_is_not_done_again_by_a_process_that_waited_for_it(tmp_path: Path, start: str) -> None:
    """Ranks open the same files: one reads them, the others wait for its lock. All raise its error. A later start tries again."""
    path, begun, waits = tmp_path / "a.lock", threading.Event(), threading.Event()
    path.write_text("" if start == "first" else json.dumps(["b.txt", "no text", "text", "write it"]))

    def fails() -> None:
        with suppress(BadInput), tokens.locked_alone(path, print):
            begun.set()
            assert waits.wait(60)
            raise BadInput("a.txt, line 7", got="no JSON", needed="one object", fix="correct this line")

    first = threading.Thread(target=fails)
    first.start()
    assert begun.wait(60)
    same = "^a.txt, line 7: got no JSON, needed one object; fix: correct this line$"
    with pytest.raises(BadInput, match=same), tokens.locked_alone(path, lambda line: waits.set()):
        raise AssertionError("the work was done again")
    first.join()
    with tokens.locked_alone(path, print) as locked:
        assert locked and not path.read_text()


BUILD = """
import sys
from pathlib import Path
from moe.recipe.sections import Data
from moe.data import open_data, tokens
publish = tokens._publish
def slow(temporary, folder):
    print("ready", flush=True)
    import time; time.sleep(float(sys.argv[3]))
    publish(temporary, folder)
tokens._publish = slow
lines = []
source, cache = Data(path=sys.argv[1], validation_share=0.3), Path(sys.argv[2])
data = open_data(source, max_length=5, vocab_size=256, seed=3, cache=cache, log=lines.append)
print(data.index["train"]["sha256"], any("tokenizing" in line for line in lines))
"""


@pytest.mark.alone
def test_a_killed_build_leaves_nothing_that_counts_and_blocks_nobody(folder: Path, tmp_path: Path) -> None:
    """A builder is killed while it holds the lock. The next builder gets the lock within seconds and removes the unfinished files."""
    cache = tmp_path / "cache"
    process = python(BUILD, folder, cache, 60)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert [p for p in cache.iterdir() if p.name.endswith(".tmp")]
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    start_s = time.monotonic()
    data = user_data(folder, cache)
    assert time.monotonic() - start_s < 5
    assert sorted(p.name for p in cache.iterdir()) == sorted([data.index["key"], f"{data.index['key']}.lock"])


def test_processes_that_start_at_once_build_once(folder: Path, tmp_path: Path) -> None:
    processes = [python(BUILD, folder, tmp_path / "cache", 0.5) for _ in range(4)]
    last_lines = [process.communicate(timeout=60)[0].splitlines()[-1].split() for process in processes]
    assert len({digest for digest, _ in last_lines}) == 1
    assert [built for _, built in last_lines].count("True") == 1


def test_without_locks_the_rename_keeps_builders_apart(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system without locks, two builders build the same files: the files of the first to finish stay, and both use them."""

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    publish, inodes = tokens._publish, list[int]()

    def late(temporary: Path, target: Path) -> None:
        if not target.exists():
            monkeypatch.setattr(tokens, "_publish", publish)
            user_data(folder, tmp_path / "cache")
            inodes.append((target / "index.json").stat().st_ino)
        publish(temporary, target)

    monkeypatch.setattr(tokens, "_publish", late)
    data = user_data(folder, tmp_path / "cache")
    assert (tmp_path / "cache" / data.index["key"] / "index.json").stat().st_ino == inodes[0]
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix in (".tmp", ".old")]


def test_a_full_disk_is_bad_input_and_leaves_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device.*XDG_CACHE_HOME"):
        user_data(folder, tmp_path / "cache")
    assert [p.suffix for p in (tmp_path / "cache").iterdir()] == [".lock"]


def test_an_unusable_cache_is_bad_input(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match="token cache"):
        user_data(folder, tmp_path / "file" / "cache")


def test_text_that_changes_while_it_is_read_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey = corpus.survey

    def meanwhile(found_corpus: corpus.Corpus, share: float) -> corpus.Survey:
        found = survey(found_corpus, share)
        (folder / "f1.txt").write_text("new text " * 40)
        return found

    monkeypatch.setattr(tokens, "survey", meanwhile)
    with pytest.raises(BadInput, match="changed while they were read"):
        user_data(folder, tmp_path / "cache")


def test_a_large_corpus_is_not_read_again_until_it_changes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []

    def counting(found: corpus.Corpus) -> str:
        reads.append(1)
        return corpus.content_hash(found)

    monkeypatch.setattr(tokens, "content_hash", counting)
    monkeypatch.setattr(tokens, "ALWAYS_READ_BYTES", 0)
    user_data(folder, tmp_path / "cache")
    user_data(folder, tmp_path / "cache")
    assert len(reads) == 3, "the hash of files that changed a moment ago is not cached: they could change again with the same times"
    monkeypatch.setattr(tokens, "SETTLED_NS", -1)
    first = user_data(folder, tmp_path / "cache")
    reads.clear()
    assert user_data(folder, tmp_path / "cache").index == first.index and not reads
    content = (folder / "f2.txt").read_text()
    times = (folder / "f2.txt").stat()
    (folder / "f2.txt").write_text(content.replace("words", "WORDS"))
    os.utime(folder / "f2.txt", ns=(times.st_atime_ns, times.st_mtime_ns))  # same size and mtime, but another ctime
    assert user_data(folder, tmp_path / "cache").index["key"] != first.index["key"] and reads


def test_cache_folder_follows_xdg(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tokens.cache_folder() == tmp_path / "moe-parallel" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert tokens.cache_folder() == tmp_path / "home" / ".cache" / "moe-parallel" / "data"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tokens.cache_folder() == tmp_path / "home" / ".cache" / "moe-parallel" / "data"


def test_data_needs_no_torch_and_bytes_no_tokenizers() -> None:
    code = "import sys, moe.data; print([m for m in ('torch', 'tokenizers', 'transformers') if m in sys.modules])"
    assert python(code).communicate(timeout=60)[0] == "[]\n"


def test_default_data_end_to_end(tmp_path: Path) -> None:
    """On the standard library's source, the batches of two ranks equal the batch of one, and decode to text of the source files."""
    data = open_data(Data(), max_length=256, vocab_size=256, seed=0, cache=tmp_path, log=lambda line: None)
    whole: npt.NDArray[np.int64] = data.train.batch(5, TokenShard.whole(8, 256))
    assert np.array_equal(np.concatenate([data.train.batch(5, part(8, 256, rank, 2)) for rank in (0, 1)]), whole)
    assert whole.shape == (8, 257) and whole.dtype == np.int64 and whole.max() < 256
    found = corpus.find_corpus(Data())
    library = "\0".join(text for name in found.names for _, text, _ in corpus.read_file(found, name) if text)
    middle = data.tokenizer.decode(whole[3][8:-8]).strip("\ufffd").split("\0")[0]
    assert middle in library
    assert data.validation.held(TokenShard.whole(64, 256)).bytes_per_token == 1.0
