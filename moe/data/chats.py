"""Chats as sequences. They are rendered and encoded once, stored in the user's cache folder, and memory-mapped by every process.

    <cache>/chats-<key>.bin     a line of JSON with the SHA-256 of the rest: starts, chats int64, ids uint32, predicted bool
    chats of 5, 7, 3, 4 ids     packed into sequences of 12:   |0 0 0 0 0 1 1 1 1 1 1 1|2 2 2 3 3 3 3 . . . . .|  (.: padding)

The key is a hash of everything that the file depends on: the chats, the tokenizer with its template, the length, and the date if the
template writes it. Packing is best-fit decreasing (Johnson et al. 1974; for training: arXiv 2404.10830): the longest chat is placed first,
each in the fullest sequence that has room, and no chat is cut to fit. The first id of a packed chat is marked as its beginning
(moe/recipe/shapes.py): it is not predicted, and tokens attend only to tokens of the same chat. All models use relative positions, so a
packed chat gives the same results as a chat in a sequence of its own. Of a chat that is several samples, each counts here as a chat; only
the held-out split keeps them together.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe.data.chat import ChatFiles, Encoded, encode_chats
from moe.data.corpus import unreadable
from moe.data.order import whole_file
from moe.data.token_shard import Ints
from moe.data.tokenizer import Tokenizer
from moe.data.tokens import Damaged, cached
from moe.recipe.shapes import PADDING, beginning, marked
from parallel.errors import BadInput, counted
from parallel.fixes import Set
from parallel.store.files import replace_file

_FORMAT = 4  # version of the cached file's format and of the encoding of chats; part of the key


@dataclass(frozen=True)
class Chats:
    """Encoded chats, sample by sample. `key`: a hash of everything on which they depend."""

    encoded: Encoded
    key: str

    def __len__(self) -> int:
        return len(self.encoded.starts) - 1

    def ids(self, number: int | np.int64) -> Ints:
        """Return the ids of the sample with this number, int64 [n]. An id that is not predicted is returned as -101 - id, which is below
        0."""
        some = slice(self.encoded.starts[number], self.encoded.starts[number + 1])
        ids = self.encoded.ids_N[some].astype(np.int64)
        return np.where(self.encoded.predicted_N[some], ids, marked(ids))


@dataclass(frozen=True)
class ChatRows:
    """Sequences of chats, with the methods of `Sequences` (moe/data/order.py). members: numbers of the chats, sequence after sequence.
    starts: index in `members` of each sequence's first chat, then the length of `members`. packed: whether a sequence may have several
    chats, with marked beginnings."""

    chats: Chats
    members: Ints
    starts: Ints
    max_length: int
    packed: bool

    @property
    def num_windows(self) -> int:
        return len(self.starts) - 1

    def read(self, windows: Ints, columns: Ints | None = None) -> Ints:
        """Return the sequences with the indices `windows` [n], padded to [n, max_length + 1] int64, or only the given columns. Raises
        BadInput if the cache's file was truncated."""
        whole_file(self.chats.encoded.starts)
        found = np.full((len(windows), self.max_length + 1), PADDING, dtype=np.int64)
        for sequence, window in zip(found, windows, strict=True):
            at = 0
            for ids in map(self.chats.ids, self.members[self.starts[window] : self.starts[window + 1]]):
                sequence[at : at + len(ids)] = ids
                if self.packed:
                    sequence[at] = beginning(ids[0] if ids[0] >= 0 else marked(ids[0]))
                at += len(ids)
        return found if columns is None else found[:, columns]


def open_chats(files: ChatFiles, tokenizer: Tokenizer, *, max_length: int, cache: Path, log: Callable[[str], object]) -> Chats:
    """Open chats; encode them first (`encode_chats`) if the cache does not have them. `log` prints a line. Raises BadInput for a wrong row,
    and for an unusable cache folder."""
    path, key = files.path, partial(_key, files, tokenizer, max_length)
    named = cache / f"chats-{(first := key())}.bin"

    def build(locked: bool) -> Chats:
        several = f" ({', '.join(file.name for file in names)})" if len(names := files.names()) > 1 else ""
        log(f"data: encoding the chats of {path}{several}, once; they are kept in {named}")
        with _readable(path):
            made = encode_chats(files, tokenizer, max_length=max_length)
        if key() != first:
            got, needed = "chats that changed while they were read", "a file that nothing changes"
            raise BadInput(f"data file {path}", got=got, needed=needed, fix="start again")
        for left in cache.glob(f".{named.name}.*.tmp") if locked else ():  # unfinished files of processes that were killed
            left.unlink(missing_ok=True)
        _write(named, made, max_length)
        return _opened(named, max_length)

    found = cached(named, lambda _: _opened(named, max_length), build, log)
    for line in filter(None, (found.encoded.about, found.encoded.remark)):
        log(f"data: {path}: {line}")
    return found


def sequences_of(chats: Chats, *, max_length: int, validation_share: float, packing: bool) -> tuple[ChatRows, ChatRows]:
    """Return the sequences for training and for validation. The last chats, a fraction `validation_share` of all, are for validation,
    each with all of its samples. Raises BadInput if there is only one chat, or one pair of a chosen and a rejected chat, and for pairs
    with `packing`."""
    pairs = chats.encoded.pairs
    if pairs and packing:
        raise BadInput("data.packing", got="true with pairs of chats", needed="false: each pair is a sequence", fix=Set("it", False))
    count, name, each = len(chats.encoded.chats) - 1, *(("pair", 2) if pairs else ("chat", 1))
    if count < 2:
        raise BadInput("data", got=counted(count, name), needed="at least 2, of which one is held out", fix=f"give more {name}s")
    trained = int(chats.encoded.chats[count - min(count - 1, max(1, round(count * validation_share)))])
    lengths = np.diff(chats.encoded.starts).tolist()

    def rows(first: int, last: int) -> ChatRows:
        if not packing:
            return ChatRows(chats, np.arange(first, last), np.arange(0, last - first + 1, each), max_length, packed=pairs)
        found = packed(lengths[first:last], room=max_length + 1)
        starts = np.cumsum([0, *map(len, found)])
        return ChatRows(chats, first + np.concatenate(found), starts, max_length, packed=True)

    return rows(0, trained), rows(trained, len(chats))


def packed(lengths: list[int], *, room: int) -> list[list[int]]:
    """Distribute chats over sequences by best-fit decreasing, so that the `lengths` of a sequence's chats add up to at most `room`. Return
    each sequence as the ascending list of its chats' indices. No length may be above `room`."""
    rows: list[list[int]] = []
    left: dict[int, list[int]] = {}  # number of free ids -> the sequences with this many free ids
    sizes: list[int] = []  # the keys of `left`, ascending
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        at = bisect_left(sizes, lengths[number])
        if at == len(sizes):
            rows.append([])
            row, free = len(rows) - 1, room
        else:
            free = sizes[at]
            row = left[free].pop()
            if not left[free]:
                del left[free], sizes[at]
        rows[row].append(number)
        free -= lengths[number]
        if free not in left:
            left[free] = []
            insort(sizes, free)
        left[free].append(row)
    return [sorted(row) for row in rows]


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Convert OSError while reading a file of chats to BadInput."""
    try:
        yield
    except OSError as error:
        raise unreadable(Path(path), error) from None


def _key(files: ChatFiles, tokenizer: Tokenizer, max_length: int) -> str:
    """Return a hash of everything on which the encoded chats depend."""
    described = json.dumps(tokenizer.describe(), sort_keys=True)
    with _readable(files.path):
        digests = [_digest_of(file) for file in files.names()]
        date = files.changed().isoformat() if "strftime_now" in described else None
    settings = json.dumps([_FORMAT, digests, described, max_length, files.field, files.encoding, date])
    return hashlib.sha256(settings.encode()).hexdigest()[:24]


def _digest_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _write(named: Path, made: Encoded, max_length: int) -> None:
    several = made.chats[: 0 if np.array_equal(made.chats, _plain(len(made.starts) - 1, made.pairs)) else None]
    numbers = b"".join((made.starts.tobytes(), several.tobytes(), made.ids_N.tobytes(), made.predicted_N.tobytes()))
    sizes: dict[str, Any] = {"samples": len(made.starts) - 1, "several": len(several), "ids": len(made.ids_N), "pairs": made.pairs}
    sizes |= {"about": made.about, "remark": made.remark}
    sizes["sha256"] = _digest(numbers, max_length)
    line = json.dumps(sizes).encode() + b"\n"
    replace_file(named, line.rjust(-(-len(line) // 8) * 8) + numbers)


def _plain(samples: int, pairs: bool) -> npt.NDArray[np.int64]:
    """Return `Encoded.chats` if each chat is one sample, or each pair two. This is not stored, so the hash is of the samples alone."""
    return np.arange(0, samples + 1, 2 if pairs else 1)


def _opened(named: Path, max_length: int) -> Chats:
    """Open the file `named`, which has encoded chats. Raises FileNotFoundError, and Damaged if its contents do not match their SHA-256."""
    try:
        with named.open("rb") as file:
            line = file.readline()
        content, sizes = np.memmap(named, np.uint8, mode="r", offset=len(line)), json.loads(line)
        ends = np.cumsum([8 * (sizes["samples"] + 1), 8 * sizes["several"], 4 * sizes["ids"], sizes["ids"]])
        starts, chats = content[: ends[0]].view(np.int64), content[ends[0] : ends[1]].view(np.int64)
        ids_N, predicted_N = content[ends[1] : ends[2]].view(np.uint32), content[ends[2] : ends[3]].view(np.bool_)
        chats = chats if len(chats) else _plain(sizes["samples"], sizes["pairs"])
        if (digest := _digest(content.data, max_length)) != sizes["sha256"]:
            raise Damaged("its contents have another SHA-256")
        return Chats(Encoded(ids_N, predicted_N, starts, chats, sizes["about"], sizes["remark"], sizes["pairs"]), digest[:24])
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{type(error).__name__}: {error}") from None


def _digest(numbers: bytes | memoryview, max_length: int) -> str:
    digest = hashlib.sha256(f"chats {max_length}".encode())
    digest.update(numbers)
    return digest.hexdigest()
