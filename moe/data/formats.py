"""Reads files that are not plain text: compressed files, as a stream, and tables (Parquet, Arrow, separated values), row by row.

    a.txt.gz  a.jsonl.zst     unpacked in small pieces while they are read, so memory does not grow with the unpacked size
    a.parquet  a.arrow        one column, a few rows at a time; Arrow's file format and its stream format (which `datasets` saves)
    a.csv  a.tsv              one row at a time, also compressed; the first line has the names of the columns. The separator of *.tsv is
                              the tab, that of *.csv the most frequent of comma, semicolon and tab in the first line

A small compressed file may unpack to any size, so the size of a document, line or cell is limited. BadInput is raised for a truncated or
damaged file, and if the package that reads its format is not installed. Formats: RFC 1952 (gzip), RFC 8878 (Zstandard), RFC 4180 (separated
values: a field in quotes may hold separators, ends of lines and doubled quotes).
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from parallel.errors import BadInput, did_you_mean
from parallel.fixes import Fix, Set, typed
from parallel.store.files import UTF_8, read_text

PACKED = (".gz", ".zst")
JSONL = (".jsonl", ".ndjson", ".jsonlines")
TABLES = (".parquet", ".arrow", ".feather")
SEPARATED = (".csv", ".tsv")
FIRST = 8  # number of documents, or chats, that are read to check a file before long work
LONGEST_BYTES = 256 << 20  # limit of one unpacked document, line or cell
_ZST_READ_BYTES = 1024  # compressed bytes in a read: few, because 4 bytes can unpack to 128 KiB
_ZST_WINDOW_BYTES = 1 << 31  # the longest window that the zstd program writes (--long=31)
_ROWS = 16  # rows of a Parquet file in a read: few, because a row can have any size
_PARQUET_READ_BYTES = 1 << 16
_ARROW_FILE = b"ARROW1"  # first bytes of Arrow's file format, but not of its stream format
SAVED_TO_DISK, SAVED_STATE = "dataset_info.json", "state.json"  # files that `save_to_disk` of `datasets` writes into its folder


class TextKey(NamedTuple):
    """Name of the JSON key or column that has the text. `set_by`: the recipe's setting that gives this name. `alone`: whether at
    most one file of the data is JSONL or a table. If several are, all of them must have this key."""

    name: str
    set_by: str = "data.text_key"
    alone: bool = True

    def fix(self, near: str | None) -> Fix:
        """Return the fix for a file that lacks this key. `near`: a key that the file has and that is likely meant; None: unknown."""
        values, value = (near,) if near else (), near or "the name of the one that holds the text"
        if self.alone:
            return Set(self.set_by, *values, said=value)
        others = "name the files in data.sources, each with a text_key of its own"
        return Set(self.set_by, *values, said=f"{value} if all files have it") | others


def unpacked_name(name: str) -> str:
    """Return the name without the ending of its compression: a.jsonl.gz -> a.jsonl."""
    path = PurePosixPath(name)
    return str(path.with_suffix("")) if path.suffix.lower() in PACKED else name


def is_jsonl(name: str) -> bool:
    """Return whether the name is that of a file, perhaps compressed, with a JSON object on each line."""
    return PurePosixPath(unpacked_name(name)).suffix.lower() in JSONL


def is_table(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() in TABLES


def saved_files(path: Path, names: Sequence[str]) -> list[str]:
    """Return the files to read among the `names` in a folder: all, or only the ones in state.json if the package `datasets` saved the
    folder. Raises BadInput if saved datasets are in subfolders, and for a saved dataset with missing files."""
    saved = [PurePosixPath(name).parent for name in names if PurePosixPath(name).name == SAVED_STATE]
    saved = [folder for folder in saved if str(folder / SAVED_TO_DISK) in names]
    if not saved:
        return list(names)
    if saved[0] != PurePosixPath("."):
        got, fix = f"{path}, which holds saved datasets", typed({"data.path": str(path / saved[0])})
        raise BadInput("data.path", got=got, needed="the folder of one dataset", fix=fix)
    try:
        files = [str(entry["filename"]) for entry in json.loads(read_text(path / SAVED_STATE))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        files = []
    missing = next((name for name in files if name not in names), None if files else "a list of files in it")
    if missing:
        got = f"a saved dataset without {missing}"
        raise BadInput(f"data file {path / SAVED_STATE}", got=got, needed="a dataset as it was saved", fix="save it again")
    return files


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading its unpacked bytes. Raises BadInput if it is damaged, OSError if it cannot be read."""
    kind = path.suffix.lower()
    try:
        if kind == ".gz":
            with gzip.open(path, "rb") as packed:
                yield packed  # type: ignore[misc]
        elif kind == ".zst":
            with path.open("rb") as file, io.BufferedReader(_Zst(file, path), 1 << 16) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            with path.open("rb") as file:
                yield file
    except EOFError:
        raise damaged(path, "a file that ends in the middle") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise damaged(path, f"no whole gzip file ({error})") from None


def whole(path: Path) -> bytes:
    """Read and unpack an entire file. Raises BadInput if a compressed file exceeds the limit of a document."""
    with opened(path) as file:
        if path.suffix.lower() not in PACKED:
            return file.read()
        content = file.read(LONGEST_BYTES + 1)
    if len(content) > LONGEST_BYTES:
        raise too_long(path, "a text", "unpack the file, or write its documents as JSONL (*.jsonl.gz), one per line")
    return content


@contextlib.contextmanager
def decoding(path: Path, encoding: str) -> Iterator[None]:
    """Return a context in which an error of decoding text becomes BadInput."""
    try:
        yield
    except UnicodeError as error:
        fix = Set("data.encoding", said="the encoding in which the file was written")
        raise BadInput(f"data file {path}", got=f"a text that is not {encoding} ({error})", needed=f"{encoding}", fix=fix) from None


def lines(path: Path, encoding: str = UTF_8) -> Iterator[bytes]:
    """Yield a file's lines as UTF-8 bytes. Raises BadInput for a line of a compressed file that exceeds the limit of a document and, if
    `encoding` is not UTF-8, for a line that cannot be decoded."""
    limit = LONGEST_BYTES + 1 if path.suffix.lower() in PACKED else -1  # in bytes (characters if `encoding` is not UTF-8); -1: none
    with opened(path) as file, decoding(path, encoding):
        source = file if encoding == UTF_8 else io.TextIOWrapper(file, encoding=encoding, newline="\n")
        while line := source.readline(limit):
            if len(line) == limit:
                raise too_long(path, "a line", "write one document per line")
            yield line if isinstance(line, bytes) else line.encode()


def damaged(path: Path, got: str) -> BadInput:
    return BadInput(f"data file {path}", got=got, needed="the file as it was written", fix="copy or download it again")


def too_long(path: Path, what: str, fix: str) -> BadInput:
    limit = f"{LONGEST_BYTES >> 20} MiB"
    return BadInput(f"data file {path}", got=f"{what} of more than {limit}", needed=f"at most {limit}", fix=fix)


def needed_package(name: str, path: Path, *, module: str | None = None) -> Any:
    """Import an optional package's module. Raises BadInput with the command that installs it."""
    try:
        return import_module(module or name)
    except ImportError:
        needed, fix = "this package, to read the file's format", f"pip install {name}"
        raise BadInput(f"data file {path}", got=f"no package {name}", needed=needed, fix=fix) from None


class _Zst(io.RawIOBase):
    """A file of Zstandard frames, which is unpacked as it is read. The library's own reader does not notice a truncated file."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self.file, self.path, self.library = file, path, needed_package("zstandard", path)
        self.frame: Any = None  # None: between two frames
        self.packed = b""
        self.ready = memoryview(b"")  # unpacked bytes that are not read yet

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self.ready:
            self.packed = self.packed or self.file.read(_ZST_READ_BYTES)
            if not self.packed:
                if self.frame is not None:
                    raise EOFError
                return 0
            self.frame = self.frame or self.library.ZstdDecompressor(max_window_size=_ZST_WINDOW_BYTES).decompressobj()
            try:
                self.ready = memoryview(self.frame.decompress(self.packed))
            except self.library.ZstdError as error:
                raise damaged(self.path, f"no whole Zstandard file ({error})") from None
            self.packed = self.frame.unused_data if self.frame.eof else b""
            self.frame = None if self.frame.eof else self.frame
        size = min(len(into), len(self.ready))
        into[:size], self.ready = self.ready[:size], self.ready[size:]
        return size


def texts(path: Path, column: TextKey, encoding: str = UTF_8) -> Iterator[str | None]:
    """Yield the texts of a table's column, in order; None for an empty cell. encoding: of separated values. Raises BadInput for a damaged
    table, a missing column, a column that has no strings, and a cell that is not UTF-8 or exceeds the limit of a document."""
    if is_separated(path.name):
        yield from _separated_texts(path, column, encoding)
        return
    with _table(path, f"data file {path}, column {column.name}") as arrow:
        for batch in _batches(path, column):
            yield from _strings(batch, path, column, arrow)


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield a table's rows, in order. Raises BadInput for a damaged table and a cell that is not UTF-8."""
    with _table(path, f"data file {path}"):
        for batch in _batches(path, None):
            for start in range(0, len(batch), _ROWS):  # _ROWS at a time: a batch may have all rows of a table that `datasets` saved
                yield from batch.slice(start, _ROWS).to_pylist()


@contextlib.contextmanager
def _table(path: Path, what: str) -> Iterator[Any]:
    """Return a context that gives the module pyarrow and turns its errors into BadInput. what: beginning of a message about a cell."""
    arrow = needed_package("pyarrow", path)
    try:
        yield arrow
    except UnicodeDecodeError as error:
        got, fix = f"a cell that is no UTF-8 ({error.reason})", "write the column again, as UTF-8"
        raise BadInput(what, got=got, needed="text in UTF-8", fix=fix) from None
    except (arrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the operating system; the library's errors have no errno
            raise
        raise damaged(path, f"no whole table ({str(error).splitlines()[0]})") from None


def _batches(path: Path, column: TextKey | None) -> Iterator[Any]:
    """Yield a table's batches of rows. `column`: the column to read; None: all columns."""
    if path.suffix.lower() == ".parquet":
        parquet = needed_package("pyarrow", path, module="pyarrow.parquet")
        with parquet.ParquetFile(str(path), buffer_size=_PARQUET_READ_BYTES) as table:
            _check_column(table.schema_arrow.names, path, column)
            yield from table.iter_batches(batch_size=_ROWS, columns=None if column is None else [column.name])
        return
    arrow, ipc = needed_package("pyarrow", path), needed_package("pyarrow", path, module="pyarrow.ipc")
    with path.open("rb") as file:
        as_file = file.read(len(_ARROW_FILE)) == _ARROW_FILE
    with arrow.memory_map(str(path)) as source:
        reader = ipc.open_file(source) if as_file else ipc.open_stream(source)
        _check_column(reader.schema.names, path, column)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches)) if as_file else reader


def _check_column(names: list[str], path: Path, column: TextKey | None) -> None:
    if column is not None and column.name not in names:
        fix = column.fix(did_you_mean(column.name, names))
        raise BadInput(f"data file {path}", got=f"columns {', '.join(names[:8])}", needed=f"the column {column.name}", fix=fix)


def _strings(batch: Any, path: Path, column: TextKey, arrow: Any) -> Iterator[str | None]:
    held = batch.column(batch.schema.names.index(column.name))
    if not any(check(held.type) for check in (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_null)):
        raise BadInput(f"data file {path}, column {column.name}", got=str(held.type), needed="strings", fix=column.fix(None))
    for cell in held:  # cell by cell, because a batch may have all rows of a table that `datasets` saved
        if cell.is_valid and cell.as_buffer().size > LONGEST_BYTES:
            raise too_long(path, "a cell", "write one document per row")
        yield cell.as_py()


def is_separated(name: str) -> bool:
    return PurePosixPath(unpacked_name(name)).suffix.lower() in SEPARATED


def columns(path: Path, encoding: str) -> list[str]:
    """Return the names in a table's first line; [] for an empty file. Raises BadInput for a file that is no table in this encoding."""
    with _separated(path, encoding) as rows:
        return next(rows, [])


def _separated_texts(path: Path, column: TextKey, encoding: str) -> Iterator[str | None]:
    """Yield the texts of a table's column, in order; None for an empty field. Raises BadInput for a missing column, a row with
    too few or too many fields, and a file that is no table in this encoding."""
    with _separated(path, encoding) as rows:
        names: list[str] = next(rows, [])
        if column.name not in names:
            fix = column.fix(did_you_mean(column.name, names)) | Set("data.source", "text", said="text, to read the file as plain text")
            raise BadInput(f"data file {path}", got=f"columns {', '.join(names[:8])}", needed=f"the column {column.name}", fix=fix)
        at = names.index(column.name)
        for row in rows:
            if row and len(row) != len(names):
                where, got = f"{path}, line {rows.line_num}", f"a row of {len(row)} fields"
                raise BadInput(
                    where, got=got, needed=f"{len(names)} fields, as in the first line", fix="correct this row, or put its text into quotes"
                )
            yield row[at] or None if row else None


@contextlib.contextmanager
def _separated(path: Path, encoding: str) -> Iterator[Any]:
    """Return a context with an iterator over the rows of a table. The context raises BadInput if a row cannot be read."""
    csv.field_size_limit(LONGEST_BYTES)
    with decoding(path, encoding):
        first = next(_text_lines(path, encoding), "")
        tabs = PurePosixPath(unpacked_name(path.name)).suffix.lower() == ".tsv"
        reader = csv.reader(_text_lines(path, encoding), delimiter="\t" if tabs else max(",;\t", key=first.count), strict=True)
        try:
            yield reader
        except csv.Error as error:
            got, fix = f"no table ({error})", "correct this row" | Set("data.source", "text", said="text, to read the file as plain text")
            raise BadInput(f"{path}, line {reader.line_num}", got=got, needed="rows of separated values", fix=fix) from None


def _text_lines(path: Path, encoding: str) -> Iterator[str]:
    with opened(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig" if encoding == UTF_8 else encoding, newline="")
        while line := lines.readline(LONGEST_BYTES + 1):
            if len(line) > LONGEST_BYTES:
                raise too_long(path, "a line", "write one document per row")
            yield line
