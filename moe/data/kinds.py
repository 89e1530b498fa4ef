"""What a folder's files are, by kind and size: which were read as text, which were not, and whether that can be what was meant.

A folder of which more is skipped than read is refused, unless the recipe asks for its text alone (data.source): its texts are likely in
another form, and training would go on, on a README. Of what `datasets` saves to disk, the files that its state names are read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from parallel.errors import BadInput, plain
from parallel.files import read_text

LINK = "/"  # ends the name of a link to a folder, which is not followed
_SHOWN = 4
_PACKED = "unpack it first"
# formats that hold texts which nobody reads here, and what to do with them; {} is the path
ADVICE = {
    **dict.fromkeys(
        (".parquet", ".arrow", ".feather"), "leave data.source out: the rows of tables are read where it does not ask for text"
    ),
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z"), _PACKED),
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
    def advice(self) -> str | None:
        """What to do with the largest part of what was skipped; None if nothing is known about it."""
        kinds = [kind for kind, _ in self.skipped_bytes.most_common() if kind in ADVICE]
        return ADVICE[kinds[0]] if kinds else None


def kind_of(name: str) -> str:
    """A name's ending with its dot; the whole name where it has none."""
    if name.endswith(LINK):
        return "linked folder"
    path = PurePosixPath(name)
    return plain(path.suffix.lower() or path.name)


def check_kinds(kinds: Kinds, *, path: str, text_alone: bool) -> None:
    """Refuse a folder that holds its texts in another form. `text_alone`: the recipe asks for what is text in it. Raises BadInput."""
    more = kinds.skipped_bytes.total() > kinds.read_bytes.total()
    if not (more and (kinds.advice or not text_alone)):
        return
    alone = "name a file, or a folder with text alone, or add --data.source text to read the text in it and leave the rest"
    raise BadInput(
        "data.path",
        got=f"{path}, of which more is skipped than read ({kinds})",
        needed="UTF-8 text, *.jsonl or tables",
        fix=kinds.advice.format(path) if kinds.advice else alone,
    )


def saved_files(path: Path, names: Sequence[str]) -> list[str]:
    """A folder's files, as they are; of a dataset that `datasets` saved there, those of its rows. Raises BadInput for several of them."""
    saved = [PurePosixPath(name).parent for name in names if PurePosixPath(name).name == SAVED_STATE]
    saved = [folder for folder in saved if str(folder / SAVED_TO_DISK) in names]
    if not saved:
        return list(names)
    if saved[0] != PurePosixPath("."):
        raise BadInput("data.path", got=f"{path}, which holds saved datasets", needed="one", fix=f"--data.path {path / saved[0]}")
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
    """`3 .parquet (512 MB), 1 .md (2 kB)`, the largest first."""
    kinds = sorted(files, key=lambda kind: (-sizes[kind], kind))
    shown = [f"{files[kind]:,} {kind} ({size(sizes[kind])})" for kind in kinds[:_SHOWN]]
    rest = kinds[_SHOWN:]
    shown += (
        [f"{sum(files[kind] for kind in rest):,} of {len(rest)} other kinds ({size(sum(sizes[kind] for kind in rest))})"] if rest else []
    )
    return ", ".join(shown)


def size(num_bytes: int) -> str:
    """In decimal units, as disks and the docs count: 9.9 MB."""
    unit = next((u for u in (9, 6, 3) if num_bytes >= 10**u), 0)
    return f"{num_bytes / 10**unit:.{1 if unit else 0}f} {('B', 'kB', 'MB', 'GB')[unit // 3]}"
