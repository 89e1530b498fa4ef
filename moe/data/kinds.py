"""What a folder's files are, by kind and size: which were read as text, which were not, and whether that can be what was meant.

A folder of Parquet files with a README reads as one small text; so does what `datasets` saves to disk. Such a folder is refused with the
way to make text of it. So is every folder of which more is skipped than read, unless the recipe asks for its text alone (data.source).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from parallel.errors import BadInput

LINK = "/"  # ends the name of a link to a folder, which is not followed
_SHOWN = 4
_PACKED = "unpack it first"
# formats that hold texts which nobody reads here, and what to do with them; {} is the path
ADVICE = {
    ".parquet": """write its texts as JSONL: pandas.read_parquet("{}").to_json("text.jsonl", orient="records", lines=True)""",
    ".arrow": """write its texts as JSONL: datasets.load_from_disk("{}").to_json("text.jsonl")""",
    ".feather": """write its texts as JSONL: pandas.read_feather("{}").to_json("text.jsonl", orient="records", lines=True)""",
    **dict.fromkeys((".gz", ".zst", ".xz", ".bz2", ".zip", ".tar", ".tgz", ".7z"), _PACKED),
}
SAVED_TO_DISK = "dataset_info.json"


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
    return path.suffix.lower() or path.name


def check_kinds(kinds: Kinds, names: Sequence[str], *, path: str, text_alone: bool) -> None:
    """Refuse a folder that holds its texts in another form. `text_alone`: the recipe asks for what is text in it. Raises BadInput."""
    saved = any(PurePosixPath(name).name == SAVED_TO_DISK for name in names) and ".arrow" in kinds.skipped
    more = kinds.skipped_bytes.total() > kinds.read_bytes.total()
    if not saved and not (more and (kinds.advice or not text_alone)):
        return
    alone = "name a file, or a folder with text alone, or add --data.source text to read the text in it and leave the rest"
    raise BadInput(
        "data.path",
        got=f"{path}, {'a dataset saved to disk' if saved else 'of which more is skipped than read'} ({kinds})",
        needed="UTF-8 text, or *.jsonl",
        fix=kinds.advice.format(path) if kinds.advice else alone,
    )


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
