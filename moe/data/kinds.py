"""Kinds and sizes of a folder's files: read as text or skipped, and whether that is plausible.

If more bytes are skipped than read, the folder is refused, unless the recipe asks for its text alone (data.source). Its texts are likely in
another form, and training would use only a README. In a dataset saved by `datasets`, the files named in its state are read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from parallel.errors import BadInput, plain
from parallel.fixes import Fix, Remove, Set, Words, typed
from parallel.store.files import read_text

LINK = "/"  # suffix of the name of a linked folder, which is not followed
_SHOWN = 4
# formats with texts that are not read here, and advice on them
ADVICE = {
    **dict.fromkeys(
        (".parquet", ".arrow", ".feather"),
        Words("remove data.source: the rows of tables are read if it does not ask for text", Remove("data.source")),
    ),
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z"), Words("unpack it first")),
}
SAVED_TO_DISK, SAVED_STATE = "dataset_info.json", "state.json"


@dataclass
class Kinds:
    """Files and bytes of each kind, read and skipped."""

    read: Counter[str] = field(default_factory=Counter)
    read_bytes: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    skipped_bytes: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, size_bytes: int, *, read: bool) -> None:
        kind = kind_of(name)
        (self.read if read else self.skipped)[kind] += 1
        (self.read_bytes if read else self.skipped_bytes)[kind] += size_bytes

    def __str__(self) -> str:
        skipped = f"; skipped {_listed(self.skipped, self.skipped_bytes)}" if self.skipped else ""
        return f"read {_listed(self.read, self.read_bytes) or 'nothing'}{skipped}"

    @property
    def advice(self) -> Fix | None:
        """Advice on the kind with the most skipped bytes; None without advice."""
        kinds = [kind for kind, _ in self.skipped_bytes.most_common() if kind in ADVICE]
        return ADVICE[kinds[0]] if kinds else None


def kind_of(name: str) -> str:
    """Return a name's ending with its dot; the whole name if it has none."""
    if name.endswith(LINK):
        return "linked folder"
    path = PurePosixPath(name)
    return plain(path.suffix.lower() or path.name)


def check_kinds(kinds: Kinds, *, path: str, text_alone: bool) -> None:
    """Refuse a folder with texts in another form. `text_alone`: the recipe asks for its plain text alone. Raises BadInput."""
    more = kinds.skipped_bytes.total() > kinds.read_bytes.total()
    if not (more and (kinds.advice or not text_alone)):
        return
    text = Set("data.source", "text", said="text to read the text in it and leave the rest")
    raise BadInput(
        "data.path",
        got=f"{path}, of which more is skipped than read ({kinds})",
        needed="UTF-8 text, *.jsonl or tables",
        fix=kinds.advice or "name a file, or a folder with text alone" | text,
    )


def saved_files(path: Path, names: Sequence[str]) -> list[str]:
    """Return a folder's files unchanged; in a dataset saved by `datasets`, the files of its rows. Raises BadInput for several datasets."""
    saved = [PurePosixPath(name).parent for name in names if PurePosixPath(name).name == SAVED_STATE]
    saved = [folder for folder in saved if str(folder / SAVED_TO_DISK) in names]
    if not saved:
        return list(names)
    if saved[0] != PurePosixPath("."):
        raise BadInput("data.path", got=f"{path}, which holds saved datasets", needed="one", fix=typed({"data.path": str(path / saved[0])}))
    try:
        files = [str(entry["filename"]) for entry in json.loads(read_text(path / SAVED_STATE))["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        files = []
    missing = next((name for name in files if name not in names), None if files else "a list of files in it")
    if missing:
        got = f"a saved dataset without {missing}"
        raise BadInput(f"data file {path / SAVED_STATE}", got=got, needed="a dataset as it was saved", fix="save it again")
    return files


def _listed(files: Counter[str], sizes: Counter[str]) -> str:
    """Format as `3 .parquet (512 MB), 1 .md (2 kB)`, the largest first."""
    kinds = sorted(files, key=lambda kind: (-sizes[kind], kind))
    shown = [f"{files[kind]:,} {kind} ({size(sizes[kind])})" for kind in kinds[:_SHOWN]]
    rest = kinds[_SHOWN:]
    shown += (
        [f"{sum(files[kind] for kind in rest):,} of {len(rest)} other kinds ({size(sum(sizes[kind] for kind in rest))})"] if rest else []
    )
    return ", ".join(shown)


def size(num_bytes: int) -> str:
    """Format bytes in decimal units, as disks and the docs count: 9.9 MB."""
    unit = next((u for u in (9, 6, 3) if num_bytes >= 10**u), 0)
    return f"{num_bytes / 10**unit:.{1 if unit else 0}f} {('B', 'kB', 'MB', 'GB')[unit // 3]}"
