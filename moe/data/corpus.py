"""The corpus: the source of Python's standard library, or the user's text files, folders, JSONL files and tables.

    files in sorted order -> documents -> each on one side: train or validation, never both

Only the SHA-256 of a document's name (files) or text (lines, rows) decides its side, so a new file never changes the side of another. If
this leaves a side empty, as with one file, the last part of every document is held out instead.

Three parts of the standard library are left out: test suites, because many systems install Python without them; files that record how and
where this Python was built; and generated tables (encodings, pydoc's topics), which are no source code and could fill most of a side.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import stat
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from moe.data import formats
from moe.data.remarks import (
    AS_TEXT,
    DANGLING,
    LINK,
    LINKED,
    NO_FILE,
    NO_TEXT,
    SKIPPED,
    UNREADABLE,
    Kinds,
    Remark,
    check_kinds,
    decoded,
    raw,
)
from moe.recipe.sections import Data
from parallel.errors import BadInput, counted, did_you_mean
from parallel.fixes import Fix, Set
from parallel.store.files import UTF_8, named_encoding, user_path

Side = Literal["train", "validation"]
SIDES: tuple[Side, Side] = ("train", "validation")

STDLIB_FOLDERS_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
STDLIB_FILES_LEFT_OUT = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True)
class Corpus:
    """Files to read. `names`: sorted POSIX paths under `root`. If `source` is mixed, *.jsonl are read by lines, `tables` by
    rows, all others as text. `label`: name of the text in messages. `left_out`: entries of the folder that are not read. `chosen`:
    whether data.source is not python_stdlib. `encoding`: Python's name of the encoding of text, lines and separated values."""

    source: Literal["python_stdlib", "text", "jsonl", "mixed"]
    root: Path
    names: tuple[str, ...]
    text_key: formats.TextKey
    label: str
    left_out: tuple[Remark, ...] = ()
    chosen: bool = False
    tables: frozenset[str] = frozenset()
    encoding: str = UTF_8

    def by_lines(self, name: str) -> bool:
        return self.source == "jsonl" or (self.source == "mixed" and formats.is_jsonl(name))

    def by_rows(self, name: str) -> bool:
        return self.source == "mixed" and name in self.tables


class Document(NamedTuple):
    """One document. The hash of `key` assigns it to train or validation. `text` is None if the file is not text or the line is empty; then
    `why` is the reason."""

    key: str
    text: str | None
    why: str = NO_TEXT


class Survey(NamedTuple):
    """Counts over an entire corpus: `documents` with text, `skipped` ones without text, kinds of files, and remarks on files. `split`: the
    unit that is assigned to train or validation: file, line, or document (files, lines and rows mixed). It is position if one side would
    be empty: then every document is cut, its first part for training, its last for validation."""

    split: Literal["file", "line", "document", "position"]
    documents: int
    skipped: int
    kinds: Kinds
    remarks: tuple[Remark, ...] = ()


def find_corpus(data: Data, *, text_key_set_by: str = "data.text_key") -> Corpus:
    """Return the corpus of a recipe's data section. text_key_set_by: the setting that gives the name of the text's key, for error messages.
    Raises BadInput for a path that is missing or has no usable file."""
    text_key = formats.TextKey(data.text_key, text_key_set_by)
    if data.path is None:
        if data.source != "python_stdlib":
            raise BadInput("data.path", got="null", needed=f"a path for data.source={data.source}", fix="add --data.path FILE_OR_FOLDER")
        return _python_stdlib(text_key)
    path = user_path(data.path, what="data.path")
    if not path.exists():
        spelling = "check the spelling and the folder you are in"
        raise BadInput("data.path", got=data.path, needed="a file or folder that exists", fix=spelling)
    of_ids = path.suffix in (".bin", ".idx") if path.is_file() else (path / "train.bin").is_file()
    if of_ids and data.source == "python_stdlib":
        got = f"{path}, token ids, as {'its ending' if path.is_file() else 'a train.bin in it'} shows"
        fix = "add --data.tokenizer ids --data.vocab_size N" | Set("data.source", "text", said="text for a text file")
        raise BadInput("data.path", got=got, needed="text, which data.tokenizer encodes", fix=fix)
    root, names = path.parent, [path.name]
    left_out: list[Remark] = []
    if path.is_dir():
        root, (names, left_out) = path, _walk(path, lambda n: n[0] != ".", lambda n: n[0] != ".")
        if not names and (locked := next((remark for remark in left_out if remark.why == UNREADABLE), None)):
            raise unreadable(path / locked.name, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))
        names = names if data.source == "text" else formats.saved_files(path, names)
    lines = [name for name in names if formats.is_jsonl(name)]
    encoding = named_encoding(data.encoding)
    # a folder may have *.csv and *.tsv files without texts; such a file is read by rows only if it has the column text_key
    tables = [
        name
        for name in names
        if formats.is_table(name)
        or (formats.is_separated(name) and data.source != "text" and (path.is_file() or _has_column(root / name, text_key, encoding)))
    ]
    found: Literal["text", "jsonl", "mixed"] = "jsonl" if names and len(lines) == len(names) else "mixed" if lines or tables else "text"
    source = "jsonl" if data.source == "jsonl" else "text" if data.source == "text" else found
    if source == "jsonl" and path.is_dir():
        left_out += [Remark(name, SKIPPED, "not *.jsonl") for name in names if name not in lines]
        names = lines
    if not names:
        kind = "*.jsonl" if source == "jsonl" else "text"
        got = f"{data.path}, a folder without {kind} files"
        raise BadInput("data.path", got=got, needed=f"{kind} files", fix="name a folder that holds some")
    text_key = text_key._replace(alone=len({*lines, *tables}) < 2)
    chosen = data.source != "python_stdlib"
    return Corpus(source, root, tuple(names), text_key, str(path), tuple(left_out), chosen, frozenset(tables), encoding)


def _has_column(path: Path, text_key: formats.TextKey, encoding: str) -> bool:
    try:
        return text_key.name in formats.columns(path, encoding)
    except (BadInput, OSError):
        return False


def _python_stdlib(text_key: formats.TextKey) -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    folders, files = STDLIB_FOLDERS_LEFT_OUT, STDLIB_FILES_LEFT_OUT
    names, _ = _walk(root, lambda n: n not in folders and n[:7] != "config-", lambda n: n.endswith(".py") and not n.startswith(files))
    if not names:
        raise BadInput("data.source", got=f"python_stdlib, but {root} holds no source", needed="text", fix="add --data.path FILE_OR_FOLDER")
    return Corpus("python_stdlib", root, tuple(names), text_key, f"the standard library of Python {platform.python_version()}")


def _walk(root: Path, keep_folder: Callable[[str], bool], keep_file: Callable[[str], bool]) -> tuple[list[str], list[Remark]]:
    """Return the regular files under a folder as sorted relative POSIX paths, and remarks on entries that are left out: links to folders
    (they may form cycles), broken links, pipes, and files and folders without read permission. keep_folder, keep_file: return whether a
    folder or file with this name is read. Raises BadInput if the folder is not readable."""
    left_out: list[Remark] = []

    def relative(path: Path) -> str:
        return path.relative_to(root).as_posix()

    def locked(error: OSError) -> None:
        if Path(error.filename) == root:
            raise unreadable(root, error) from None
        left_out.append(Remark(relative(Path(error.filename)) + "/", SKIPPED, UNREADABLE))

    names = []
    for folder, folders, files in os.walk(root, onerror=locked):
        folders[:] = filter(keep_folder, folders)
        links = [path for name in folders if (path := Path(folder, name)).is_symlink()]
        left_out += [Remark(relative(path) + LINK, SKIPPED, LINKED) for path in links]
        for path in (Path(folder, name) for name in filter(keep_file, files)):
            if (why := _why_not(path)) is None:
                names.append(relative(path))
            else:
                left_out.append(Remark(relative(path), SKIPPED, why))
    return sorted(names), sorted(left_out)


def _why_not(path: Path) -> str | None:
    """Return why `path`, an entry of a folder but not a folder itself, cannot be read as a file; None if it can."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        return DANGLING if error.errno in (errno.ENOENT, errno.ELOOP) else UNREADABLE
    return NO_FILE if not regular else None if os.access(path, os.R_OK) else UNREADABLE


def read_file(corpus: Corpus, name: str) -> Iterator[Document]:
    """Yield a file's documents, of which only one is in memory at a time. Raises BadInput for an unreadable file and for a bad JSONL
    line."""
    path = corpus.root / name
    try:
        if corpus.by_lines(name):
            yield from _read_lines(path, corpus.text_key, corpus.encoding)
        elif corpus.by_rows(name):
            found = formats.texts(path, corpus.text_key, corpus.encoding)
            yield from (Document(text or "", text or None) for text in found)
        else:
            yield Document(name, *decoded(formats.whole(path), corpus.encoding))
    except OSError as error:
        raise unreadable(path, error) from None


def check_first_documents(data: Data, *, text_key_set_by: str) -> None:
    """Read the first documents of the first JSONL file and of the first table. Raises BadInput if one cannot be read or has no text under
    the key. text_key_set_by: as in `find_corpus`."""
    corpus = find_corpus(data, text_key_set_by=text_key_set_by)
    for kind in (corpus.by_lines, corpus.by_rows):
        for name in islice(filter(kind, corpus.names), 1):
            for _ in islice(read_file(corpus, name), formats.FIRST):
                pass


def _read_lines(path: Path, text_key: formats.TextKey, encoding: str) -> Iterator[Document]:
    for number, line in enumerate(formats.lines(path, encoding), 1):
        if line.strip():
            text = _line_text(line, f"{path}, line {number}", text_key)
            yield Document(text, text or None)


def _line_text(line: bytes, where: str, text_key: formats.TextKey) -> str:
    """Return the text of one JSONL line. `where`: its file and number, for error messages. Raises BadInput for a line without the text."""
    try:
        value: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        problem = f"no JSON ({error.msg} at column {error.colno})" if isinstance(error, json.JSONDecodeError) else decoded(line)[1]
        got = problem or "a line that cannot be decoded"
        raise BadInput(where, got=got, needed="one JSON object", fix="correct or remove that line") from None
    key = text_key.name
    if not isinstance(value, dict):
        raise BadInput(where, got=f"a JSON {type(value).__name__}", needed=f'an object like {{"{key}": "..."}}', fix="correct that line")
    if key not in value:
        near = did_you_mean(key, value) or next((name for name, held in value.items() if isinstance(held, str)), None)
        keys = ", ".join(list(value)[:8]) or "no key"
        fix: Fix = text_key.fix(near)
        if isinstance(value.get("messages", value.get("conversations")), list):
            fix = Set("data.source", "chat")
        raise BadInput(where, got=f"an object with {keys}", needed=f"the key {key}", fix=fix)
    text = value[key]
    if not isinstance(text, str):
        raise BadInput(f"{where}, key {key}", got=f"a JSON {type(text).__name__}", needed="a string", fix="correct that line")
    return text


def unreadable(path: Path, error: OSError) -> BadInput:
    """Return the error for a file that the system cannot read."""
    fix = "change its permissions or move it elsewhere"
    return BadInput(f"data file {path}", got=error.strerror or error, needed="a readable file", fix=fix)


def side_of(key: str, validation_share: float) -> Side:
    """Return the side of the document with this key: validation if the key's SHA-256, read as a number in [0, 1), is below
    validation_share."""
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    return "validation" if int.from_bytes(digest[:8], "big") < int(validation_share * 2**64) else "train"


def survey(corpus: Corpus, validation_share: float) -> Survey:
    """Read all documents once, count them and choose the split. validation_share: share of the documents that is for validation. Raises
    BadInput if there is no text, and for a folder of which more bytes are skipped than read (`check_kinds`)."""
    sides: Counter[Side] = Counter()
    skipped, kinds, remarks = 0, Kinds(), list[Remark]()
    for name in corpus.names:
        before, why = sides.total(), NO_TEXT
        for key, text, reason in read_file(corpus, name):
            if text is None:
                skipped, why = skipped + 1, reason
            else:
                sides[side_of(key, validation_share)] += 1
        read = sides.total() > before
        kinds.add(name, _stat(corpus.root / name).st_size, read=read)
        if not read:
            remarks.append(Remark(name, SKIPPED, why))
        elif (beside := raw(formats.unpacked_name(name))) and not corpus.by_lines(name) and not corpus.by_rows(name):
            remarks.append(Remark(name, AS_TEXT, beside))
    for name, _, why in corpus.left_out:
        if why not in (UNREADABLE, DANGLING, NO_FILE):
            kinds.add(name, 0 if name.endswith(LINK) else _stat(corpus.root / name).st_size, read=False)
    if not sides:
        raise _without_text(corpus, skipped, kinds, remarks)
    if corpus.source == "python_stdlib":
        remarks = []
    else:
        check_kinds(kinds, path=corpus.label, source_set=corpus.chosen, encoding=corpus.encoding)
    whole: Literal["file", "line", "document"] = "line" if corpus.source == "jsonl" else "document" if corpus.source == "mixed" else "file"
    return Survey(whole if len(sides) == 2 else "position", sides.total(), skipped, kinds, tuple(remarks))


def _without_text(corpus: Corpus, skipped: int, kinds: Kinds, remarks: list[Remark]) -> BadInput:
    encoding = corpus.encoding.upper()
    if corpus.source == "jsonl":
        got = f"{corpus.label}: {counted(skipped, 'line')}, all empty"
    else:
        why = {remark.why for remark in remarks}
        got = f"{corpus.label}: {counted(skipped, 'file')}, none of them {encoding} text{f': {why.pop()}' if len(why) == 1 else ''}"
    fix = kinds.advice or "name a file or folder that holds text"
    return BadInput("data.path", got=got, needed=f"text in {encoding}, or *.jsonl", fix=fix)


def _stat(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except OSError as error:
        raise unreadable(path, error) from None


def split_documents(corpus: Corpus, validation_share: float, *, split: str) -> Iterator[tuple[Side, str]]:
    """Yield (side, text) of every document, in the corpus's order. If `split` is position, every document is cut into a text for each
    side."""
    for key, text, _ in (document for name in corpus.names for document in read_file(corpus, name)):
        if text is not None and split != "position":
            yield side_of(key, validation_share), text
        elif text is not None:
            at = cut(text, validation_share)
            yield from ((side, part) for side, part in zip(SIDES, (text[:at], text[at:]), strict=True) if part)


def cut(text: str, validation_share: float) -> int:
    """Return the index of the first held-out character of a text. The last `validation_share` of the text is held out; the index is moved
    to the nearest start of a line if one is near."""
    at = int(len(text) * (1 - validation_share))
    reach = int(len(text) * min(validation_share, 1 - validation_share) / 2)
    ends = (text.rfind("\n", max(at - reach, 0), at), text.find("\n", at, at + reach))
    return min((end + 1 for end in ends if end >= 0), key=lambda end: abs(end - at), default=at)


def content_hash(corpus: Corpus) -> str:
    """Return the SHA-256 of all files' relative paths and contents, which does not depend on the machine."""
    whole = hashlib.sha256()
    for name in corpus.names:
        path = corpus.root / name
        try:
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").digest()
        except OSError as error:
            raise unreadable(path, error) from None
        whole.update(os.fsencode(name) + b"\0" + digest)
    return whole.hexdigest()


class Stamp(NamedTuple):
    """Fingerprint of files, taken without reading them. size_bytes: of all files together. changed_ns: time of the latest change of any
    file, in nanoseconds. identity: hash of all names, sizes and times."""

    size_bytes: int
    changed_ns: int
    identity: str


def stamp(corpus: Corpus) -> Stamp:
    """Return the stamp of all files. It includes ctime: after a change a program can set mtime back, but not ctime."""
    whole, size_bytes, changed_ns = hashlib.sha256(os.fsencode(corpus.root.resolve())), 0, 0
    for name in corpus.names:
        path = corpus.root / name
        found = _stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise BadInput(
                f"data file {path}", got="a path that is no longer a regular file", needed="a file that stays unchanged", fix="start again"
            )
        size_bytes += found.st_size
        changed_ns = max(changed_ns, found.st_mtime_ns, found.st_ctime_ns)
        whole.update(repr((name, found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)).encode("utf-8", "surrogateescape"))
    return Stamp(size_bytes, changed_ns, whole.hexdigest())
