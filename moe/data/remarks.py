"""Remarks on files of a user's text that were skipped, or read as plain text although they have another format.

    data: skipped notes/old.txt: not UTF-8, likely Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8 converts it)
    data: read notes/table.csv as plain text: its separators become text, too; data.text_key may name a column that has the text

A run prints such remarks at each start, in at most ten lines, first one file for each reason. `data_files.txt` in the run's folder lists
all files. A folder is refused if more of its bytes are skipped than read: its texts are likely in a format that is not read, and training
would use only, for example, a README. If the recipe sets data.source, such a folder is refused only if a skipped file is compressed, or
a Parquet or Arrow table (_ADVICE).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from parallel.errors import BadInput, plain
from parallel.fixes import Fix, Remove, Set, Words
from parallel.store.files import UTF_8

LISTING = "data_files.txt"
SKIPPED, AS_TEXT = "skipped", "as plain text"
WINDOWS = "not UTF-8, likely Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8 converts it)"
NO_TEXT = "no text in it"
UNREADABLE = "this user may not read it"
LINKED = "a link to a folder, which is not followed"
DANGLING = "a link to a file that is not there"
NO_FILE = "not a regular file"
LINK = "/"  # added to the name of a link to a folder; such links are not followed
_LINES = 10
_SHOWN = 4  # number of kinds of files that a line lists
# kind of file -> the markup that becomes text if such a file is read as plain text
_RAW = {
    **dict.fromkeys((".csv", ".tsv"), "its separators become text, too; data.text_key may name a column that has the text"),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xml", ".svg"), "its tags become text, too"),
    **dict.fromkeys((".json", ".ipynb"), "JSON's syntax becomes text, too; *.jsonl has a document on each line"),
    ".rtf": "its commands become text, too",
}
_ROWS_TOO = Words("remove data.source: without it, the rows of tables are read", Remove("data.source"))
# kind of file with texts that this project cannot read -> advice
_ADVICE = {
    **dict.fromkeys((".parquet", ".arrow", ".feather"), _ROWS_TOO),
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z"), Words("unpack it first")),
}


class Remark(NamedTuple):
    """A remark on the file `name`, a path in the user's folder. `what`: SKIPPED or AS_TEXT. `why`: the reason."""

    name: str
    what: str
    why: str


def raw(name: str) -> str | None:
    """Return a remark on the markup that becomes text if a file of this name is read as text; None if it has no markup. Only the name is
    checked."""
    return _RAW.get(PurePosixPath(name).suffix.lower())


def decoded(content: bytes, encoding: str = UTF_8) -> tuple[str | None, str]:
    """Decode a text: return (text without a byte order mark and with unchanged line endings, ""), or (None, the reason). A file with a NUL
    byte counts as binary, as in git, because token 0 separates documents."""
    if encoding != UTF_8:
        try:
            text = content.decode(encoding).removeprefix("\ufeff")
        except UnicodeError:
            return None, f"not {encoding}, which data.encoding names"
        return (None, "binary") if "\0" in text else (text, "") if text else (None, "empty")
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None, "not UTF-8, likely UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)"
    if b"\0" in content:
        return None, "binary"
    try:
        return (text, "") if (text := content.decode("utf-8-sig")) else (None, "empty")
    except UnicodeDecodeError:
        return None, WINDOWS if _of_windows(content) else "not UTF-8"


def _of_windows(content: bytes) -> bool:
    """Return whether the bytes are likely Western European text in Windows-1252: no control characters, and mostly ASCII."""
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c.isspace() for c in text) and sum(c.isascii() for c in text) > len(text) / 2


def with_left_out(index: dict[str, Any], *, label: str, left_out: Sequence[Remark]) -> dict[str, Any]:
    """Return the index of token files with `label` (the text's name in messages) and remarks on the files that were left out. Neither is
    stored in index.json, because the token files may have been built from another folder with the same text."""
    return index | {"corpus": index["corpus"] | {"label": label}, "remarks": [*left_out, *index.get("remarks", ())]}


def remarks(index: dict[str, Any]) -> list[Remark]:
    """Return the remarks in the index of opened data. Their paths begin with the user's data.path."""
    if "sources" in index:
        return [remark for each in index["sources"] for remark in remarks(each)]
    label = str(index.get("corpus", {}).get("label", ""))
    found = (Remark(*entry) for entry in index.get("remarks", ()))
    return [remark._replace(name=label if Path(label).name == remark.name else f"{label}/{remark.name}") for remark in found]


def remark_lines(index: dict[str, Any], listing: Path | None = None) -> list[str]:
    """Return the remarks in `index`, the index of opened data, as at most ten lines. If there are more remarks, the last line counts the
    others and names the file `listing`."""
    found = _one_of_each_first(remarks(index))
    shown = found if len(found) <= _LINES else found[: _LINES - 1]
    more = len(found) - len(shown)
    return [_line(remark) for remark in shown] + ([f"data: and {more:,} more{f': {listing} lists all' if listing else ''}"] if more else [])


def list_in(folder: Path, index: dict[str, Any]) -> None:
    """Write all remarks in `index`, the index of opened data, into data_files.txt in a run's folder, one a line. Without remarks, remove
    this file."""
    found, path = remarks(index), folder / LISTING
    if found:
        path.write_text("".join(f"{_line(remark)}\n" for remark in found))
    else:
        path.unlink(missing_ok=True)


def _line(remark: Remark) -> str:
    did = f"skipped {remark.name}" if remark.what == SKIPPED else f"read {remark.name} as plain text"
    return plain(f"data: {did}: {remark.why}")


def _one_of_each_first(found: Iterable[Remark]) -> list[Remark]:
    seen: Counter[str] = Counter()
    numbered = []
    for remark in found:
        numbered.append((seen[remark.why], remark))
        seen[remark.why] += 1
    return [remark for _, remark in sorted(numbered, key=lambda pair: pair[0])]


@dataclass
class Kinds:
    """Files that were read or skipped: kind of file, such as `.txt` -> size in bytes of each file of this kind."""

    read: dict[str, list[int]] = field(default_factory=dict)
    skipped: dict[str, list[int]] = field(default_factory=dict)

    def add(self, name: str, size_bytes: int, *, read: bool) -> None:
        path = PurePosixPath(name)
        kind = "linked folder" if name.endswith(LINK) else plain(path.suffix.lower() or path.name)
        (self.read if read else self.skipped).setdefault(kind, []).append(size_bytes)

    def __str__(self) -> str:
        skipped = f"; skipped {_listed(self.skipped)}" if self.skipped else ""
        return f"read {_listed(self.read) or 'nothing'}{skipped}"

    @property
    def advice(self) -> Fix | None:
        """Return the advice for the kind of file in _ADVICE with the most skipped bytes; None if no such file was skipped."""
        return next((_ADVICE[kind] for kind in _largest_first(self.skipped) if kind in _ADVICE), None)


def check_kinds(kinds: Kinds, *, path: str, source_set: bool, encoding: str) -> None:
    """Raise BadInput for a folder if more bytes of it were skipped than read. `source_set`: the recipe sets data.source, so other formats
    are skipped on purpose; then raise only if a skipped file is of a kind that cannot be read as it is (_ADVICE), such as an archive."""
    more = sum(map(sum, kinds.skipped.values())) > sum(map(sum, kinds.read.values()))
    if more and (kinds.advice or not source_set):
        text = Set("data.source", "text", said="text to read the text in it and leave the rest")
        got, needed = f"{path}, of which more is skipped than read ({kinds})", f"{encoding.upper()} text, *.jsonl or tables"
        raise BadInput("data.path", got=got, needed=needed, fix=kinds.advice or "name a file, or a folder with text alone" | text)


def _largest_first(sizes: Mapping[str, list[int]]) -> list[str]:
    return sorted(sizes, key=lambda kind: -sum(sizes[kind]))


def _listed(sizes: Mapping[str, list[int]]) -> str:
    """Format `sizes`, kind of file -> sizes in bytes, as `3 .parquet (512 MB), 1 .md (2 kB)`: the kind with the most bytes first."""
    kinds = _largest_first(dict(sorted(sizes.items())))
    shown = [f"{len(sizes[kind]):,} {kind} ({_size(sum(sizes[kind]))})" for kind in kinds[:_SHOWN]]
    rest = [size for kind in kinds[_SHOWN:] for size in sizes[kind]]
    return ", ".join(shown + [f"{len(rest):,} of {len(kinds) - _SHOWN} other kinds ({_size(sum(rest))})"] * bool(rest))


def _size(num_bytes: int) -> str:
    """Format bytes in decimal units, as disks and the docs count: 9.9 MB."""
    unit = next((u for u in (9, 6, 3) if num_bytes >= 10**u), 0)
    return f"{num_bytes / 10**unit:.{1 if unit else 0}f} {('B', 'kB', 'MB', 'GB')[unit // 3]}"
