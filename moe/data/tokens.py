"""Token files: text is tokenized once, stored in the user's cache folder, and memory-mapped by every process.

    <cache>/<key>/  train.bin  validation.bin    little-endian uint16 (uint32 for a vocabulary larger than 65,536)
                    tokenizer.json  index.json   sizes, SHA-256 of each file and of the corpus, counts

The key is a hash of everything that the files depend on, so they are never out of date. They are built in a temporary folder, synced, then
renamed. So a reader sees all files or none, a killed build leaves nothing valid, and two builders cannot mix their files. A lock only saves
work: a second builder waits for the files of the first. The kernel frees the lock if its holder dies. At every start, contents are compared
with their SHA-256. Files above ALWAYS_READ_BYTES are compared only if their sizes or times have changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from moe.data.corpus import SIDES, Corpus, Side, Survey, content_hash, split_documents, stamp, survey
from moe.data.formats import TextKey, is_separated
from moe.data.tokenizer import Bytes, Tokenizer, load, pieces, train_bpe
from moe.recipe.sections import Data
from parallel.errors import BadInput, counted
from parallel.store.files import UTF_8, of_contents, replace_file, sync, write_synced

FORMAT = 2  # version of the token files and of the code that reads a corpus; part of the cache key
ENCODE_TOGETHER_CHARACTERS = 1 << 21  # about this many characters are tokenized in one call
# Corpora and token files up to this size are hashed at every start: at 1.1 GB/s (measured, one core) that takes less than half a second.
ALWAYS_READ_BYTES = 512 << 20
# Hashes are cached only for files with a last change at least this old. File times are coarse, so a file that has changed just now could
# change again without a new time.
SETTLED_NS = 2_000_000_000

Log = Callable[[str], object]
Kept = TypeVar("Kept")


class Damaged(Exception):
    """Raised for token files that do not match their index."""


@dataclass(frozen=True)
class TokenFiles:
    """Opened token files: two read-only memory maps, their tokenizer and their index. `key`: hash of the text and its settings."""

    folder: Path
    train: npt.NDArray[np.integer]
    validation: npt.NDArray[np.integer]
    tokenizer: Tokenizer
    index: dict[str, Any]
    key: str


def cache_folder() -> Path:
    """Return $XDG_CACHE_HOME/moe-parallel/data, or ~/.cache/moe-parallel/data if that variable is not set or relative (as XDG demands)."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "moe-parallel" / "data"
    except RuntimeError:
        raise BadInput("cache folder", got="no home folder", needed="a place for token files", fix="set XDG_CACHE_HOME") from None


def open_or_build(
    corpus: Corpus, data: Data, *, cache: Path, given: dict[str, Any] | None = None, verify: bool = False, log: Log = print
) -> TokenFiles:
    """Open the token files of a corpus; build them first if they are missing or damaged. Raises BadInput for bad text and an unusable
    cache. `given`: description of the tokenizer to use; None: the recipe's. Cached files that the
    recipe's own tokenizer encoded are used too, if it equals `given`. `verify`: hash large files too, although their times are unchanged.
    `log`: prints a line."""
    found = corpus_hash(corpus, cache)
    key = _key(corpus, data, found)
    if given is None or given["kind"] == data.tokenizer == Bytes.name:
        return _open_or_build(cache / key, corpus, data, found, None, verify=verify, log=log)
    with usable(cache), contextlib.suppress(FileNotFoundError, Damaged):
        own = open_files(cache / key, verify=verify)
        if own.tokenizer.describe() == given:
            return own
    folder = cache / _key(corpus, data, found, given=given)
    return replace(_open_or_build(folder, corpus, data, found, load(given), verify=verify, log=log), key=key)


def _open_or_build(
    folder: Path, corpus: Corpus, data: Data, corpus_hash: str, tokenizer: Tokenizer | None, *, verify: bool, log: Log
) -> TokenFiles:
    def build(locked: bool) -> TokenFiles:
        if locked:
            _remove_leftovers(folder)
        return _build(folder, corpus, data, corpus_hash, tokenizer, log)

    return cached(folder, lambda again: open_files(folder, verify=verify or again), build, log)


def cached(named: Path, opened: Callable[[bool], Kept], build: Callable[[bool], Kept], log: Log) -> Kept:
    """Return the cache entry at the path `named`. If the entry is missing or damaged, one process makes it with `build`, and others wait.
    opened(again): reads and returns the entry, or raises FileNotFoundError or Damaged; `again`: True in the second try, after the wait.
    build(locked): makes and returns the entry; `locked`: whether this process holds the lock, False on a file system without locks."""
    with usable(named.parent):
        with contextlib.suppress(FileNotFoundError, Damaged):
            return opened(False)
        named.parent.mkdir(parents=True, exist_ok=True)
        with locked_alone(named.parent / f"{named.name}.lock", log) as locked:
            try:  # another process may have made the entry while this one waited for the lock
                return opened(True)
            except Damaged as damage:
                log(f"data: tokens in {named} are damaged ({damage}): they are made again")
            except FileNotFoundError:
                pass
            return build(locked)


@contextlib.contextmanager
def usable(cache: Path) -> Iterator[None]:
    """Convert OSError while reading and writing the cache to BadInput."""
    try:
        yield
    except OSError as error:
        got = f"{error.strerror or error}{f', {error.filename}' if error.filename else ''}"
        needed = "a writable folder with about 3 times the text's size free"
        fix = "free some space, or set XDG_CACHE_HOME to a folder elsewhere"
        raise BadInput(f"token cache {cache}", got=got, needed=needed, fix=fix) from None


def corpus_hash(corpus: Corpus, cache: Path) -> str:
    """Return the hash of all files' names and contents. For large corpora it is cached under the files' sizes and times."""
    return _by_stamp(corpus, cache, lambda: content_hash(corpus))


def _by_stamp(corpus: Corpus, cache: Path, hashed: Callable[[], str]) -> str:
    """Return `hashed()`, a SHA-256 of these files. For large files it is cached under sizes and times, so restarts need not read them."""
    before = stamp(corpus)
    if before.size_bytes <= ALWAYS_READ_BYTES:
        return hashed()
    note = cache / "stamps" / before.identity
    with contextlib.suppress(OSError, ValueError):
        known = note.read_text()
        if len(bytes.fromhex(known)) == 32:
            return known
    digest = hashed()
    if time.time_ns() - before.changed_ns > SETTLED_NS and stamp(corpus) == before:
        with contextlib.suppress(OSError):  # losing the cached hash costs only time
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(note, digest)
    return digest


def _key(corpus: Corpus, data: Data, corpus_hash: str, *, given: dict[str, Any] | None = None) -> str:
    """Return a hash of everything on which the token files depend: the corpus, the settings, and the `given` tokenizer if any."""
    settings = {
        "format": FORMAT,
        "corpus": corpus_hash,
        "source": corpus.source,
        "text_key": corpus.text_key.name if corpus.source in ("jsonl", "mixed") else None,
        "validation_share": data.validation_share,
        "tokenizer": data.tokenizer if given is None else hashlib.sha256(json.dumps(given).encode()).hexdigest(),
        "vocab_size": data.vocab_size if data.tokenizer == "bpe" and given is None else None,
    }
    if corpus.encoding != UTF_8:
        settings["encoding"] = corpus.encoding
    if separated := sorted(filter(is_separated, corpus.tables)):
        settings["separated"] = separated
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:24]


def open_files(folder: Path, *, verify: bool = False) -> TokenFiles:
    """Open token files, and check their sizes and contents (SHA-256). The contents of large files are checked only if their times have
    changed, or with `verify`. Raises FileNotFoundError for a missing folder, Damaged for files that do not match their index, and OSError
    for files that the system cannot read."""
    if not folder.is_dir():
        raise FileNotFoundError(folder)
    try:
        index = json.loads((folder / "index.json").read_text())
        if index["format"] != FORMAT or index["key"] != folder.name:
            raise Damaged("index.json belongs to other files")
        described = (folder / "tokenizer.json").read_bytes()
        if hashlib.sha256(described).hexdigest() != index["tokenizer"]["sha256"]:
            raise Damaged("tokenizer.json is not the one in the index")
        train, validation = (_open_side(folder / f"{side}.bin", index["dtype"], index[side]) for side in SIDES)
        _check_contents(folder, index, always=verify)
        return TokenFiles(folder, train, validation, load(json.loads(described)), index, folder.name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and not of_contents(error):
            raise
        raise Damaged(f"{type(error).__name__}: {error}") from None


def _open_side(path: Path, dtype: str, entry: dict[str, Any]) -> npt.NDArray[np.unsignedinteger]:
    size, expected = path.stat().st_size, entry["tokens"] * np.dtype(dtype).itemsize
    if size != expected:
        raise Damaged(f"{path.name} has {size:,} bytes, not {expected:,}")
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _check_contents(folder: Path, index: dict[str, Any], *, always: bool) -> None:
    """Raise Damaged if the contents of a file do not match the index. `always`: hash large files even if their times are unchanged."""
    recorded = {f"{side}.bin": index[side]["sha256"] for side in SIDES}
    whole = hashlib.sha256(json.dumps(recorded).encode()).hexdigest()

    def hashed() -> str:
        for name, wanted in recorded.items():
            with (folder / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != wanted:
                    raise Damaged(f"{name} has another SHA-256 than the index")
        return whole

    files = Corpus("text", folder, tuple(recorded), TextKey(""), str(folder))
    if always or _by_stamp(files, folder.parent, hashed) != whole:
        hashed()


def _build(folder: Path, corpus: Corpus, data: Data, corpus_hash: str, tokenizer: Tokenizer | None, log: Log) -> TokenFiles:
    """Tokenize a corpus into a temporary folder next to `folder`, then rename the temporary folder to `folder`. corpus_hash: SHA-256 of the
    corpus. tokenizer None: the recipe's. log: prints a line."""
    start_s = time.monotonic()
    found = survey(corpus, data.validation_share)
    if len(corpus.names) + len(corpus.left_out) > 1 and corpus.source != "python_stdlib":
        by_lines = f"; *.jsonl line by line, key {corpus.text_key.name}" if corpus.source == "mixed" else ""
        log(f"data: {corpus.label}: {found.kinds}{by_lines}")
    described = data.tokenizer if tokenizer is None or data.tokenizer_file else "with the checkpoint's tokenizer"
    log(f"data: tokenizing {counted(found.documents, 'document')} of {corpus.label} ({described}), once")
    temporary = _made_beside(folder, ".tmp")
    try:
        index = {"format": FORMAT, "key": folder.name, **_write_files(temporary, corpus, data, found, tokenizer)}
        index["corpus"] = {"sha256": corpus_hash, "label": corpus.label, "source": corpus.source, "files": len(corpus.names)}
        index |= {"split": found.split, "validation_share": data.validation_share, "skipped": found.skipped, "remarks": found.remarks}
        if content_hash(corpus) != corpus_hash:
            raise BadInput(
                corpus.label, got="files that changed while they were read", needed="files that do not change", fix="start again"
            )
        write_synced(temporary / "index.json", json.dumps(index, indent=1))
        sync(temporary)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    opened = open_files(folder, verify=True)
    skipped = f", {found.skipped:,} skipped (empty or not UTF-8)" if found.skipped else ""
    sizes = f"{len(opened.train):,} train and {len(opened.validation):,} validation tokens, split by {found.split}{skipped}"
    log(f"data: {sizes}, in {time.monotonic() - start_s:.1f} s; kept in {folder}")
    return opened


def _write_files(temporary: Path, corpus: Corpus, data: Data, found: Survey, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Write tokenizer.json and both token files into the folder `temporary`. Return their entries for index.json. found: the survey of the
    corpus. tokenizer None: bytes, or a BPE that is trained here, as data.tokenizer says."""

    def documents() -> Iterator[tuple[Side, str]]:
        return split_documents(corpus, data.validation_share, split=found.split)

    if tokenizer is None and data.tokenizer == "bpe":
        tokenizer = train_bpe((text for side, text in documents() if side == "train"), vocab_size=data.vocab_size)
    tokenizer = tokenizer or Bytes()
    described = json.dumps(tokenizer.describe()).encode()
    write_synced(temporary / "tokenizer.json", described)
    summary = {"kind": tokenizer.describe()["kind"], "vocab_size": tokenizer.vocab_size, "sha256": hashlib.sha256(described).hexdigest()}
    dtype = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    return {"tokenizer": summary, "dtype": dtype, **write_tokens(temporary, documents(), tokenizer, dtype=dtype)}


class _Writer:
    """Writer of one token file, which also computes its hash and counts."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.file, self.dtype, self.sha256 = path.open("wb"), dtype, hashlib.sha256()
        self.tokens = self.text_bytes = self.documents = 0

    def put(self, ids: npt.ArrayLike) -> None:
        content = np.asarray(ids).astype(self.dtype).tobytes()
        self.file.write(content)
        self.sha256.update(content)
        self.tokens += len(content) // np.dtype(self.dtype).itemsize

    def close(self) -> dict[str, Any]:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"tokens": self.tokens, "text_bytes": self.text_bytes, "documents": self.documents, "sha256": self.sha256.hexdigest()}


def write_tokens(folder: Path, documents: Iterator[tuple[Side, str]], tokenizer: Tokenizer, *, dtype: str) -> dict[str, dict[str, Any]]:
    """Write train.bin and validation.bin, with a separator before each document and after the last. Return side -> {"tokens", "text_bytes",
    "documents", "sha256"}."""
    with contextlib.ExitStack() as stack:
        writers = {side: _Writer(folder / f"{side}.bin", dtype) for side in SIDES}
        for writer in writers.values():
            stack.callback(writer.file.close)
        waiting: list[tuple[Side, str, bool]] = []  # pieces to encode in one call, which runs them in parallel on all cores

        def flush() -> None:
            encoded = tokenizer.encode_pieces([part for _, part, _ in waiting])
            for (side, part, starts_document), ids in zip(waiting, encoded, strict=True):
                writers[side].put([tokenizer.separator] * starts_document)
                writers[side].put(ids)
                writers[side].text_bytes += len(part.encode())
                writers[side].documents += starts_document
            waiting.clear()

        characters = 0
        for side, text in documents:
            for n, part in enumerate(pieces(text)):
                waiting.append((side, part, n == 0))
                characters += len(part)
                if characters >= ENCODE_TOGETHER_CHARACTERS:
                    flush()
                    characters = 0
        flush()
        for writer in writers.values():
            writer.put([tokenizer.separator])
        return {side: writer.close() for side, writer in writers.items()}


def _publish(temporary: Path, folder: Path) -> None:
    """Rename the finished folder `temporary` to `folder`. Files that another process has already built there are kept; damaged ones are
    replaced."""
    for _ in range(3):
        with contextlib.suppress(OSError):  # fails if the folder exists; other errors recur in the last line, which raises them
            os.rename(temporary, folder)
            sync(folder.parent)
            return
        try:
            open_files(folder, verify=True)
            return
        except Damaged:
            aside = _made_beside(folder, ".old")
            with contextlib.suppress(FileNotFoundError):
                os.rename(folder, aside)
            shutil.rmtree(aside, ignore_errors=True)
        except FileNotFoundError:
            pass
    os.rename(temporary, folder)


def _made_beside(folder: Path, suffix: str) -> Path:
    """Make a new folder next to `folder`, whose name ends with `suffix`. It has the default permissions, because users may share the
    cache."""
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}{suffix}")
    made.mkdir()
    return made


def _remove_leftovers(folder: Path) -> None:
    """Delete the temporary folders of killed builders. Only the holder of the lock may call it, so that no other builder is alive."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def locked_alone(path: Path, log: Log) -> Iterator[bool]:
    """Hold an exclusive lock on a file. Yield True; or False if the file system has no locks: then two processes may build the same files.
    If this process waited for another process that then failed with BadInput, raise the same BadInput, because this process would fail
    too."""
    with path.open("a+") as file:
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log("data: waiting for another process that builds the same files")
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if failed := file.read():
                what, got, needed, fix = json.loads(failed)
                raise BadInput(what, got=got, needed=needed, fix=fix) from None
        except OSError:
            locked = False
        file.truncate(0)
        try:
            yield locked
        except BadInput as bad:
            file.write(json.dumps([str(part) for part in (bad.what, bad.got, bad.needed, bad.fix)]))
            raise
