"""Reads token ids that another program has written, without copying them: Megatron's `.bin` with `.idx`, and nanoGPT's `.bin`.

    Megatron   NAME.bin   ids, document after document            NAME.idx   dtype, each sequence's length and offset, ends of documents
    nanoGPT    NAME.bin   ids as little-endian uint16             a folder with train.bin and val.bin has both splits

The texts of the ids are unknown. The recipe gives the size of the vocabulary (data.vocab_size); prompts and generated text are numbers. The
smallest and largest id are checked; they are cached under the files' hash. Formats: Megatron-LM,
megatron/core/datasets/indexed_dataset.py; nanoGPT, data/*/prepare.py.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from moe.data.corpus import Corpus, unreadable
from moe.data.formats import TextKey, damaged
from moe.data.tokenizer import Ids
from moe.data.tokens import FORMAT, Log, TokenFiles, corpus_hash
from moe.recipe.sections import Data
from parallel.errors import BadInput
from parallel.fixes import Set
from parallel.store.files import replace_file, user_path

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype, number of sequences, number of documents + 1
_DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # Megatron's code of the dtype -> dtype; codes 6 and 7 are floats
_AT_ONCE = 1 << 24  # number of ids that are read at a time

Stream = npt.NDArray[np.integer]


class _Found(NamedTuple):
    """Opened files of ids. `validation`: the ids of val.bin; None if all ids are in `train`, which is cut later. `ends`: indices at which
    documents end; None if unknown."""

    files: tuple[Path, ...]
    train: Stream
    validation: Stream | None
    ends: npt.NDArray[np.int64] | None

    @property
    def streams(self) -> list[Stream]:
        return [self.train] if self.validation is None else [self.train, self.validation]


def open_ids(data: Data, *, cache: Path, log: Log = print) -> TokenFiles:
    """Open the ids of `data.path` as token files. `cache`: folder in which the range of ids is stored. `log`: prints a line. Raises
    BadInput for files that are missing, unreadable, damaged, of another format, or with ids outside the vocabulary."""
    path, found = _opened(data)
    corpus = Corpus("text", found.files[0].parent, tuple(file.name for file in found.files), TextKey(""), str(path))
    digest = corpus_hash(corpus, cache)
    share = data.validation_share if found.validation is None else None
    key = hashlib.sha256(json.dumps(["ids", FORMAT, digest, share, data.vocab_size]).encode()).hexdigest()[:24]
    note = cache / "ids" / f"{digest[:24]}.json"
    try:
        least, largest = map(int, json.loads(note.read_text()))
    except (OSError, ValueError, TypeError):
        least, largest = _range(found.streams)
        with contextlib.suppress(OSError):  # this file caches the range of ids; without it, the next start reads all ids again
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(note, json.dumps([least, largest]))
    _check_range(least, largest, path, data.vocab_size)
    train, validation = (found.train, found.validation) if found.validation is not None else _cut(found, data.validation_share)
    log(f"data: {len(train):,} train and {len(validation):,} validation ids of {path}; in bits per byte, an id counts as one byte")
    index = {"dtype": train.dtype.str, "train": {"tokens": len(train)}, "validation": {"tokens": len(validation)}, "key": key}
    return TokenFiles(path if path.is_dir() else path.parent, train, validation, Ids(data.vocab_size), index, key)


def check_ids(data: Data) -> None:
    """Raise BadInput as `open_ids` does, but read only the first 16 million ids of each split."""
    path, found = _opened(data)
    _check_range(*_range([stream[:_AT_ONCE] for stream in found.streams]), path, data.vocab_size)


def _opened(data: Data) -> tuple[Path, _Found]:
    path = user_path(data.path or "", what="data.path")
    try:
        return path, _find(path)
    except OSError as error:
        raise unreadable(Path(error.filename or path), error) from None


def _check_range(least: int, largest: int, path: Path, vocab_size: int) -> None:
    """Raise BadInput if the ids from `least` to `largest` do not fit into the vocabulary."""
    if least < 0:
        raise BadInput(f"data file {path}", got=f"the id {least}", needed="ids from 0", fix="write the file again, as token ids")
    if largest >= vocab_size:
        fix = Set("it", largest + 1, said=f"the size of the vocabulary that the ids were made with, {largest + 1} or more")
        raise BadInput("data.vocab_size", got=vocab_size, needed=f"above {largest}, the largest id in {path}", fix=fix)


def _find(path: Path) -> _Found:
    if not path.exists() and not (path.suffix == ".bin" and path.with_suffix(".idx").is_file()):
        fix = "check the spelling and the folder you are in"
        raise BadInput("data.path", got=path, needed="a file or folder that exists", fix=fix)
    if path.is_dir():
        sides = path / "train.bin", path / "val.bin"
        if not all(side.is_file() for side in sides):
            got, needed = f"{path}, a folder that lacks train.bin or val.bin", "a folder with both, or a file *.bin"
            raise BadInput("data.path", got=got, needed=needed, fix="name a *.bin file in it")
        return _Found(sides, _nanogpt(sides[0]), _nanogpt(sides[1]), None)
    if path.suffix not in (".bin", ".idx"):
        either = "name a *.bin file" | Set("data.tokenizer", "bytes", "bpe", said="bytes or bpe for text")
        raise BadInput("data.path", got=f"{path} with data.tokenizer=ids", needed="a file of token ids, *.bin", fix=either)
    ids, index = path.with_suffix(".bin"), path.with_suffix(".idx")
    if index.is_file():
        return _megatron(ids, index)
    return _Found((ids,), _nanogpt(ids), None, None)


def _nanogpt(path: Path) -> Stream:
    if path.stat().st_size % 2:
        raise damaged(path, f"{path.stat().st_size:,} bytes, no whole number of uint16")
    return _mapped(path, "<u2")


def _megatron(ids: Path, index: Path) -> _Found:
    """Open Megatron's files of ids (.bin) and of their index (.idx). Raises BadInput if they do not belong together."""
    if not ids.is_file():
        raise BadInput(f"data file {index}", got=f"no {ids.name} next to it", needed="both files", fix=f"copy {ids.name} there, too")
    content = index.read_bytes()
    if len(content) < _HEADER.size or not content.startswith(_MAGIC):
        raise damaged(index, "no index of Megatron's: it does not begin with MMIDIDX")
    _, version, code, sequences, documents = _HEADER.unpack_from(content)
    if version != 1 or code not in _DTYPES:
        got = f"version {version} and dtype {code}"
        raise BadInput(f"data file {index}", got=got, needed="version 1 and an integer dtype", fix="write it with Megatron-LM's tools")
    size = _HEADER.size + 12 * sequences + 8 * documents
    if len(content) not in (size, size + sequences):  # optionally one more byte for each sequence (its mode)
        raise damaged(index, f"{len(content):,} bytes for {sequences:,} sequences and {documents:,} document ends, which take {size:,}")
    lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size).astype(np.int64)
    places = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
    numbers = np.frombuffer(content, "<i8", documents, _HEADER.size + 12 * sequences)
    ends = np.concatenate([[0], lengths.cumsum()])
    width = np.dtype(_DTYPES[code]).itemsize
    if ids.stat().st_size != ends[-1] * width:
        raise damaged(ids, f"{ids.stat().st_size:,} bytes where {index.name} says {ends[-1]:,} ids of {width} bytes")
    if (lengths < 0).any() or (places != ends[:-1] * width).any() or ((numbers < 0) | (numbers > sequences)).any():
        raise damaged(index, "sequences that do not follow one another")
    return _Found((ids, index), _mapped(ids, _DTYPES[code]), None, ends[numbers])


def _mapped(path: Path, dtype: str) -> Stream:
    if not path.stat().st_size:
        raise BadInput(f"data file {path}", got="an empty file", needed="token ids", fix="write the file again")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _range(streams: list[Stream]) -> tuple[int, int]:
    """Return the least and the largest id, read in chunks."""
    parts = [stream[at : at + _AT_ONCE] for stream in streams for at in range(0, len(stream), _AT_ONCE)]
    return min(int(part.min()) for part in parts), max(int(part.max()) for part in parts)


def _cut(found: _Found, validation_share: float) -> tuple[Stream, Stream]:
    """Return (train, validation): about the last `validation_share` of the ids is for validation. The cut is at the end of a document if
    one is near."""
    at = round(len(found.train) * (1 - validation_share))
    reach = int(len(found.train) * min(validation_share, 1 - validation_share) / 2)
    near = np.zeros(0, np.int64) if found.ends is None else found.ends[np.abs(found.ends - at) <= reach]
    near = near[(near > 0) & (near < len(found.train))]
    if len(near):
        at = int(near[np.abs(near - at).argmin()])
    return found.train[:at], found.train[at:]
