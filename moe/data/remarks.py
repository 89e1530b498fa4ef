"""Files of a user's text that were skipped, or read as plain text although they are another format: names and reasons.

data: skipped notes/old.txt: not UTF-8, likely Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8 converts it) data: read notes/table.csv as plain
text: its separators become text, too; JSONL or Parquet has a column for the text

A run prints them at each start, in at most ten lines, one of each reason first; `data_files.txt` in its folder lists all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from parallel.errors import plain

LISTING = "data_files.txt"
SKIPPED, AS_TEXT = "skipped", "as plain text"
WINDOWS = "not UTF-8, likely Windows-1252 (iconv -f WINDOWS-1252 -t UTF-8 converts it)"
NO_TEXT = "no text in it"
UNREADABLE = "this user may not read it"
LINKED = "a link to a folder, which is not followed"
_LINES = 10
# contents other than text in files that are read as plain text, by kind
_RAW = {
    **dict.fromkeys((".csv", ".tsv"), "its separators become text, too; JSONL or Parquet has a column for the text"),
    **dict.fromkeys((".html", ".htm", ".xhtml", ".xml", ".svg"), "its tags become text, too"),
    **dict.fromkeys((".json", ".ipynb"), "JSON's syntax becomes text, too; *.jsonl has a document on each line"),
    ".rtf": "its commands become text, too",
}


class Remark(NamedTuple):
    """One file. `what`: SKIPPED or AS_TEXT."""

    name: str
    what: str
    why: str


def raw(name: str) -> str | None:
    """Describe the markup that becomes text if a file of this name is read as text; None for plain text, judged by the name alone."""
    return _RAW.get(PurePosixPath(name).suffix.lower())


def decoded(content: bytes) -> tuple[str | None, str]:
    """Return UTF-8 text without a byte order mark and with unchanged line endings, or None and the reason.

    A NUL byte means binary, as in git: text never needs one, and token 0 must stay free to separate documents.
    """
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return None, "not UTF-8, likely UTF-16 (iconv -f UTF-16 -t UTF-8 converts it)"
    if b"\0" in content:
        return None, "binary"
    try:
        return (text, "") if (text := content.decode("utf-8-sig")) else (None, "empty")
    except UnicodeDecodeError:
        return None, WINDOWS if _of_windows(content) else "not UTF-8"


def _of_windows(content: bytes) -> bool:
    """Return whether the bytes read as Western European text: no control characters, and most of it ASCII."""
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c.isspace() for c in text) and sum(c.isascii() for c in text) > len(text) / 2


def with_left_out(index: dict[str, Any], *, label: str, left_out: Sequence[Remark]) -> dict[str, Any]:
    """Return the index with the present corpus's label and left-out files. The same text may have been elsewhere when the index was
    written."""
    return index | {"corpus": index["corpus"] | {"label": label}, "remarks": [*left_out, *index.get("remarks", ())]}


def remarks(index: dict[str, Any]) -> list[Remark]:
    """Return the remarks in the index of opened data, with whole paths."""
    if "sources" in index:
        return [remark for each in index["sources"] for remark in remarks(each)]
    label = str(index.get("corpus", {}).get("label", ""))
    found = (Remark(*entry) for entry in index.get("remarks", ()))
    return [remark._replace(name=label if Path(label).name == remark.name else f"{label}/{remark.name}") for remark in found]


def remark_lines(index: dict[str, Any], listing: Path | None = None) -> list[str]:
    """Return at most ten lines. If there are more files, the last line gives their number, and the listing."""
    found = _one_of_each_first(remarks(index))
    shown = found if len(found) <= _LINES else found[: _LINES - 1]
    more = len(found) - len(shown)
    return [_line(remark) for remark in shown] + ([f"data: and {more:,} more{f': {listing} lists all' if listing else ''}"] if more else [])


def list_in(folder: Path, index: dict[str, Any]) -> None:
    """Write all remarks into a run's folder, a line each; without any, remove the file."""
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
