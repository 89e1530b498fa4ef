"""Reads tables of separated values (CSV, TSV), also compressed: a first line with the names of the columns, then one document per row.

    id,text
    1,"words, and ""more"" of them
    on two lines"

RFC 4180: a field in quotes may hold separators, ends of lines and doubled quotes. The separator of *.tsv is the tab.
That of *.csv is the most frequent of comma, semicolon and tab in the first line. One row is in memory at a time.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from moe.data import formats
from parallel.errors import BadInput, did_you_mean
from parallel.fixes import Set
from parallel.store.files import UTF_8

SEPARATED = (".csv", ".tsv")


def is_separated(name: str) -> bool:
    return PurePosixPath(formats.unpacked_name(name)).suffix.lower() in SEPARATED


def columns(path: Path, encoding: str) -> list[str]:
    """Return the names in a table's first line; [] for an empty file. Raises BadInput for a file that is no table in this encoding."""
    with _rows(path, encoding) as rows:
        return next(rows, [])


def texts(path: Path, column: formats.TextKey, encoding: str) -> Iterator[str | None]:
    """Yield the texts of a table's column, in order; None for an empty field. Raises BadInput for a missing column, a row with
    too few or too many fields, and a file that is no table in this encoding."""
    with _rows(path, encoding) as rows:
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
def _rows(path: Path, encoding: str) -> Iterator[Any]:
    """Return a context with an iterator over the rows of a table. The context raises BadInput if a row cannot be read."""
    csv.field_size_limit(formats.LONGEST_BYTES)
    with formats.decoding(path, encoding):
        first = next(_lines(path, encoding), "")
        tabs = PurePosixPath(formats.unpacked_name(path.name)).suffix.lower() == ".tsv"
        reader = csv.reader(_lines(path, encoding), delimiter="\t" if tabs else max(",;\t", key=first.count), strict=True)
        try:
            yield reader
        except csv.Error as error:
            got, fix = f"no table ({error})", "correct this row" | Set("data.source", "text", said="text, to read the file as plain text")
            raise BadInput(f"{path}, line {reader.line_num}", got=got, needed="rows of separated values", fix=fix) from None


def _lines(path: Path, encoding: str) -> Iterator[str]:
    with formats.opened(path) as file:
        lines = io.TextIOWrapper(file, encoding="utf-8-sig" if encoding == UTF_8 else encoding, newline="")
        while line := lines.readline(formats.LONGEST_BYTES + 1):
            if len(line) > formats.LONGEST_BYTES:
                raise formats.too_long(path, "a line", "write one document per row")
            yield line
